"""Accesses the run directory for rank 0 in a single I/O thread, so that rank 0's loop never waits for a disk.

If the loop waited, slots would stay idle. If the file system hung for a minute, the workers would miss rank 0's
heartbeats and leave. Therefore only :class:`RunIoThread` uses the ledger, the journal, the claimed blocks, the engines
and the budget. The loop and the thread share three objects:

- :class:`Requests`: the loop collects requests and submits them once per iteration. From then on, they belong to the
  thread.
- reports (:data:`Report`): a queue of completed work. The loop handles each report once.
- :class:`RunState`: an immutable snapshot. The thread replaces it before it posts a report. When the loop receives a
  report, it therefore sees a state that is at least as recent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import Empty, SimpleQueue
from typing import NamedTuple

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.files import boot_clock
from megaflow_hpc.ledger.rules import Outlook
from megaflow_hpc.pod.master import histories
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlock, ClaimedBlocks
from megaflow_hpc.pod.master.coordination import Coordination
from megaflow_hpc.pod.master.endpoints import Endpoints, Engines
from megaflow_hpc.pod.master.histories import History
from megaflow_hpc.pod.master.storing import PendingResult, Storing
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter, PodEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import Asked, PodLiveStatus, Viewers
from megaflow_hpc.rundir.pods.aggregator import SummaryWriter
from megaflow_hpc.rundir.pods.condensing import condense
from megaflow_hpc.trajectories.journal.writer import JournalWriter

POLL_INTERVAL_S = 0.5
"""Maximum number of seconds between turns of the thread, so that it renews the lease in time."""
LOOP_HANGS_S = 60.0
"""The loop counts as hung after this many seconds without an iteration. Its longest iterations take a few seconds."""
RETRY_S = 1.0
"""Seconds to wait before a retry after an I/O error in the run directory."""
MAX_PENDING_RECORDS = 20_000
MAX_PENDING_BYTES = 512 << 20
"""No further rollouts start while this many records, or records of this many bytes in total, are waiting to be
written."""


# --- shared by the loop and the thread --------------------------------------------------------------------------------


class PodProgress(NamedTuple):
    """Progress of the pod, as published in its lease."""

    running: int = 0
    queued: int = 0
    stored: int = 0
    core_s: float = 0.0
    """Core-seconds that the allocation has used so far."""
    tokens: int = 0
    """Number of tokens that engines have sampled for this pod's rollouts."""
    tokens_per_s: float = 0.0
    """Average number of sampled tokens per second over the last 30 seconds."""
    usd: float = 0.0
    """Cost of the model calls of this pod's rollouts so far, in US dollars."""


@dataclass
class Stop:
    """Makes the thread finish all earlier requests as far as possible, and then end."""

    release: bool = False
    """True to release unfinished blocks."""
    histories: dict[str, History] = field(default_factory=dict)
    """Histories of the released rollouts, by rollout id. Later pods read them."""


@dataclass
class Requests:
    """Requests of the loop that the thread has not handled yet. ``None`` and false mean that nothing is requested."""

    results: list[PendingResult] = field(default_factory=list)
    claim: bool = False
    """True to claim a block. The response is a :class:`Claimed` report."""
    list_engines: bool = False
    progress: PodProgress | None = None
    """Progress to publish in the lease. It stays there until newer progress replaces it."""
    live: PodLiveStatus | None = None
    """Status of the rollouts that viewers requested. An empty status withdraws the previous one."""
    stop: Stop | None = None

    def add(self, more: Requests) -> None:
        """Merges later requests into these. Later values replace earlier values."""
        self.results += more.results
        self.claim |= more.claim
        self.list_engines |= more.list_engines
        if more.progress is not None:
            self.progress = more.progress
        if more.live is not None:
            self.live = more.live
        if more.stop is not None:
            self.stop = more.stop


_NOTHING = Requests()


@dataclass(frozen=True)
class Durable:
    """Report that results are durable, and that their blocks have recorded them."""

    results: tuple[PendingResult, ...]


@dataclass(frozen=True)
class Claimed:
    """Report that a claim has ended. ``block`` is ``None`` if no block was available."""

    block: ClaimedBlock | None
    seconds: float
    """Duration of the claim in seconds."""


@dataclass(frozen=True)
class Stopped:
    """Report that the thread has ended."""

    error: BaseException | None = None
    """The error that ended the thread, or ``None``."""
    finished: bool = False
    """True if every block of the campaign is done."""


Report = Durable | Claimed | Stopped


class IoPhase(Enum):
    """Phase of the thread.

    ======== ======================================== ==========
    phase    when                                     next phase
    ======== ======================================== ==========
    WORKING  a turn raises OSError                    STUCK
    STUCK    a turn succeeds                          WORKING
    any      the loop asks to stop, after that turn   STOPPED
    ======== ======================================== ==========
    """

    WORKING = "working"
    STUCK = "stuck"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RunState:
    """Snapshot of the thread's state after a turn."""

    phase: IoPhase = IoPhase.WORKING
    since: float = field(default_factory=time.monotonic)
    """Monotonic time at which the thread became stuck or, if it is not stuck, completed its latest turn."""
    error: str = ""
    """Error of the last turn, such as ``No space left on device``. Empty unless the thread is stuck."""
    held: int = 0
    """Number of claimed blocks that are not done."""
    closes_at: float = float("-inf")
    """Time on the ledger's clock after which this pod must not commit."""
    seen: Outlook = field(default_factory=Outlook)
    """Result of this pod's last search for a block to claim."""
    engines: Engines = field(default_factory=Engines)
    asked: Asked = field(default_factory=Asked)
    """Rollouts whose status viewers requested."""
    exceeded: str = ""
    """Description of the campaign-wide limit that was exceeded. Empty if none was."""


# --- the thread -------------------------------------------------------------------------------------------------------


class RunIoThread(threading.Thread):
    """Thread that accesses the run directory. No other thread may use its arguments, except ``events``.

    In each turn, the thread renews the lease, stores results and claims blocks. It also coordinates with the other
    pods, lists engines, updates the status for viewers and flushes events. After an I/O error, it keeps the failed
    request and retries it in the next turn.
    """

    def __init__(
        self,
        run: RunDir,
        journal: JournalWriter,
        ledger: Ledger,
        blocks: ClaimedBlocks,
        events: EventWriter,
        endpoints: Endpoints,
        budget: CampaignBudget,
    ) -> None:
        super().__init__(name="run-io", daemon=True)
        self.requests: SimpleQueue[Requests] = SimpleQueue()
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.loop_turned_at = time.monotonic()
        """Monotonic time of the loop's latest iteration, set by the loop."""
        self._run, self._journal, self._ledger, self._blocks, self._events = run, journal, ledger, blocks, events
        self._name = ledger.identity.name if ledger.identity else ""
        self._asked = Requests()
        self._storing = Storing(journal, ledger, blocks, events)
        self._coordination = Coordination(ledger, endpoints, budget)
        self._endpoints = endpoints
        self._viewers, self._summary = Viewers(run, self._name), SummaryWriter(run.events / f"{self._name}.jsonl")
        self._began_at = round(time.time(), 3)
        self.state = RunState()

    def start(self) -> None:
        """Starts the thread. The pod's lease must already exist."""
        self._enter(IoPhase.WORKING)
        super().start()

    def run(self) -> None:
        """Runs turns until the loop asks the thread to stop."""
        try:
            self._condense_earlier_starts()
            while self.state.phase is not IoPhase.STOPPED:
                self.turn(POLL_INTERVAL_S if self.state.phase is IoPhase.WORKING else 0.0)
                if self.state.phase is IoPhase.STUCK:
                    time.sleep(RETRY_S)
                if self._loop_hangs and not self._ledger.may_commit:
                    self._end_process()
            stop = self._asked.stop or Stop()
            if stop.release:
                self._release(stop)
            self._post(Stopped(finished=stop.release and self._ledger.finished))
        except BaseException as error:
            self.reports.put(Stopped(error))

    def _condense_earlier_starts(self) -> None:
        """Condenses the events of the pod's earlier starts to keep the number of files small."""
        pod, _, start = self._name.rpartition(".")
        try:
            condense(self._run.events, pod, start)
        except OSError as error:  # the next start retries
            print(f"pod: {self._run.events}: {error}; earlier starts are not condensed", file=sys.stderr)
        self._viewers.clear_earlier()

    def turn(self, wait_s: float = 0.0) -> None:
        """Handles all pending requests. Keeps those that fail with an I/O error for the next turn.

        Args:
            wait_s: Seconds to wait for a request.

        Raises:
            MegaflowError: The pod cannot continue.
        """
        self._receive(wait_s)
        try:
            if not self._loop_hangs:
                self._renew()
            self._store()
            self._coordination.tick()
            self._claim()
            self._list_engines()
            self._show_viewers()
            self._enter(IoPhase.WORKING)
        except OSError as error:
            # The disk or quota may be full. Requests stay in memory, and each turn retries them.
            if self.state.phase is IoPhase.WORKING:
                why = f"the run directory cannot be written: {error}"
                self._events.write(PodEvent(state="started", why=why))
                self._enter(IoPhase.STUCK, error.strerror or str(error))
        if self._asked.stop is not None:
            self._enter(IoPhase.STOPPED)
        self._events.flush()
        self._summary.tick()

    def _receive(self, wait_s: float) -> None:
        try:
            self._asked.add(self.requests.get(timeout=wait_s))
            while True:
                self._asked.add(self.requests.get_nowait())
        except Empty:
            pass

    @property
    def _loop_hangs(self) -> bool:
        return self._asked.stop is None and time.monotonic() - self.loop_turned_at > LOOP_HANGS_S

    def _end_process(self) -> None:
        """Kills rank 0, so that its job restarts. Unstored results are lost, because another pod may take over the
        blocks."""
        why = f"rank 0's loop has not turned for {time.monotonic() - self.loop_turned_at:.0f} s"
        try:
            print(f"pod: {why}; leaving", file=sys.stderr, flush=True)
            self._events.write(PodEvent(state="lost", why=why))
            self._events.flush()
        finally:
            os._exit(1)

    # --- parts of a turn ---

    def _renew(self, ended: str = "") -> None:
        progress = self._asked.progress or PodProgress()
        times = {"t": round(time.time(), 3), "began_at": self._began_at, "ended": ended}
        self._ledger.show({**progress._asdict(), **times}, self._coordination.renew_s)
        self._ledger.renew(force=bool(ended))

    def _store(self) -> None:
        self._storing.add(self._asked.results)
        self._asked.results = []
        try:
            self._storing.advance()
        finally:
            settled = self._storing.take_settled()
            if settled:
                self._post(Durable(settled))

    def _claim(self) -> None:
        if self._asked.claim and self._asked.stop is None:
            began = time.monotonic()
            block = self._blocks.claim()
            self._asked.claim = False
            self._post(Claimed(block, time.monotonic() - began))

    def _list_engines(self) -> None:
        if self._asked.list_engines:
            self._asked.list_engines = False
            self._coordination.list_engines()

    def _show_viewers(self) -> None:
        self._viewers.poll(self._coordination.asked)
        if self._asked.live is not None:
            self._viewers.show(self._asked.live)
            self._asked.live = None

    # --- the end ---

    def _release(self, stop: Stop) -> None:
        """Writes the histories of the released rollouts, releases blocks, and cleans up a finished campaign."""
        try:
            histories.write(self._run, self._name, stop.histories)
        except OSError as error:
            print(f"pod: {self._run.partial}: {error}; interrupted rollouts start over", file=sys.stderr)
        self._blocks.release(self._journal.committed)
        self._viewers.leave()
        if self._ledger.finished:
            histories.remove_partials(self._run)
            self._viewers.clear()
        self._coordination.leave()
        self._ledger.leave()
        self._summary.finish()
        self._renew(ended="released")

    # --- reports ---

    def _enter(self, phase: IoPhase, error: str = "") -> None:
        self.state = replace(self.state, phase=phase, since=time.monotonic(), error=error)
        self._update_state()

    def _update_state(self) -> None:
        self.state = replace(
            self.state,
            held=len(self._blocks),
            closes_at=self._ledger.closes_at,
            seen=self._ledger.seen,
            engines=self._endpoints.engines,
            asked=self._viewers.asked,
            exceeded=self._coordination.report.exceeded,
        )

    def _post(self, report: Report) -> None:
        """Updates the state, then posts a report."""
        self._update_state()
        self.reports.put(report)


# --- the loop's side --------------------------------------------------------------------------------------------------


class RunIo:
    """The loop's interface to the I/O thread. Only :meth:`finish` blocks.

    Args:
        clock: The ledger's clock, in seconds.
    """

    def __init__(self, thread: RunIoThread, clock: Callable[[], float] = boot_clock) -> None:
        self._thread, self._clock = thread, clock
        self.requests = Requests()
        """Requests that the loop has collected since the last :meth:`push`."""
        self._pending_records = self._pending_bytes = 0
        self.claiming = False
        """True while a claim is pending."""
        self.claim_s = 0.0
        """Duration of the last claim in seconds."""
        self.finished = False
        """True if every block of the campaign is done. Set by :meth:`collect` once the thread has ended."""

    def start(self) -> None:
        """Starts the thread. The pod's lease must already exist."""
        self._thread.start()

    # --- requests ---

    def store(self, outcome: Outcome, epoch: int, block: int) -> None:
        """Queues the result of a rollout in a claimed block for storing. A :class:`Durable` report confirms it."""
        record = outcome.payload(epoch, block)
        self._pending_records += 1
        self._pending_bytes += len(record)
        self.requests.results.append(PendingResult(outcome, block, epoch, record))

    def claim(self) -> None:
        """Requests a block. Only one claim can be pending."""
        self.claiming = True
        self.requests.claim = True

    def push(self) -> None:
        """Submits the collected requests. The loop calls it once per iteration, so that the thread wakes up only
        once."""
        if self.requests != _NOTHING:
            self._thread.requests.put(self.requests)
            self.requests = Requests()

    def finish(self, seconds: float, release: bool = False, histories: dict[str, History] | None = None) -> bool:
        """Ends the thread once it has handled all requests. Returns false if the thread is still alive after
        ``seconds``.

        Args:
            release: True to release unfinished blocks.
            histories: histories of the released rollouts, by rollout id. Later pods read them.
        """
        self.requests.stop = Stop(release, histories or {})
        self.push()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- reports ---

    def collect(self) -> Iterator[Report]:
        """Yields the thread's reports since the last call. Each call also tells the thread that the loop is alive.

        Raises:
            BaseException: The error that ended the thread. The pod cannot continue.
        """
        self._thread.loop_turned_at = time.monotonic()
        while True:
            try:
                report = self._thread.reports.get_nowait()
            except Empty:
                return
            match report:
                case Durable(results):
                    self._pending_records -= len(results)
                    self._pending_bytes -= sum(len(result.record) for result in results)
                case Claimed(_, seconds):
                    self.claiming, self.claim_s = False, seconds
                case Stopped(error, finished):
                    self.finished = finished
                    if error is not None:
                        raise error
            yield report

    # --- the state ---

    @property
    def state(self) -> RunState:
        return self._thread.state

    @property
    def may_commit(self) -> bool:
        """True while this pod may commit results. False once its lease is so old that another pod may soon take
        over."""
        return self._clock() < self.state.closes_at

    @property
    def full(self) -> bool:
        """True if so many results are waiting to be written that no further rollouts should start."""
        return self._pending_records >= MAX_PENDING_RECORDS or self._pending_bytes >= MAX_PENDING_BYTES

    @property
    def idle(self) -> bool:
        """True if no result or claim is pending."""
        return not (self._pending_records or self.claiming)

    @property
    def stuck(self) -> bool:
        """True if the thread's last turn failed with an I/O error in the run directory."""
        return self.state.phase is IoPhase.STUCK

    @property
    def stuck_s(self) -> float:
        """Seconds since the run directory last responded without an error."""
        passed_s = time.monotonic() - self.state.since
        return passed_s if self.stuck else max(0.0, passed_s - POLL_INTERVAL_S)
