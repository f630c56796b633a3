"""Starts rollouts where there is room, and claims blocks for what will be free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby

from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlock
from megaflow_hpc.pod.master.results import Results
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.master.settings import Pod
from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.pod.scheduling.work import Work
from megaflow_hpc.rundir.events import StartEvent
from megaflow_hpc.types import Rollout

SOON_S = 1.0
SELDOM_S = 10.0
"""When the ledger is looked at again after there was no block to claim, or after the last rollout here; each further
time twice as late, up to ``SELDOM_S``: the end of a campaign is mostly near, and nodes must not wait for it."""
AWAITED_S = 0.25
LOOKS_PER_S = 40
"""The same where whoever consumes rollouts is expected to add blocks: a pod looks as often as all pods of the campaign
together may look in a second, at most every ``AWAITED_S`` and at least every ``SOON_S``."""
HOARD = 4
"""Rollouts a slot that stand back for others and may be queued here beside what starts next."""
AHEAD_ROLLOUTS = 256
"""How many rollouts are looked ahead for images that come next."""


def awaited_s(pods: int) -> float:
    """Returns after how many seconds one of so many pods looks again for blocks that somebody is expected to add."""
    return min(SOON_S, max(AWAITED_S, pods / LOOKS_PER_S))


class Dispatch:
    """Gives slots to rollouts, and rollouts to slots that will be free."""

    def __init__(self, pod: Pod, scheduler: Scheduler, io: RunIo, results: Results, estimates: Estimates) -> None:
        self._pod, self._scheduler, self._io, self._results = pod, scheduler, io, results
        self._estimates = estimates
        self._look_s = SOON_S
        self._looked_at: float | None = None
        """When a claim last found nothing; ``None`` after one that found a block."""
        self._started = 0
        self._per_s = 0.0
        self._upcoming: tuple[PlannedTask, ...] = ()
        """Tasks of blocks that this pod will claim next."""

    def start_all(self) -> bool:
        """Starts what can start, and asks for a block where that is not enough; True if something started."""
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
        """Measures how fast rollouts started in the last seconds; to be called at that pace."""
        self._per_s, self._started = self._started / seconds, 0

    @property
    def nothing_free(self) -> bool:
        """The last claim found no block."""
        return self._looked_at is not None

    def coming(self) -> list[tuple[str, float]]:
        """Returns the images of what runs and of what starts next here, as far as that is known, each with the
        sandboxes of it that one node will start."""
        tasks: list[PlannedTask] = [*self._scheduler.coming(AHEAD_ROLLOUTS), *self._upcoming]
        return list({task.image: (task.image, self._pod.starts(task)) for task in tasks if task.image}.values())

    def look_soon(self) -> None:
        """Has the ledger looked at soon if there is no block: the last rollout here has ended."""
        self._look_s = SOON_S

    def _start(self, rank: int, work: Work) -> None:
        rollout = work.rollout
        history = self._results.histories.get(rollout.id)
        planned: PlannedTask = work.planned
        message = {
            "op": "start",
            "task": planned.task,
            "images": planned.images,
            "starts": self._pod.starts(planned),
            "rollout": rollout.to_dict(),
            "attempt": work.attempt,
            "attempts": [vars(attempt) for attempt in history.attempts] if history else [],
            "epoch": work.epoch,
            "rank": rank,
            "partial": history.partial if history else "",
            "job_id": self._pod.job_id,
        }
        self._pod.comm.send(rank, message)
        self._results.began[rollout.id] = time.monotonic()
        self._pod.events.write(StartEvent(id=rollout.id, rank=rank, attempt=work.attempt))
        if history is not None:
            history.partial = ""  # used once
        if self._results.grouped:
            self._results.groups.started(rollout.group_id, rollout.id)

    # --- claims ---

    def _claim(self) -> None:
        """Asks for a block, for the slots that are free now and what starts until it is there, and no further: what
        waits here, another pod cannot start."""
        ahead = int(2 * self._per_s * self._io.claim_s)
        waiting = self._scheduler.queued - min(self._scheduler.later, HOARD * self._scheduler.workers.slots)
        if waiting >= self._scheduler.workers.free + ahead or self._io.claiming:
            return
        if not self._io.may_commit or self._scheduler.too_long:
            return
        if self._looked_at is None or time.monotonic() - self._looked_at >= self._look_s:
            self._io.claim()

    def claimed(self, block: ClaimedBlock | None) -> bool:
        """Queues what a claim has brought; tells whether it brought something to run here."""
        if block is None:
            if self._io.seen.awaited:  # whoever consumes rollouts waits for the next
                self._look_s = awaited_s(self._pod.pods)
            else:
                self._look_s = min(SELDOM_S, 2 * self._look_s) if self.nothing_free else SOON_S
            self._looked_at = time.monotonic()
            return False
        self._looked_at = None
        self._upcoming = block.upcoming
        if self._results.draining:
            return False  # it goes back when the pod leaves
        self._results.histories.update(block.histories)
        for _, group in groupby(block.rollouts, key=lambda rollout: rollout.group_id):
            self._scheduler.add(self._group(list(group), block))
        self._results.refuse()
        return True

    def _group(self, rollouts: list[Rollout], block: ClaimedBlock) -> Iterator[Work]:
        """Yields the work of one group: its samples are alike in what is known of them."""
        first = rollouts[0]
        expected_s = self._estimates.expect(first.task_id, first.policy) or 0.0
        planned = block.tasks[first.task_id]
        demand, share = self._pod.demand(planned), first.policy
        # Samples that are not here ran elsewhere, or will: they count as rewarded.
        elsewhere = max(0, self._pod.planned(first.policy) - len(rollouts))
        ids = [rollout.id for rollout in rollouts]
        later: set[str] = set()
        if first.task_id not in self._pod.held_out:
            later = self._results.groups.admit(first.group_id, first.policy, ids, elsewhere)
        for rollout in rollouts:
            history = block.histories.get(rollout.id)
            yield Work(
                rollout,
                block.claim.block,
                block.claim.epoch,
                history.next_attempt if history else 0,
                causes=tuple(history.causes) if history else (),
                expected_s=expected_s,
                demand=demand,
                share=share,
                later=rollout.id in later,
                planned=planned,
            )
