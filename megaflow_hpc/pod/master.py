"""Rank 0: starts rollouts, has what comes back stored, drains.

The loop only decides: messages come and go over MPI, and whatever touches the run directory is done by the clerk's
thread. The order that makes results exactly-once is the clerk's: a result is appended to the journal, the journal is
fsynced, only then is the rollout counted and, with its last rollout, the block marked done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from megaflow_hpc.ledger import Claim, Ledger
from megaflow_hpc.pod.clerk import LOOK_S, Clerk, Filed, Journal
from megaflow_hpc.pod.comm import Backoff, Comm
from megaflow_hpc.pod.endpoints import Endpoints
from megaflow_hpc.pod.estimates import Estimates
from megaflow_hpc.pod.events import Events
from megaflow_hpc.pod.failures import may_retry
from megaflow_hpc.pod.holdings import Holdings
from megaflow_hpc.pod.outcome import Outcome, attempt_of
from megaflow_hpc.pod.ranks import Ranks
from megaflow_hpc.pod.scheduler import Scheduler
from megaflow_hpc.pod.starts import Starts
from megaflow_hpc.pod.walltime import Walltime
from megaflow_hpc.pod.wire import STOP, Message
from megaflow_hpc.pod.work import NOTHING, Demand, Work
from megaflow_hpc.process import node_name
from megaflow_hpc.rundir import RunDir
from megaflow_hpc.types import Attempt, Rollout, Trajectory

TICK_S = 1.0
"""How often the drain file and heartbeats are looked at."""
LISTING_S = 10.0
WAITING_S = 2.0
"""How often engines are looked for while rollouts wait for one."""
AHEAD_S = 5.0
AHEAD_ROLLOUTS = 256
"""How often ranks are told which images come next, and how many rollouts that looks ahead."""
DRAIN_S = 25.0
"""What running rollouts may still take once draining has begun; with what workers take to stop, below the warning time
of the batch script."""
DRAIN_NOW_S = 4.0
"""The same when Slurm is about to kill the step (preempted or cancelled)."""
SURELY = 0.9
"""Quantile of a rollout's expected duration that must fit before the walltime."""
STUCK_S = 120.0
"""How long the run directory may refuse or not answer before the pod gives up and is started anew."""
SLOW_S = 5.0
"""A run directory that does not answer for this long is spoken of."""
TURN = 256
"""Messages taken in one turn of the loop: a flood of results must not keep dispatch waiting."""


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
        self._endpoints = Endpoints(pod.run, pod.servers)
        self._clerk = Clerk(pod.journal, pod.ledger, self._held, pod.events, self._endpoints)
        self._ranks = Ranks(pod.comm)
        self._starts = Starts(pod.tasks, pod.job_id)
        self._attempts: dict[str, list[Attempt]] = {}
        self.scheduler.waiting = set(pod.servers)
        self._last: dict[str, float] = {}
        self._draining_since: float | None = None
        self._dry = False
        self._slow = False
        self._grace_s = DRAIN_S
        self._failures = 0
        self._stored = 0
        self._started = 0
        self._per_s = 0.0
        self._announced: list[str] = []

    # --- the loop ---

    def run(self) -> str:
        pod = self.pod
        pod.ledger.register()
        pod.events.write("pod", state="started", job_id=pod.job_id, node=node_name(), ranks=pod.comm.size)
        self._clerk.start()
        self._ranks.greet(pod.init)
        backoff = Backoff()
        while True:
            busy = self._receive()
            busy |= self._collect()
            busy |= self._dispatch()
            if self._due("tick", TICK_S):
                self._tick()
            pod.comm.push()
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
        if not self._ranks.all:
            return "lost"
        if not self.pod.ledger.may_commit or self._clerk.stuck_s > STUCK_S:
            return "lost"
        if self._draining_since is not None:
            over = time.monotonic() - self._draining_since >= self._grace_s
            if not over and (self.scheduler.running or not self._clerk.quiet):
                return None
            if self._clerk.quiet and not self._held and self.pod.ledger.finished:
                return "done"
            return "paused" if self._paused else "drained"
        claimed_all = self._dry or self.scheduler.too_long
        if self.scheduler.running or self.scheduler.queued or not self._clerk.quiet or not claimed_all:
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

    def _due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now - self._last.get(what, -1e9) < every_s:
            return False
        self._last[what] = now
        return True

    # --- messages ---

    def _receive(self) -> bool:
        comm, heard = self.pod.comm, self._ranks.heard
        any_ = False
        for _ in range(TURN):
            received = comm.poll()
            if received is None:
                break
            any_ = True
            rank, message = received
            heard[rank] = time.monotonic()
            getattr(self, f"_on_{message['op']}")(rank, message)
        return any_

    def _on_beat(self, rank: int, message: Message) -> None:
        pass

    def _on_ready(self, rank: int, message: Message) -> None:
        self._ranks.join(rank, str(message["node"]))
        self._announced = []  # so that this rank is told as well
        self.scheduler.join(rank, int(message["slots"]), *self.pod.room)
        for work in self.scheduler.impossible():
            self._refuse(work)
        self.pod.events.write("worker", rank=rank, state="ready", slots=message["slots"], node=message["node"])
        if self._endpoints.all:
            self.pod.comm.send(rank, {"op": "endpoints", "endpoints": self._endpoints.all})

    def _on_engine(self, rank: int, message: Message) -> None:
        self._ranks.accompany(rank)
        self.pod.events.write("engine", rank=rank, state="ready", node=message["node"])

    def _on_left(self, rank: int, message: Message) -> None:
        self._lose(rank, str(message.get("why", "it left")))

    def _on_result(self, rank: int, message: Message) -> None:
        outcome = Outcome.from_message(message)
        work = self.scheduler.finish(rank, outcome.id)
        if work is not None and work.attempt == outcome.attempt:
            self._settle(work, outcome, rank)

    def _lose(self, rank: int, why: str) -> None:
        self._ranks.leave(rank)
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
        """Retries a failure, or hands the outcome to the clerk."""
        if outcome.status == "cancelled":
            # Stopped by a drain, or the step was signalled and the worker heard it first: the block goes back, and
            # whoever takes it runs this rollout again.
            self._drain("a rollout was stopped by a signal to the step")
            return
        cause, failed = outcome.cause, outcome.status == "failed"
        if failed and self._draining_since is not None and may_retry((*work.causes, cause)):
            return  # the engines and sandboxes of an ending job fail; whoever takes the block tries again
        if failed and self.scheduler.retry(work, cause, rank):
            self._attempts.setdefault(outcome.id, []).append(attempt_of(outcome))
            self.pod.events.write("attempt", id=outcome.id, attempt=work.attempt, kind=cause, error=outcome.error)
            return
        if not failed:
            self._estimates.observe(outcome.task_id, outcome.policy, outcome.seconds)
        self._attempts.pop(outcome.id, None)
        self._clerk.file(outcome, work.block, outcome.payload(work.epoch, work.block))

    def _collect(self) -> bool:
        """Takes note of what the clerk has done."""
        durable = self._clerk.durable()
        for filed in durable:
            self._count(filed)
        if self._paused and self._draining_since is None:
            self._drain(f"{self._failures} rollouts failed, limits.failures is {self.pod.failure_limit}")
        claimed = self._clerk.claimed()
        for answer in claimed:
            self._on_claimed(answer)
        if self._clerk.listed():
            self._tell_endpoints()
        return bool(durable or claimed)

    def _count(self, filed: Filed) -> None:
        outcome = filed.outcome
        self._stored += 1
        self._failures += outcome.status == "failed"
        self.pod.events.rollout(outcome)

    # --- work ---

    def _dispatch(self) -> bool:
        if self._draining_since is not None or self._clerk.full or self._clerk.stuck_since is not None:
            return False
        self._claim()
        walltime, comm = self.pod.walltime, self.pod.comm
        remaining_s = walltime.remaining_s
        started = 0
        while (next_ := self.scheduler.next(remaining_s, walltime.whole_s)) is not None:
            rank, work = next_
            comm.send(rank, self._starts.pack(work, rank, self._attempts.get(work.rollout.id, ())))
            started += 1
        self._started += started
        return started > 0

    def _claim(self) -> None:
        """Asks for a block, for the slots that are free now and what starts until it is there, and no further: what
        waits here, another pod cannot start."""
        ahead = int(2 * self._per_s * self._clerk.claim_s)
        if self.scheduler.queued >= self.scheduler.free + ahead or self._clerk.claiming:
            return
        if not self.pod.ledger.may_commit or self.scheduler.too_long:
            return
        if not self._dry or self._due("claim", LISTING_S):
            self._clerk.claim()

    def _on_claimed(self, answer: tuple[Claim, list[Rollout]] | None) -> None:
        self._dry = answer is None
        if answer is None:
            self._last["claim"] = time.monotonic()
            return
        if self._draining_since is not None:
            return  # it goes back when the pod leaves
        claim, todo = answer
        for _, group in groupby(todo, key=lambda rollout: rollout.group_id):
            self.scheduler.add(self._group(list(group), claim))
        for work in self.scheduler.impossible():
            self._refuse(work)

    def _group(self, rollouts: list[Rollout], claim: Claim) -> Iterator[Work]:
        """The work of one group: its samples are alike in what is known of them."""
        first = rollouts[0]
        expected_s = self._estimates.expect(first.task_id, first.policy) or 0.0
        demand = self._demand(first.task_id)
        for rollout in rollouts:
            yield Work(rollout, claim.block, claim.epoch, expected_s=expected_s, demand=demand, share=rollout.policy)

    def _demand(self, task: str) -> Demand:
        pack = self.pod.scheduling.get("pack", ())
        if not pack:
            return NOTHING
        limits = self.pod.tasks[task].get("limits", {})
        return Demand(
            float(limits.get("cpus") or 0.0) if "cpus" in pack else 0.0,
            int(limits.get("memory_mb") or 0) if "memory" in pack else 0,
        )

    def _refuse(self, work: Work) -> None:
        """No worker could ever hold it: final, and said."""
        cpus, memory = self.pod.room
        self._settle(
            work,
            self._unrun(work, "user", f"the task asks for {work.demand}, a rank has {cpus} cpus and {memory} MB"),
            -1,
        )

    def _tick(self) -> None:
        pod = self.pod
        if pod.drain_file is not None and pod.drain_file.exists():
            if pod.drain_file.read_text().strip() == "now":
                self._grace_s = DRAIN_NOW_S
            self._drain("asked to by the batch script")
        for rank, why in list(self._ranks.lost()):
            self._lose(rank, why)
        self._ranks.beat()
        if pod.servers and self._due("endpoints", WAITING_S if self.scheduler.waiting else LISTING_S):
            self._clerk.list_endpoints()
        if self._due("images", AHEAD_S):
            self._announce_images()
        self._say_slow()
        self._per_s, self._started = self._started / TICK_S, 0
        pod.events.write("progress", running=self.scheduler.running, queued=self.scheduler.queued, stored=self._stored)

    def _say_slow(self) -> None:
        """A run directory that does not answer is spoken of where it can be: on stderr, and later in the events."""
        stuck_s = self._clerk.stuck_s
        if (stuck_s > SLOW_S) != self._slow:
            self._slow = not self._slow
            why = f"no answer for {stuck_s:.0f} s; results wait in memory" if self._slow else "answers again"
            print(f"pod: {self.pod.run}: {why}", file=sys.stderr, flush=True)
            self.pod.events.write("pod", state="started", why=f"the run directory: {why}")

    def _tell_endpoints(self) -> None:
        self.scheduler.waiting = self._endpoints.unanswered
        self.pod.events.write("endpoints", servers=self._endpoints.names)
        self._ranks.tell({"op": "endpoints", "endpoints": self._endpoints.all})

    def _announce_images(self) -> None:
        """Tells the ranks which images they need next, so that they stage them meanwhile."""
        tasks = self.scheduler.coming(AHEAD_ROLLOUTS)
        order = list(dict.fromkeys(self.pod.tasks[task]["image"] for task in tasks))
        if order != self._announced and len(order) > 1:
            self._announced = order
            self._ranks.tell({"op": "images", "order": order})

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
        pod.comm.push()
        self._ranks.tell(STOP)
        pod.comm.push()
        if state == "lost":
            pod.events.write("pod", state=state, stored=self._stored)
            self._clerk.finish(LOOK_S)
            return  # nothing is given back: whoever takes over seals what counts
        if self._clerk.finish(STUCK_S):
            self._held.release()
        for filed in self._clerk.durable():
            self._count(filed)
        pod.events.write("pod", state=state, stored=self._stored)
        pod.events.close()
