"""The loop of rank 0: starts rollouts, has what comes back stored, drains.

The loop only decides: messages come and go over MPI, and whatever touches the run directory is done by the I/O thread
(:mod:`~megaflow_hpc.pod.master.run_io_thread`), which also keeps the order that makes results count exactly once: a
result is appended to the journal, the journal is fsynced, only then is the rollout counted and, with the last rollout
of its block, the block marked done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from megaflow_hpc.host.process import node_name
from megaflow_hpc.host.wire import Message
from megaflow_hpc.pod.comm import Backoff
from megaflow_hpc.pod.master.activities import Activities
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlock, ClaimedBlocks
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.pod.master.ranks import Ranks
from megaflow_hpc.pod.master.results import Results
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.master.run_io_messages import Claimed, Durable, EndpointsChanged, LimitExceeded, ShowProgress
from megaflow_hpc.pod.master.run_io_thread import LOOK_S, RunIoThread
from megaflow_hpc.pod.master.settings import Pod
from megaflow_hpc.pod.master.work_stealing import WorkStealing
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.pod.scheduling.stragglers import Stragglers
from megaflow_hpc.pod.scheduling.work import Work
from megaflow_hpc.rundir.budget import cores_of
from megaflow_hpc.rundir.events import (
    FORMAT_VERSION,
    CopyEvent,
    EndpointsEvent,
    EngineEvent,
    PodEvent,
    StartEvent,
    WorkerEvent,
)
from megaflow_hpc.rundir.live import Asked
from megaflow_hpc.rundir.marks import PROGRESS, WHY_DRAIN
from megaflow_hpc.texts import printable
from megaflow_hpc.trajectories.journal.stored import StoredRollouts
from megaflow_hpc.types import Rollout

TICK_S = 1.0
"""How often the drain file and heartbeats are looked at."""
LISTING_S = 10.0
SOON_S = 1.0
"""When the ledger is looked at again after there was no block to claim, or after the last rollout here; each further
time twice as late, up to ``LISTING_S``: the end of a campaign is mostly near, and nodes must not wait for it."""
WAITING_S = 2.0
"""How often engines are looked for while rollouts wait for one."""
AHEAD_S = 5.0
AHEAD_ROLLOUTS = 256
"""How often ranks are told which images come next, and how many rollouts that looks ahead."""
AHEAD_BLOCKS = 4
"""Of the last, small blocks, so many that this pod has not claimed yet."""
DRAIN_S = 25.0
"""What running rollouts may still take once draining has begun; with what workers take to stop, below the warning time
of the batch script."""
PATIENCE_S = 12.0
"""How long agents that are to go on elsewhere may wait for the model's answer of their last turn here."""
DRAIN_NOW_S = 4.0
"""The same when Slurm is about to kill the step (preempted or cancelled)."""
SURELY = 0.9
"""Quantile of a rollout's expected duration that must fit before the walltime."""
STUCK_S = 120.0
"""How long the run directory may refuse or not answer before the pod gives up and is started anew."""
SLOW_S = 5.0
"""A run directory that does not answer for this long is spoken of."""
HOARD = 4
"""Rollouts a slot that stand back for others and may be queued here beside what starts next."""
TURN = 256
"""Messages taken in one turn of the loop: a flood of results must not keep dispatch waiting."""


class Master:
    """The loop of rank 0. :meth:`run` returns ``done``, ``drained``, ``paused`` or ``lost``."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self._estimates = Estimates()
        self._estimates.learn(pod.learned)
        self.scheduler = Scheduler(
            pod.scheduling.order,
            pod.scheduling.weights,
            lambda work: self._estimates.expect(work.rollout.task_id, work.rollout.policy, SURELY) or 0.0,
            pod.scheduling.groups == "together",
        )
        self._stragglers = Stragglers(self._estimates) if pod.scheduling.copies else None
        self._io = RunIo(_io_thread(pod))
        self._cores, self._began = cores_of(), time.monotonic()
        self._ranks = Ranks(pod.comm)
        self._results = Results(pod, self.scheduler, self._io, self._ranks, self._estimates, self._drain)
        self._work_stealing = WorkStealing(self._io, self.scheduler, self._results.groups)
        self.scheduler.waiting = set(pod.servers)
        self._endpoints: list[dict[str, Any]] = []
        """The decoded endpoint files, as they were listed last."""
        self._upcoming: tuple[str, ...] = ()
        """Tasks of blocks that this pod will claim next."""
        self._last: dict[str, float] = {}
        self._draining_since: float | None = None
        self._nothing_free = False
        """The last claim found no block."""
        self._look_s = SOON_S
        self._slow = self._progressed = False
        self._grace_s = DRAIN_S
        self._started = 0
        self._per_s = 0.0
        self._announced: list[str] = []
        self._activities = Activities(pod.comm, self.scheduler, self._io)

    # --- the loop ---

    def run(self) -> str:
        """Runs the pod from its lease to its end.

        Raises:
            MegaflowError: the pod cannot go on.
        """
        pod = self.pod
        pod.ledger.register()
        pod.run.partial.mkdir(mode=0o700, exist_ok=True)
        started = PodEvent(state="started", format_version=FORMAT_VERSION, job_id=pod.job_id, node=node_name())
        started.ranks = pod.comm.size
        pod.events.write(started)
        self._io.start()
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
                return self._leave(state)
            if busy:
                backoff.reset()
            else:
                backoff.sleep(pod.comm.link)

    def _ended(self) -> str | None:
        """Returns the word with which the pod ends, ``None`` while it goes on."""
        if not self._ranks.all or not (self.scheduler.workers.slots or self._ranks.awaited):
            return "lost"
        if not self._io.may_commit or self._io.stuck_s > STUCK_S:
            return "lost"
        busy = self.scheduler.workers.running or not self._io.idle
        if self._draining_since is not None:
            over = time.monotonic() - self._draining_since >= self._grace_s
            if busy and not over:
                return None
            return "paused" if self._results.paused else "drained"
        if busy or self.scheduler.queued or not (self._nothing_free or self.scheduler.too_long):
            return None
        if not self._io.held and (self._work_stealing.may_get_work or self._io.unsettled):
            return None  # others may hand something off, or whoever holds the rest may be dead
        if not self._io.held and self._io.opened:
            if self._io.awaited:
                return None
            self._drain("nothing to do, and who may add something has not renewed its lease for long")
            return "drained"
        if self.scheduler.too_long:
            self._drain("what is left is not expected to end before the walltime")
        return "drained" if self._io.held else "done"

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
            rank, message = received
            any_ |= message["op"] != "beat"  # with nothing else to do the loop sleeps on
            heard[rank] = time.monotonic()
            getattr(self, f"_on_{message['op']}")(rank, message)
        return any_

    def _on_beat(self, rank: int, message: Message) -> None:
        pass

    def _on_ready(self, rank: int, message: Message) -> None:
        self._ranks.join(rank, str(message["node"]))
        self._announced = []  # so that this rank is told as well
        self.scheduler.workers.join(rank, int(message["slots"]), *self.pod.room)
        self._results.refuse()
        slots, node = int(message["slots"]), str(message["node"])
        self.pod.events.write(WorkerEvent(rank=rank, state="ready", slots=slots, node=node))
        if self._endpoints:
            self.pod.comm.send(rank, {"op": "endpoints", "endpoints": self._endpoints})

    def _on_engine(self, rank: int, message: Message) -> None:
        self._ranks.accompany(rank)
        self.pod.events.write(EngineEvent(rank=rank, state="ready", node=str(message["node"])))

    def _on_activity(self, rank: int, message: Message) -> None:
        self._activities.heard(rank, message)

    def _on_transcript(self, rank: int, message: Message) -> None:
        self._activities.mirrored(message)

    def _on_left(self, rank: int, message: Message) -> None:
        self._lose(rank, str(message.get("why", "it left")))

    def _on_result(self, rank: int, message: Message) -> None:
        self._results.ended(rank, Outcome.from_message(message))

    def _lose(self, rank: int, why: str) -> None:
        self._ranks.leave(rank)
        self._activities.leave(rank)
        rollouts = self._results.lost(rank, why)
        self.pod.events.write(WorkerEvent(rank=rank, state="lost", why=why, rollouts=rollouts))

    def _collect(self) -> bool:
        """Takes note of what the I/O thread has done; True if that may let something start."""
        busy = False
        for report in self._io.collect():
            match report:
                case Durable(results):
                    busy = True
                    self._results.count(results)
                    self._mark_progress()
                    if not self.scheduler.workers.running:
                        self._look_s = SOON_S
                case Claimed(block):
                    busy = True
                    self._on_claimed(block)
                case EndpointsChanged():
                    self._on_endpoints(report)
                case LimitExceeded(why):
                    self._results.pause(why)
                case Asked():
                    self._activities.asked = report
        return busy

    # --- work ---

    def _dispatch(self) -> bool:
        if self._draining_since is not None or self._io.full or self._io.stuck:
            return False
        self._claim()
        walltime = self.pod.walltime
        remaining_s = walltime.remaining_s
        started = 0
        while (next_ := self.scheduler.next(remaining_s, walltime.whole_s)) is not None:
            self._start(*next_)
            started += 1
            if self._stragglers is not None:
                self._stragglers.started(next_[1].rollout.id, time.monotonic())
        self._started += started
        return started > 0

    def _start(self, rank: int, work: Work) -> None:
        rollout = work.rollout
        history = self._results.histories.get(rollout.id)
        message = {
            "op": "start",
            "task": self.pod.tasks[rollout.task_id],
            "rollout": vars(rollout),
            "attempt": work.attempt,
            "attempts": [vars(attempt) for attempt in history.attempts] if history else [],
            "epoch": work.epoch,
            "rank": rank,
            "partial": history.partial if history else "",
            "job_id": self.pod.job_id,
        }
        self.pod.comm.send(rank, message)
        self._results.began[rollout.id] = time.monotonic()
        self.pod.events.write(StartEvent(id=rollout.id, rank=rank, attempt=work.attempt))
        if history is not None:
            history.partial = ""  # used once
        if self._results.grouped:
            self._results.groups.started(rollout.group_id, rollout.id)

    def _claim(self) -> None:
        """Asks for a block, for the slots that are free now and what starts until it is there, and no further: what
        waits here, another pod cannot start."""
        ahead = int(2 * self._per_s * self._io.claim_s)
        waiting = self.scheduler.queued - min(self.scheduler.later, HOARD * self.scheduler.workers.slots)
        if waiting >= self.scheduler.workers.free + ahead or self._io.claiming:
            return
        if not self._io.may_commit or self.scheduler.too_long:
            return
        if not self._nothing_free or self._due("claim", self._look_s):
            self._io.claim()

    def _on_claimed(self, block: ClaimedBlock | None) -> None:
        self._nothing_free = block is None
        if block is None:
            later = "claim" in self._last and not self._io.awaited  # whoever consumes rollouts waits for the next
            self._look_s = min(LISTING_S, 2 * self._look_s) if later else SOON_S
            self._last["claim"] = time.monotonic()
            return
        self._last.pop("claim", None)
        self._upcoming = block.upcoming
        if self._draining_since is not None:
            return  # it goes back when the pod leaves
        self._work_stealing.claimed()
        self._results.histories.update(block.histories)
        for _, group in groupby(block.rollouts, key=lambda rollout: rollout.group_id):
            self.scheduler.add(self._group(list(group), block))
        self._results.refuse()

    def _group(self, rollouts: list[Rollout], block: ClaimedBlock) -> Iterator[Work]:
        """Yields the work of one group: its samples are alike in what is known of them."""
        first = rollouts[0]
        expected_s = self._estimates.expect(first.task_id, first.policy) or 0.0
        demand, share = self.pod.demand(first.task_id), self.pod.share(first.task_id, first.policy)
        # Samples that are not here ran elsewhere, or will: they count as rewarded.
        elsewhere = max(0, self.pod.planned(first.policy) - len(rollouts))
        ids = [rollout.id for rollout in rollouts]
        later: set[str] = set()
        if first.task_id not in self.pod.held_out:
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
            )

    def _tick(self) -> None:
        pod = self.pod
        if (word := pod.why_drain()) is not None:
            self._results.ending = self._results.ending or word
            if word in ("now", "cancelled"):
                self._hurry()
            self._drain(WHY_DRAIN.get(word, "asked to by the batch script"))
        for rank, why in list(self._ranks.lost()):
            self._lose(rank, why)
        self._ranks.beat()
        if pod.servers and self._due("endpoints", WAITING_S if self.scheduler.waiting else LISTING_S):
            self._io.list_endpoints()
        if self._due("images", AHEAD_S):
            self._announce_images()
        if self._stragglers is not None and self._nothing_free and self._draining_since is None:
            self._copy_stragglers(self._stragglers)
        self._work_stealing.tick(self._nothing_free, self._draining_since is not None)
        self._say_slow()
        self._per_s, self._started = self._started / TICK_S, 0
        self._activities.tick()
        self._show_progress()

    def _show_progress(self) -> None:
        self._io.show_progress(
            ShowProgress(
                running=self.scheduler.workers.running,
                queued=self.scheduler.queued,
                stored=self._results.stored,
                core_s=round(self._cores * (time.monotonic() - self._began), 1),
                tokens=self._activities.tokens,
                tokens_per_s=self._activities.tokens_per_s,
            )
        )

    def _copy_stragglers(self, stragglers: Stragglers) -> None:
        """Where nothing is left to start, starts what takes unusually long once more, elsewhere."""
        if self.scheduler.queued or not self.scheduler.workers.free:
            return
        for rollout in stragglers.overdue(self.scheduler.workers.running_work(), time.monotonic()):
            copy = self.scheduler.copy(rollout)
            if copy is not None:
                self._start(*copy)
                self.pod.events.write(CopyEvent(id=rollout, rank=copy[0], attempt=copy[1].attempt))

    def _mark_progress(self) -> None:
        """Tells the supervisor that this start is not in vain."""
        if not self._progressed and self.pod.drain_file is not None:
            self.pod.drain_file.with_name(PROGRESS).touch()
            self._progressed = True

    def _say_slow(self) -> None:
        """Reports a run directory that does not answer, or does again: on stderr, and later in the events."""
        stuck_s = self._io.stuck_s
        if (stuck_s > SLOW_S) != self._slow:
            self._slow = not self._slow
            why = f"no answer for {stuck_s:.0f} s; results wait in memory" if self._slow else "answers again"
            print(printable(f"pod: {self.pod.run}: {why}"), file=sys.stderr, flush=True)
            self.pod.events.write(PodEvent(state="started", why=f"the run directory: {why}"))

    def _on_endpoints(self, found: EndpointsChanged) -> None:
        self._endpoints = found.endpoints
        self.scheduler.waiting = found.unanswered
        self.pod.events.write(EndpointsEvent(servers=found.names))
        self._ranks.tell({"op": "endpoints", "endpoints": self._endpoints})

    def _announce_images(self) -> None:
        """Tells the ranks which images they need next, so that they stage them meanwhile."""
        tasks = [*self.scheduler.coming(AHEAD_ROLLOUTS), *self._upcoming]
        order = list(dict.fromkeys(self.pod.tasks[task]["image"] for task in tasks))
        if order != self._announced and len(order) > 1:
            self._announced = order
            self._ranks.tell({"op": "images", "order": order})

    # --- the end ---

    def _drain(self, why: str) -> None:
        if self._draining_since is not None:
            return
        self._draining_since = time.monotonic()
        self._results.draining = True
        self.scheduler.clear()
        self.pod.events.write(PodEvent(state="draining", why=why))
        self._ranks.tell({"op": "suspend", "patience_s": PATIENCE_S if self._grace_s == DRAIN_S else 0.0})

    def _hurry(self) -> None:
        """Slurm kills the step soon."""
        if self._grace_s == DRAIN_S and self._draining_since is not None:
            self._ranks.tell({"op": "suspend", "patience_s": 0.0})
        self._grace_s = DRAIN_NOW_S

    def _leave(self, state: str) -> str:
        """Stops the workers, gives unfinished blocks back, and returns the pod's last word."""
        pod = self.pod
        nothing_left = self._io.idle and not self._io.held
        pod.comm.push()
        self._ranks.stop()
        pod.comm.push()
        if state == "lost":
            pod.events.write(PodEvent(state=state, stored=self._results.stored))
            self._io.finish(LOOK_S)
            return state  # nothing is given back: whoever takes over seals what counts
        self._results.cut_short(preempted=self._grace_s == DRAIN_NOW_S)
        if any(history.partial for history in self._results.histories.values()):
            self._mark_progress()
        self._io.finish(STUCK_S, release=True, histories=self._results.histories)
        for report in self._io.collect():
            if isinstance(report, Durable):
                self._results.count(report.results)
                self._mark_progress()
        if nothing_left and self._io.finished:
            state = "done"  # also where the pod drains
        pod.events.write(PodEvent(state=state, stored=self._results.stored))
        pod.events.close()
        return state


def _io_thread(pod: Pod) -> RunIoThread:
    """Puts together what touches the run directory; it belongs to the thread from now on."""
    ahead = AHEAD_BLOCKS if len({task.get("image") for task in pod.tasks.values()}) > 1 else 0
    blocks = ClaimedBlocks(pod.run, pod.ledger, pod.events, StoredRollouts(pod.run, pod.ledger.renew), ahead)
    endpoints = Endpoints(pod.run, pod.servers)
    return RunIoThread(pod.run, pod.journal, pod.ledger, blocks, pod.events, endpoints, pod.budget())
