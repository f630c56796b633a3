"""The loop of rank 0: starts rollouts, stores their results, and drains the pod.

The loop makes the decisions and exchanges messages over MPI. Only the I/O thread accesses the run directory
(:mod:`~megaflow_hpc.pod.master.run_io`). To count each result exactly once, the thread works in a fixed order: it
appends a result to the journal, calls fsync, and only then counts the rollout. After a block's last rollout, it marks
the block done.
"""

from __future__ import annotations

import sys
import time

from megaflow_hpc.host.process import node_name
from megaflow_hpc.host.wire import Message
from megaflow_hpc.pod.comm import Backoff
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlocks
from megaflow_hpc.pod.master.dispatch import Dispatch
from megaflow_hpc.pod.master.drain import STUCK_S, Drain, End, Situation, end_of
from megaflow_hpc.pod.master.endpoints import Endpoints, Engines
from megaflow_hpc.pod.master.live_status import LiveStatuses
from megaflow_hpc.pod.master.pod import Pod
from megaflow_hpc.pod.master.ranks import Ranks
from megaflow_hpc.pod.master.results import Results
from megaflow_hpc.pod.master.run_io import (
    POLL_INTERVAL_S,
    Claimed,
    Durable,
    PodProgress,
    RunIo,
    RunIoThread,
)
from megaflow_hpc.pod.master.storing import PendingResult
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.rundir.budget import CampaignBudget, cores_of
from megaflow_hpc.rundir.events import (
    EngineEvent,
    PodEvent,
    WorkerEvent,
)
from megaflow_hpc.rundir.marks import PROGRESS
from megaflow_hpc.texts import printable
from megaflow_hpc.trajectories.journal.winners import StoredRollouts

TICK_S = 1.0
"""Seconds between checks of the drain file and the heartbeats."""
LISTING_S = 10.0
"""Seconds between listings of the engines."""
WAITING_S = 2.0
"""Seconds between listings of the engines while rollouts wait for an engine."""
AHEAD_S = 5.0
"""Seconds between announcements of upcoming images to the ranks."""
AHEAD_BLOCKS = 4
"""Number of small blocks whose images are staged before the pod claims them. Blocks are small at the end of a
campaign."""
EXPECTED_QUANTILE = 0.9
"""A rollout starts only if this quantile of its expected duration fits into the remaining walltime."""
SLOW_S = 5.0
"""Report the run directory as slow once it has not responded for this many seconds."""
MAX_MESSAGES_PER_TURN = 256
"""Maximum number of messages handled per iteration, so that a flood of results does not delay dispatch."""


class Master:
    """The main loop of rank 0."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self._estimates = Estimates()
        self.scheduler = Scheduler(
            lambda work: self._estimates.expect(work.rollout.task_id, work.rollout.arm, EXPECTED_QUANTILE) or 0.0,
        )
        self.scheduler.waiting, self.scheduler.judges = set(pod.servers), pod.judges
        self._io = RunIo(_io_thread(pod))
        self._ranks = Ranks(pod.comm)
        self._drain = Drain(pod, self.scheduler, self._ranks)
        self._results = Results(pod, self.scheduler, self._io, self._ranks, self._estimates, self._drain)
        self._dispatch = Dispatch(pod, self.scheduler, self._io, self._results, self._estimates, self._drain)
        self._live = LiveStatuses(pod.comm, self.scheduler, self._io)
        self._cores, self._began = cores_of(), time.monotonic()
        self._last: dict[str, float] = {}
        """Monotonic time at which each periodic task last ran, by the task's name."""
        self._engines = Engines()
        """The list of engines that the ranks last received."""
        self._announced_images: list[str] = []
        self._reported_slow = False
        """True if the latest report on stderr was that the run directory does not respond."""
        self._last_loss = ""
        """Reason why the most recently lost rank counts as lost."""
        self._reported_progress = False
        """True once this start of the pod has reported progress to the supervisor."""

    # --- the loop ---

    def run(self) -> str:
        """Runs the pod until it ends, and returns its final state: ``done``, ``drained``, ``paused`` or ``lost``.

        Raises:
            MegaflowError: The pod cannot continue.
        """
        pod = self.pod
        pod.ledger.register()
        pod.run.partial.mkdir(mode=0o700, exist_ok=True)
        pod.events.write(PodEvent(state="started", job_id=pod.job_id, node=node_name()))
        self._io.start()
        self._engines = self._io.state.engines
        self._ranks.greet(pod.init)
        backoff = Backoff()
        while True:
            busy = self._receive()
            busy |= self._collect()
            if not (self._drain.active or self._io.full or self._io.stuck):
                busy |= self._dispatch.start_all()
            tick = self._due("tick", TICK_S)
            if tick:
                self._tick()
            pod.comm.push()
            self._io.push()
            if tick or not busy:
                end = end_of(self._situation())
                if end is not None:
                    return self._leave(end)
            if busy:
                backoff.reset()
            else:
                backoff.sleep(pod.comm.link)

    def _situation(self) -> Situation:
        io, ranks, scheduler, seen = self._io, self._ranks, self.scheduler, self._io.state.seen
        return Situation(
            ranks_left=bool(ranks.all and (scheduler.workers.slots or ranks.awaited)),
            may_commit=io.may_commit,
            stuck_s=io.stuck_s,
            draining=self._drain.active,
            drain_over=self._drain.over,
            paused=bool(self._drain.paused),
            working=bool(scheduler.workers.running or not io.idle),
            queued=bool(scheduler.queued),
            too_long=bool(scheduler.too_long),
            nothing_free=self._dispatch.nothing_free,
            holds_blocks=bool(io.state.held),
            unsettled=seen.unsettled,
            opened=seen.opened,
            awaited=seen.awaited,
        )

    def _due(self, task: str, every_s: float) -> bool:
        now = time.monotonic()
        if now - self._last.get(task, -1e9) < every_s:
            return False
        self._last[task] = now
        return True

    # --- messages ---

    def _receive(self) -> bool:
        """Handles incoming messages. Returns true if any of them was not a heartbeat."""
        poll, heard_at = self.pod.comm.poll, self._ranks.heard_at
        busy = False
        for _ in range(MAX_MESSAGES_PER_TURN):
            if (received := poll()) is None:
                break
            rank, message = received
            busy |= message["op"] != "beat"
            heard_at[rank] = time.monotonic()
            getattr(self, f"_on_{message['op']}")(rank, message)
        return busy

    def _on_beat(self, rank: int, message: Message) -> None:
        pass

    def _on_ready(self, rank: int, message: Message) -> None:
        slots, node = int(message["slots"]), str(message["node"])
        self._ranks.join(rank, node)
        self._announced_images = []  # announce them again, for this rank
        self.scheduler.workers.join(rank, slots, *self.pod.room)
        self._results.refuse()
        self.pod.events.write(WorkerEvent(rank=rank, state="ready", slots=slots, node=node))
        if self._engines.files:
            self.pod.comm.send(rank, {"op": "endpoints", "endpoints": self._engines.all})

    def _on_engine(self, rank: int, message: Message) -> None:
        self._ranks.accompany(rank)
        self.pod.events.write(EngineEvent(rank=rank, state="ready", node=str(message["node"])))

    def _on_activity(self, rank: int, message: Message) -> None:
        self._live.report(rank, message)

    def _on_transcript(self, rank: int, message: Message) -> None:
        self._live.mirror(message)

    def _on_left(self, rank: int, message: Message) -> None:
        self._lose(rank, str(message.get("why", "it left")))

    def _on_result(self, rank: int, message: Message) -> None:
        self._results.ended(rank, Outcome.from_message(message))

    def _lose(self, rank: int, why: str) -> None:
        if rank not in self._ranks.everyone:  # the rank reported the reason before its runner ended
            return
        self._last_loss = why
        self._ranks.leave(rank)
        self._live.leave(rank)
        self._results.lost(rank, why)
        self.pod.events.write(WorkerEvent(rank=rank, state="lost", why=why))

    # --- the I/O thread ---

    def _collect(self) -> bool:
        """Handles the I/O thread's reports. Returns true if further rollouts may be able to start."""
        busy = False
        for report in self._io.collect():
            match report:
                case Durable(results):
                    busy = True
                    self._count(results)
                    if not self.scheduler.workers.running:
                        self._dispatch.look_soon()
                case Claimed(block):
                    busy = True
                    self._dispatch.claimed(block)
        state = self._io.state
        if state.engines is not self._engines:
            self._pass_on_engines(state.engines)
        self._drain.pause(state.exceeded)
        return busy

    def _count(self, results: tuple[PendingResult, ...]) -> None:
        self._results.count(results)
        self._report_progress()

    def _pass_on_engines(self, engines: Engines) -> None:
        self._engines = engines
        self.scheduler.waiting = set(engines.unanswered)
        self._ranks.tell({"op": "endpoints", "endpoints": engines.all})

    # --- periodic tasks ---

    def _tick(self) -> None:
        self._drain.obey()
        for rank, why in list(self._ranks.lost()):
            self._lose(rank, why)
        self._ranks.beat()
        if self.pod.servers and self._due("endpoints", WAITING_S if self.scheduler.waiting else LISTING_S):
            self._io.requests.list_engines = True
        if self._due("images", AHEAD_S):
            self._announce_images()
        self._report_slow()
        self._dispatch.tick(TICK_S)
        self._live.tick()
        self._show_progress()

    def _show_progress(self) -> None:
        self._io.requests.progress = PodProgress(
            running=self.scheduler.workers.running,
            queued=self.scheduler.queued,
            stored=self._results.stored,
            core_s=round(self._cores * (time.monotonic() - self._began), 1),
            tokens=self._live.tokens,
            tokens_per_s=self._live.tokens_per_s,
            usd=round(self._live.usd, 6),
        )

    def _report_progress(self) -> None:
        """Tells the supervisor that this start has made progress. Later calls have no effect."""
        if not self._reported_progress and self.pod.drain_file is not None:
            self.pod.drain_file.with_name(PROGRESS).touch()
            self._reported_progress = True

    def _report_slow(self) -> None:
        """Reports on stderr and in the events when the run directory stops responding, and when it recovers."""
        slow = self._io.stuck_s > SLOW_S
        if slow == self._reported_slow:
            return
        self._reported_slow = slow
        problem = self._io.state.error or "no answer"
        why = f"{problem}; results wait in memory" if slow else "answers again"
        print(printable(f"pod: {self.pod.run}: {why}"), file=sys.stderr, flush=True)
        self.pod.events.write(PodEvent(state="started", why=f"the run directory: {why}"))

    def _announce_images(self) -> None:
        """Sends the ranks a list of the images that they will need next, so that they can stage them in advance."""
        order = self._dispatch.coming()
        if order != self._announced_images and len(order) > 1:
            self._announced_images = order
            self._ranks.tell({"op": "images", "order": order})

    # --- the end ---

    def _leave(self, end: End) -> str:
        """Stops the workers, releases unfinished blocks, and returns the pod's final state."""
        pod, state = self.pod, end.word
        if end.why:
            self._drain.begin(end.why)
        pod.comm.push()
        self._ranks.stop()
        pod.comm.push()
        self._show_progress()
        if state == "lost":
            why = f"no worker rank is left: {self._last_loss}" if not self._ranks.all and self._last_loss else None
            pod.events.write(PodEvent(state=state, stored=self._results.stored, why=why))
            self._io.finish(POLL_INTERVAL_S)
            return state  # release nothing, because the pod that takes over seals the durable results
        self._results.cut_short(self._drain.preempted)
        if any(history.partial for history in self._results.histories.values()):
            self._report_progress()
        self._io.finish(STUCK_S, release=True, histories=self._results.histories)
        for report in self._io.collect():
            if isinstance(report, Durable):
                self._count(report.results)
        if self._io.finished:
            state = "done"  # even after a drain, if all interrupted rollouts have failed permanently
        pod.events.write(PodEvent(state=state, stored=self._results.stored))
        pod.events.close()
        return state


def _io_thread(pod: Pod) -> RunIoThread:
    """Builds the I/O thread and all objects that access the run directory."""
    stored, ahead = StoredRollouts(pod.run, pod.ledger.renew), AHEAD_BLOCKS if pod.several_images else 0
    blocks = ClaimedBlocks(pod.run, pod.ledger, stored, pod.tasks, ahead)
    endpoints = Endpoints(pod.run, pod.servers)
    budget = CampaignBudget(pod.run, pod.limits.model_dump())
    return RunIoThread(pod.run, pod.journal, pod.ledger, blocks, pod.events, endpoints, budget)
