"""Starts rollouts in free slots, and claims blocks for slots that are free or will soon be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby

from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlock
from megaflow_hpc.pod.master.drain import Drain
from megaflow_hpc.pod.master.pod import Pod
from megaflow_hpc.pod.master.results import Results
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.scheduler import Scheduler, Work
from megaflow_hpc.rundir.events import StartEvent
from megaflow_hpc.types import Rollout

SOON_S = 1.0
SELDOM_S = 10.0
"""Maximum number of seconds between two attempts to claim, if a pod finds no block.

The wait starts at ``SOON_S`` and doubles. It is reset when the pod's last running rollout ends, because the campaign
then usually ends soon, and nodes must not idle.
"""
AWAITED_S = 0.25
LOOKS_PER_S = 40
"""Number of claims per second by all pods together, while a consumer such as a trainer is expected to add blocks. A
single pod waits between ``AWAITED_S`` and ``SOON_S`` seconds."""
MAX_DEFERRED_PER_SLOT = 4
"""Number of deferred rollouts per slot that a pod ignores in its queue when it decides whether to claim. Deferred
rollouts start only when nothing else can."""
AHEAD_ROLLOUTS = 256
"""Number of queued rollouts whose images rank 0 announces to the other ranks."""


def awaited_s(pods: int) -> float:
    """Returns the seconds between two claims of a pod, while a consumer such as a trainer is expected to add blocks."""
    return min(SOON_S, max(AWAITED_S, pods / LOOKS_PER_S))


class Dispatch:
    """Assigns rollouts to free slots, and claims blocks for slots that are free or will soon be."""

    def __init__(
        self, pod: Pod, scheduler: Scheduler, io: RunIo, results: Results, estimates: Estimates, drain: Drain
    ) -> None:
        self._pod, self._scheduler, self._io, self._results = pod, scheduler, io, results
        self._estimates, self._drain = estimates, drain
        self._look_s = SOON_S
        self._looked_at: float | None = None
        """Monotonic time of the last claim, if it found no block. Otherwise ``None``."""
        self._started = 0
        self._per_s = 0.0
        self._upcoming: tuple[PlannedTask, ...] = ()
        """Tasks of the blocks that this pod plans to claim next."""

    def start_all(self) -> bool:
        """Starts all rollouts that can start, and requests a block if slots stay free. Returns true if any rollout
        started."""
        self._claim()
        walltime = self._pod.walltime
        remaining_s = walltime.remaining_s
        started = 0
        while (next_ := self._scheduler.next(remaining_s, walltime.whole_s)) is not None:
            self._start(*next_)
            started += 1
        self._started += started
        return started > 0

    def tick(self, seconds: float) -> None:
        """Updates the measured number of starts per second. Call it every ``seconds`` seconds."""
        self._per_s, self._started = self._started / seconds, 0

    @property
    def nothing_free(self) -> bool:
        """True if the last claim found no free block."""
        return self._looked_at is not None

    def coming(self) -> list[str]:
        """Returns the image files of running rollouts and of those that this pod will start next."""
        tasks: list[PlannedTask] = [*self._scheduler.coming(AHEAD_ROLLOUTS), *self._upcoming]
        return list(dict.fromkeys(task.image for task in tasks if task.image))

    def look_soon(self) -> None:
        """Resets the wait between claims to its minimum."""
        self._look_s = SOON_S

    def _start(self, rank: int, work: Work) -> None:
        rollout = work.rollout
        history = self._results.histories.get(rollout.id)
        planned: PlannedTask = work.planned
        message = {
            "op": "start",
            "task": planned.task,
            "images": planned.images,
            "rollout": rollout.to_dict(),
            "attempt": work.attempt,
            "attempts": [vars(attempt) for attempt in history.attempts] if history else [],
            "epoch": work.epoch,
            "rank": rank,
            "checkpoint": history.partial if history else "",
            "job_id": self._pod.job_id,
        }
        self._pod.comm.send(rank, message)
        self._results.began[rollout.id] = time.monotonic()
        self._pod.events.write(StartEvent(id=rollout.id, rank=rank, attempt=work.attempt))
        if history is not None:
            history.partial = ""  # a checkpoint is used only once
        if self._results.grouped:
            self._results.groups.started(rollout.group_id, rollout.id)

    # --- claims ---

    def _claim(self) -> None:
        """Requests a block if the queue cannot fill the free slots.

        Also counts slots that will be free when the block arrives. Never requests more than that, because other pods
        cannot start rollouts that are queued in this pod.
        """
        ahead = int(2 * self._per_s * self._io.claim_s)
        scheduler = self._scheduler
        deferred = min(scheduler.deferred, MAX_DEFERRED_PER_SLOT * scheduler.workers.slots)
        if scheduler.queued - deferred >= scheduler.workers.free + ahead or self._io.claiming:
            return
        if not self._io.may_commit or scheduler.too_long:
            return
        if self._looked_at is None or time.monotonic() - self._looked_at >= self._look_s:
            self._io.claim()

    def claimed(self, block: ClaimedBlock | None) -> None:
        """Queues the rollouts of a claimed block. Does nothing if the claim found no block or the pod is draining."""
        if block is None:
            if self._io.state.seen.awaited:  # a consumer is expected to add blocks
                self._look_s = awaited_s(self._pod.pods)
            else:
                self._look_s = min(SELDOM_S, 2 * self._look_s) if self.nothing_free else SOON_S
            self._looked_at = time.monotonic()
            return
        self._looked_at = None
        self._upcoming = block.upcoming
        if self._drain.active:
            return  # the block is released when the pod leaves
        self._results.histories.update(block.histories)
        for _, group in groupby(block.rollouts, key=lambda rollout: rollout.group_id):
            self._scheduler.add(self._group(list(group), block))
        self._results.refuse()

    def _group(self, rollouts: list[Rollout], block: ClaimedBlock) -> Iterator[Work]:
        """Yields the queue entries for the rollouts of one group. They are samples of the same task."""
        first = rollouts[0]
        planned = block.tasks[first.task_id]
        demand = self._pod.demand(planned)
        # The group's other samples run in other pods. They count as rewarded.
        samples = self._pod.samples.get(first.policy, 0) + self._pod.scheduling.spare
        elsewhere = max(0, samples - len(rollouts))
        ids = [rollout.id for rollout in rollouts]
        deferred: set[str] = set()
        if first.task_id not in self._pod.held_out:
            deferred = self._results.groups.admit(first.group_id, first.policy, ids, elsewhere)
        for rollout in rollouts:
            history = block.histories.get(rollout.id)
            yield Work(
                rollout,
                block.claim.block,
                block.claim.epoch,
                history.next_attempt if history else 0,
                causes=tuple(history.causes) if history else (),
                demand=demand,
                deferred=rollout.id in deferred,
                planned=planned,
            )
