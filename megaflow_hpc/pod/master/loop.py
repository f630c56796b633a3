"""The loop of rank 0: starts rollouts, has what comes back stored, drains.

The loop only decides: messages come and go over MPI, and whatever touches the run directory is done by the I/O thread
(:mod:`~megaflow_hpc.pod.master.run_io_thread`), which also keeps the order that makes results count exactly once: a
result is appended to the journal, the journal is fsynced, only then is the rollout counted and, with the last rollout
of its block, the block marked done.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from megaflow_hpc.host.process import node_name
from megaflow_hpc.host.wire import Message
from megaflow_hpc.pod.comm import Backoff
from megaflow_hpc.pod.master.activities import Activities
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlocks
from megaflow_hpc.pod.master.dispatch import Dispatch
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
from megaflow_hpc.rundir.budget import cores_of
from megaflow_hpc.rundir.events import (
    FORMAT_VERSION,
    EndpointsEvent,
    EngineEvent,
    PodEvent,
    WorkerEvent,
)
from megaflow_hpc.rundir.live import Asked
from megaflow_hpc.rundir.marks import PROGRESS, WHY_DRAIN
from megaflow_hpc.texts import printable
from megaflow_hpc.trajectories.journal.stored import StoredRollouts

TICK_S = 1.0
"""How often the drain file and heartbeats are looked at."""
LISTING_S = 10.0
"""How often engines are looked for."""
WAITING_S = 2.0
"""The same while rollouts wait for one."""
AHEAD_S = 5.0
"""How often ranks are told which images come next."""
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
        )
        self._io = RunIo(_io_thread(pod))
        self._cores, self._began = cores_of(), time.monotonic()
        self._ranks = Ranks(pod.comm)
        self._results = Results(pod, self.scheduler, self._io, self._ranks, self._estimates, self._drain)
        self._dispatch = Dispatch(pod, self.scheduler, self._io, self._results, self._estimates)
        self._work_stealing = WorkStealing(self._io, self.scheduler, self._results.groups)
        self.scheduler.waiting = set(pod.servers)
        self._endpoints: list[dict[str, Any]] = []
        """The decoded endpoint files, as they were listed last."""
        self._last: dict[str, float] = {}
        self._draining_since: float | None = None
        self._slow = self._progressed = False
        self._grace_s = DRAIN_S
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
        started = PodEvent(state="started", job_id=pod.job_id, node=node_name(), ranks=pod.comm.size)
        started.format_version = FORMAT_VERSION
        pod.events.write(started)
        self._io.start()
        self._ranks.greet(pod.init)
        backoff = Backoff()
        while True:
            busy = self._receive()
            busy |= self._collect()
            if not (self._results.draining or self._io.full or self._io.stuck):
                busy |= self._dispatch.start_all()
            if self._due("tick", TICK_S):
                self._tick()
            pod.comm.push()
            self._io.push()
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
        if busy or self.scheduler.queued or not (self._dispatch.nothing_free or self.scheduler.too_long):
            return None
        if not self._io.held and (self._work_stealing.may_get_work or self._io.seen.unsettled):
            return None  # others may hand something off, or whoever holds the rest may be dead
        if not self._io.held and self._io.seen.opened:
            if self._io.seen.awaited:
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
        poll, heard = self.pod.comm.poll, self._ranks.heard
        any_ = False
        for _ in range(TURN):
            if (received := poll()) is None:
                break
            rank, message = received
            any_ |= message["op"] != "beat"  # with nothing else to do the loop sleeps on
            heard[rank] = time.monotonic()
            getattr(self, f"_on_{message['op']}")(rank, message)
        return any_

    def _on_beat(self, rank: int, message: Message) -> None:
        pass

    def _on_ready(self, rank: int, message: Message) -> None:
        slots, node = int(message["slots"]), str(message["node"])
        self._ranks.join(rank, node)
        self._announced = []  # so that this rank is told as well
        self.scheduler.workers.join(rank, slots, *self.pod.room)
        self._results.refuse()
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
                        self._dispatch.look_soon()
                case Claimed(block):
                    busy = True
                    if self._dispatch.claimed(block):
                        self._work_stealing.claimed()
                case EndpointsChanged():
                    self._on_endpoints(report)
                case LimitExceeded(why):
                    self._results.pause(why)
                case Asked():
                    self._activities.asked = report
        return busy

    # --- what is due ---

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
        self._work_stealing.tick(self._dispatch.nothing_free, self._results.draining)
        self._say_slow()
        self._dispatch.tick(TICK_S)
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
        order = self._dispatch.coming()
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
        if self._io.finished:
            state = "done"  # also where the pod drains, and what it cut short has failed for good
        pod.events.write(PodEvent(state=state, stored=self._results.stored))
        pod.events.close()
        return state


def _io_thread(pod: Pod) -> RunIoThread:
    """Puts together what touches the run directory; it belongs to the thread from now on."""
    stored, ahead = StoredRollouts(pod.run, pod.ledger.renew), AHEAD_BLOCKS if pod.several_images else 0
    blocks = ClaimedBlocks(pod.run, pod.ledger, pod.events, stored, pod.tasks, ahead)
    endpoints = Endpoints(pod.run, pod.servers)
    return RunIoThread(pod.run, pod.journal, pod.ledger, blocks, pod.events, endpoints, pod.budget())
