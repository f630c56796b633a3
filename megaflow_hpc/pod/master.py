"""Rank 0: claims blocks, starts rollouts, stores what comes back, drains.

The order that makes results exactly-once: a result is appended to the journal, the journal is fsynced, only then is
the rollout counted and, with its last rollout, the block marked done. While rollouts run nothing else of the pod
touches the run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megaflow_hpc.ledger import Claim, Ledger
from megaflow_hpc.pod.comm import BEAT_S, Backoff, Comm
from megaflow_hpc.pod.endpoints import Endpoints
from megaflow_hpc.pod.estimates import Estimates
from megaflow_hpc.pod.events import Events
from megaflow_hpc.pod.holdings import Holdings
from megaflow_hpc.pod.outcome import Outcome, attempt_of
from megaflow_hpc.pod.scheduler import RETRIES, Demand, Scheduler, Work
from megaflow_hpc.pod.walltime import Walltime
from megaflow_hpc.pod.wire import Message
from megaflow_hpc.process import node_name
from megaflow_hpc.rundir import RunDir
from megaflow_hpc.types import Attempt, Rollout, Trajectory

TICK_S = 1.0
"""How often the drain file, leases and heartbeats are looked at."""
LISTING_S = 10.0
WAITING_S = 2.0
"""How often engines are looked for while rollouts wait for one."""
AHEAD_S = 5.0
AHEAD_ROLLOUTS = 256
"""How often ranks are told which images come next, and how many rollouts that looks ahead."""
WORKER_LOST_S = 30.0
JOIN_S = 120.0
"""A worker that has not reported ready after this long is given up; a first image may have to be staged later."""
DRAIN_S = 25.0
"""What running rollouts may still take once draining has begun; with what workers take to stop, below the warning time
of the batch script."""
DRAIN_NOW_S = 4.0
"""The same when Slurm is about to kill the step (preempted or cancelled)."""
SURELY = 0.9
"""Quantile of a rollout's expected duration that must fit before the walltime."""
STUCK_S = 120.0
"""How long a journal may refuse to be written before the pod gives up and is started anew."""


class Journal(Protocol):
    def append(self, record: bytes) -> int: ...
    def commit(self) -> object: ...


@dataclass
class Pod:
    """What the master works with; put together by ``__main__``."""

    run: RunDir
    comm: Comm
    ledger: Ledger
    journal: Journal
    events: Events
    init: Message
    tasks: dict[str, Any]
    """Task dictionaries by id."""
    servers: dict[str, int]
    """Engine servers that the campaign asks for, by policy; empty where no policy has a model."""
    journal_length: Callable[[str], int]
    stored: Callable[[], set[str]]
    """Ids of the rollouts that were stored and did not fail; asked when a block is taken over."""
    drain_file: Path | None = None
    failure_limit: int | None = None
    job_id: str = ""
    scheduling: Mapping[str, Any] = field(default_factory=dict)
    """``order``, ``weights``, ``pack`` of the campaign file."""
    room: tuple[float | None, int | None] = (None, None)
    """Cpus and MB of memory that a worker rank has, where they are known."""
    walltime: Walltime = field(default_factory=Walltime)


class Master:
    """The loop of rank 0. :meth:`run` returns ``done``, ``drained``, ``paused`` or ``lost``."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self._estimates = Estimates()
        self.scheduler = Scheduler(
            pod.scheduling.get("order", "fifo"),
            pod.scheduling.get("weights"),
            lambda work: self._estimates.expect(work.rollout.task_id, work.rollout.policy, SURELY) or 0.0,
        )
        self._held = Holdings(pod.run, pod.ledger, pod.events, pod.journal_length, pod.stored)
        self._attempts: dict[str, list[Attempt]] = {}
        self._heard: dict[int, float] = {}
        self._awaited = set(range(1, pod.comm.size)) if pod.comm.size > 1 else set()
        self.scheduler.waiting = set(pod.servers)
        self._endpoints = Endpoints(pod.run, pod.servers)
        self._unacknowledged: list[tuple[Outcome, int]] = []
        self._last: dict[str, float] = {}
        self._draining_since: float | None = None
        self._dry = False
        self._stuck_since: float | None = None
        self._grace_s = DRAIN_S
        self._failures = 0
        self._stored = 0
        self._announced: list[str] = []

    # --- the loop ---

    def run(self) -> str:
        pod = self.pod
        pod.ledger.register()
        pod.events.write("pod", state="started", job_id=pod.job_id, node=node_name(), ranks=pod.comm.size)
        for rank in self._awaited:
            pod.comm.send(rank, pod.init)
        started = time.monotonic()
        backoff = Backoff()
        while True:
            busy = self._receive()
            busy |= self._dispatch()  # before the fsync: a free slot does not wait for the disk
            self._acknowledge()
            if self._due("tick", TICK_S):
                self._tick(time.monotonic() - started)
            state = self._ended()
            if state:
                break
            if busy:
                backoff.reset()
            else:
                backoff.sleep()
        self._leave(state)
        return state

    def _ended(self) -> str | None:
        if not self.scheduler.workers and not self._awaited:
            return "lost"
        if not self.pod.ledger.may_commit or self._stuck_for() > STUCK_S:
            return "lost"
        if self._draining_since is not None:
            if self.scheduler.running and time.monotonic() - self._draining_since < self._grace_s:
                return None
            if not self._held and self.pod.ledger.finished:
                return "done"
            return "paused" if self._paused else "drained"
        claimed_all = self._dry or self.scheduler.too_long
        if self.scheduler.running or self.scheduler.queued or self._unacknowledged or not claimed_all:
            return None
        if self.pod.ledger.unsettled and not self._held:
            return None  # whoever holds the rest may be dead: stay until that is known
        if self.scheduler.too_long:
            self._drain("what is left is not expected to end before the walltime")
        return "drained" if self._held else "done"

    @property
    def _paused(self) -> bool:
        limit = self.pod.failure_limit
        return limit is not None and self._failures >= limit

    def _stuck_for(self) -> float:
        return 0.0 if self._stuck_since is None else time.monotonic() - self._stuck_since

    def _due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now - self._last.get(what, -1e9) < every_s:
            return False
        self._last[what] = now
        return True

    # --- messages ---

    def _receive(self) -> bool:
        any_ = False
        for _ in range(256):  # bounded, so that a flood of results cannot keep dispatch waiting
            received = self.pod.comm.poll()
            if received is None:
                break
            any_ = True
            rank, message = received
            self._heard[rank] = time.monotonic()
            getattr(self, f"_on_{message['op']}")(rank, message)
        return any_

    def _on_beat(self, rank: int, message: Message) -> None:
        pass

    def _on_ready(self, rank: int, message: Message) -> None:
        self._awaited.discard(rank)
        self._announced = []  # so that this rank is told as well
        self.scheduler.join(rank, int(message["slots"]), *self.pod.room)
        for work in self.scheduler.impossible():
            self._refuse(work)
        self.pod.events.write("worker", rank=rank, state="ready", slots=message["slots"], node=message["node"])
        if self._endpoints.all:
            self.pod.comm.send(rank, {"op": "endpoints", "endpoints": self._endpoints.all})

    def _on_left(self, rank: int, message: Message) -> None:
        self._lose(rank, str(message.get("why", "it left")))

    def _on_result(self, rank: int, message: Message) -> None:
        outcome = Outcome.from_message(message)
        work = self.scheduler.finish(rank, outcome.id)
        if work is not None and work.attempt == outcome.attempt:
            self._settle(work, outcome, rank)

    def _lose(self, rank: int, why: str) -> None:
        self._awaited.discard(rank)
        lost = self.scheduler.leave(rank)
        self.pod.events.write("worker", rank=rank, state="lost", why=why, rollouts=len(lost))
        for work in lost:
            self._settle(work, self._unrun(work, "node", f"worker rank {rank} was lost: {why}"), rank)

    def _unrun(self, work: Work, kind: str, error: str) -> Outcome:
        """The end of an attempt of which nothing came back."""
        now = time.time()
        trajectory = Trajectory(
            id=work.rollout.id,
            task_id=work.rollout.task_id,
            group_id=work.rollout.group_id,
            policy=work.rollout.policy,
            agent=work.rollout.agent,
            sample_index=work.rollout.sample_index,
            status="failed",
            error_kind=kind,
            error=error,
            attempt=work.attempt,
            job_id=self.pod.job_id,
            started_at=now,
            finished_at=now,
            epoch=work.epoch,
        )
        return Outcome.of(trajectory, self._attempts.get(work.rollout.id, ()))

    # --- results ---

    def _settle(self, work: Work, outcome: Outcome, rank: int) -> None:
        """Retries a failure, or appends the outcome to the journal."""
        if outcome.status == "cancelled":
            # Stopped by a drain, or the step was signalled and the worker heard it first: the block goes back, and
            # whoever takes it runs this rollout again.
            self._drain("a rollout was stopped by a signal to the step")
            return
        kind, failed = outcome.error_kind, outcome.status == "failed"
        if failed and self._draining_since is not None and work.attempt < RETRIES.get(kind, 0):
            return  # the engines and sandboxes of an ending job fail; whoever takes the block tries again
        if failed and self.scheduler.retry(work, kind, rank):
            self._attempts.setdefault(outcome.id, []).append(attempt_of(outcome))
            self.pod.events.write("attempt", id=outcome.id, attempt=work.attempt, kind=kind, error=outcome.error)
            return
        if not failed:
            self._estimates.observe(outcome.task_id, outcome.policy, outcome.seconds)
        self._attempts.pop(outcome.id, None)
        self.pod.journal.append(outcome.payload(work.epoch, work.block))
        self._unacknowledged.append((outcome, work.block))

    def _acknowledge(self) -> None:
        """Group commit: one fsync for all results of this turn of the loop, then they count."""
        if not self._unacknowledged:
            return
        if not self.pod.ledger.may_commit:
            return
        try:
            self.pod.journal.commit()
        except OSError as error:
            # A full disk or quota: the records wait in memory, nothing new is started, each look tries again.
            if self._stuck_since is None:
                self.pod.events.write("pod", state="started", why=f"the journal cannot be written: {error}")
                self._stuck_since = time.monotonic()
            time.sleep(TICK_S)
            return
        self._stuck_since = None
        settled, self._unacknowledged = self._unacknowledged, []
        for outcome, block in settled:
            self._stored += 1
            self._failures += outcome.status == "failed"
            self.pod.events.write(
                "rollout",
                id=outcome.id,
                status=outcome.status,
                kind=outcome.error_kind,
                error=outcome.error[:300],
                reward=outcome.reward,
                seconds=round(outcome.seconds, 2),
                turns=outcome.turns,
            )
            self._held.settled(block, outcome.id)
        if self._paused and self._draining_since is None:
            self._drain(f"{self._failures} rollouts failed, limits.failures is {self.pod.failure_limit}")

    # --- work ---

    def _dispatch(self) -> bool:
        if self._draining_since is not None or self._stuck_since is not None:
            return False
        self._claim()
        started = False
        walltime = self.pod.walltime
        while (next_ := self.scheduler.next(walltime.remaining_s, walltime.whole_s)) is not None:
            rank, work = next_
            rollout = work.rollout
            start = {
                "op": "start",
                "rollout": vars(rollout),
                "task": self.pod.tasks[rollout.task_id],
                "attempt": work.attempt,
                "attempts": [vars(attempt) for attempt in self._attempts.get(rollout.id, ())],
                "epoch": work.epoch,
                "job_id": self.pod.job_id,
                "rank": rank,
            }
            self.pod.comm.send(rank, start)
            started = True
        return started

    def _claim(self) -> None:
        """Claims for the slots that are free now and no further: what waits here, another pod cannot start."""
        while self.scheduler.queued < self.scheduler.slots - self.scheduler.running:
            if not self.pod.ledger.may_commit or self.scheduler.too_long:
                return
            if self._dry and not self._due("claim", LISTING_S):
                return
            claimed = self._held.claim()
            self._beat()
            if claimed is None:
                self._dry = True
                self._last["claim"] = time.monotonic()
                return
            self._dry = False
            claim, todo = claimed
            self.scheduler.add(self._work(rollout, claim) for rollout in todo)
            for work in self.scheduler.impossible():
                self._refuse(work)

    def _work(self, rollout: Rollout, claim: Claim) -> Work:
        pack, limits = self.pod.scheduling.get("pack", ()), self.pod.tasks[rollout.task_id].get("limits", {})
        return Work(
            rollout,
            claim.block,
            claim.epoch,
            expected_s=self._estimates.expect(rollout.task_id, rollout.policy) or 0.0,
            demand=Demand(
                float(limits.get("cpus") or 0.0) if "cpus" in pack else 0.0,
                int(limits.get("memory_mb") or 0) if "memory" in pack else 0,
            ),
            share=rollout.policy,
        )

    def _refuse(self, work: Work) -> None:
        """No worker could ever hold it: final, and said."""
        cpus, memory = self.pod.room
        self._settle(
            work,
            self._unrun(work, "user", f"the task asks for {work.demand}, a rank has {cpus} cpus and {memory} MB"),
            -1,
        )

    def _tick(self, elapsed: float) -> None:
        pod, now = self.pod, time.monotonic()
        pod.ledger.renew()
        if pod.drain_file is not None and pod.drain_file.exists():
            if pod.drain_file.read_text().strip() == "now":
                self._grace_s = DRAIN_NOW_S
            self._drain("asked to by the batch script")
        for rank in self.scheduler.workers:
            if now - self._heard.get(rank, now) > WORKER_LOST_S:
                self._lose(rank, f"no heartbeat for {WORKER_LOST_S:.0f} s")
        if self._awaited and elapsed > JOIN_S:
            for rank in list(self._awaited):
                self._lose(rank, f"not ready after {JOIN_S:.0f} s")
        self._beat()
        if pod.servers and self._due("endpoints", WAITING_S if self.scheduler.waiting else LISTING_S):
            self._list_endpoints()
        if self._due("images", AHEAD_S):
            self._announce_images()
        pod.events.write("progress", running=self.scheduler.running, queued=self.scheduler.queued, stored=self._stored)

    def _beat(self) -> None:
        if self._due("beat", BEAT_S):
            for rank in [*self.scheduler.workers, *self._awaited]:
                self.pod.comm.send(rank, {"op": "beat"})

    def _list_endpoints(self) -> None:
        changed = self._endpoints.refresh()
        self.scheduler.waiting = self._endpoints.unanswered
        if changed:
            self.pod.events.write("endpoints", servers=self._endpoints.names)
            for rank in self.scheduler.workers:
                self.pod.comm.send(rank, {"op": "endpoints", "endpoints": self._endpoints.all})

    def _announce_images(self) -> None:
        """Tells the ranks which images they need next, so that they stage them meanwhile."""
        tasks = self.scheduler.coming(AHEAD_ROLLOUTS)
        order = list(dict.fromkeys(self.pod.tasks[task]["image"] for task in tasks))
        if order != self._announced and len(order) > 1:
            self._announced = order
            for rank in self.scheduler.workers:
                self.pod.comm.send(rank, {"op": "images", "order": order})

    # --- the end ---

    def _drain(self, why: str) -> None:
        if self._draining_since is not None:
            return
        self._draining_since = time.monotonic()
        self.scheduler.clear()
        self.pod.events.write("pod", state="draining", why=why)

    def _leave(self, state: str) -> None:
        """Stops the workers, gives unfinished blocks back, says goodbye."""
        pod = self.pod
        for rank in self.scheduler.workers:
            pod.comm.send(rank, {"op": "stop"})
        if state == "lost":
            pod.events.write("pod", state=state, stored=self._stored)
            pod.events.close()
            return  # nothing is given back: whoever takes over seals what counts
        pod.journal.commit()
        self._held.release()
        pod.events.write("pod", state=state, stored=self._stored)
        pod.events.close()
