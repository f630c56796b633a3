"""The one thread of a pod that touches the run directory while rollouts run.

Rank 0's loop must never wait for a disk: a slot would stay free meanwhile, and on a file system that hangs for a minute
the workers would miss rank 0's heartbeat and leave. So ledger, journal, claimed blocks, endpoints and budget belong to
this thread, and it speaks with the loop by messages alone (:mod:`~megaflow_hpc.pod.master.run_io_messages`; the loop's
end is :class:`~megaflow_hpc.pod.master.run_io.RunIo`). In a turn it

* renews the lease, as long as the loop turns: one that hangs must not keep others from its work,
* appends results to the journal, fsyncs it once for all that came meanwhile (group commit), and only then settles and
  reports them,
* claims blocks, shares work with other pods, takes its part in what one pod does for all, lists engines, shows viewers
  what runs, and flushes events.

What a disk refuses is kept and tried again at the next turn.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.pod.master import histories
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlocks
from megaflow_hpc.pod.master.coordination import Coordination
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.pod.master.run_io_messages import (
    ClaimBlock,
    Claimed,
    Durable,
    EndpointsChanged,
    HandedOff,
    HandOff,
    LimitExceeded,
    ListEndpoints,
    LookForWorkRequests,
    PendingResult,
    Report,
    Request,
    RequestWork,
    RunState,
    ShowActivity,
    ShowProgress,
    Stop,
    Stopped,
    StoreResults,
    TurnEnded,
    WorkRequested,
)
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter, PodEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import Viewers
from megaflow_hpc.rundir.pods.aggregator import SummaryWriter

LOOK_S = 0.5
"""A turn is taken at least this often, for the sake of the lease."""
LOOP_HANGS_S = 60.0
"""A loop that has not turned for so long hangs; its longest turns take seconds."""
DELETED_S = 30.0
"""A run directory that is not there for this long is gone for good."""
RETRY_S = 1.0
"""Until a run directory that refused is tried again."""


class Journal(Protocol):
    """The part of :class:`~megaflow_hpc.trajectories.journal.writer.JournalWriter` that the thread needs."""

    @property
    def committed(self) -> int:
        """Bytes that are durable."""

    def append(self, record: bytes) -> int:
        """Adds a record, and keeps it if the disk refuses. Raises OSError."""

    def commit(self) -> object:
        """Makes every appended record durable. Raises OSError."""


class RunIoThread(threading.Thread):
    """What is passed in belongs to the thread from start to end; only ``events`` takes lines from both sides."""

    def __init__(
        self,
        run: RunDir,
        journal: Journal,
        ledger: Ledger,
        blocks: ClaimedBlocks,
        events: EventWriter,
        endpoints: Endpoints,
        budget: CampaignBudget,
    ) -> None:
        super().__init__(name="run-io", daemon=True)
        self.requests: SimpleQueue[Request] = SimpleQueue()
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self._run, self._journal, self._ledger, self._blocks = run, journal, ledger, blocks
        self._events, self._endpoints = events, endpoints
        self._coordination = Coordination(ledger, endpoints, budget)
        self._began_at = round(time.time(), 3)
        self._progress = ShowProgress(0, 0, 0, 0.0)
        name = ledger.identity.name if ledger.identity else ""
        self._viewers, self._summary = Viewers(run, name), SummaryWriter(run.events / f"{name}.jsonl")
        self._exceeded = ""
        self._state = RunState()
        self._stuck_since: float | None = None
        self._present = run.run_json.exists()
        self._looked_at = self._present_at = time.monotonic()
        self.loop_turned_at = time.monotonic()
        """The loop writes here that it lives."""
        # What was asked for and is not done yet.
        self._results: deque[PendingResult] = deque()
        self._appended: list[PendingResult] = []
        self._committed: deque[PendingResult] = deque()
        self._hand_offs: deque[HandOff] = deque()
        self._hand_offs_begun = 0
        self._claim_asked = self._list_asked = self._look_asked = False
        self._work_asked: int | None = None
        self._stop_asked: Stop | None = None
        self._requested_slots = 0
        """Slots of the request for work that stands in the ledger."""
        self._reported_requests: set[str] = set()

    def run(self) -> None:
        """Takes turns until it is told to stop."""
        try:
            while self._stop_asked is None:
                self.turn(LOOK_S if self._stuck_since is None else 0.0)
                if self._stuck_since is not None and self._stop_asked is None:
                    time.sleep(RETRY_S)
                if self._loop_hangs and not self._ledger.may_commit:
                    self._end_process()
            if self._stop_asked.release:
                self._release(self._stop_asked)
            self._post(Stopped(finished=self._stop_asked.release and self._ledger.finished))
        except BaseException as error:
            self.reports.put(Stopped(error))

    # --- requests ---

    def _receive(self, wait_s: float) -> None:
        try:
            self._take_in(self.requests.get(timeout=wait_s))
            while True:
                self._take_in(self.requests.get_nowait())
        except Empty:
            pass

    def _take_in(self, request: Request) -> None:
        match request:
            case StoreResults(results):
                self._results.extend(results)
            case ClaimBlock():
                self._claim_asked = True
            case ListEndpoints():
                self._list_asked = True
            case ShowProgress():
                self._progress = request
            case ShowActivity(activity):
                self._viewers.show(activity)
            case RequestWork(slots):
                self._work_asked = slots
            case LookForWorkRequests():
                self._look_asked = True
            case HandOff():
                self._hand_offs.append(request)
            case Stop():
                self._stop_asked = request

    # --- a turn ---

    def turn(self, wait_s: float = 0.0) -> None:
        """Takes in what was asked for, and does it as far as the run directory lets it.

        Args:
            wait_s: how long to wait for a request.

        Raises:
            MegaflowError: the pod cannot go on.
        """
        self._receive(wait_s)
        try:
            if not self._loop_hangs:
                self._renew()
            self._commit()
            self._coordination.tick()
            self._look_at_limits()
            self._claim()
            self._share()
            self._list_endpoints()
            self._look_for_viewers()
            self._look_whether_deleted()
            self._stuck_since = None
        except OSError as error:
            # A full disk or quota: what was asked for waits in memory, and each turn tries again.
            if self._stuck_since is None:
                why = f"the run directory cannot be written: {error}"
                self._events.write(PodEvent(state="started", why=why))
                self._stuck_since = time.monotonic()
        self._post_state()
        self.reports.put(TurnEnded(time.monotonic()))
        self._events.flush()
        self._summary.tick()

    def _renew(self, ended: str = "") -> None:
        said = {"t": round(time.time(), 3), "began_at": self._began_at, "ended": ended}
        self._ledger.show({**self._progress._asdict(), **said}, self._coordination.renew_s)
        self._ledger.renew(force=bool(ended))

    def _look_whether_deleted(self) -> None:
        """Ends the pod once its run directory is gone: what it has open there, it could write to for ever."""
        now = time.monotonic()
        if not self._present or now - self._looked_at < DELETED_S / 3:
            return
        self._looked_at = now
        if self._run.run_json.exists():
            self._present_at = now
        elif now - self._present_at > DELETED_S:
            raise LedgerError(f"{self._run}: was deleted or moved away while its pods run; what they ran is lost")

    @property
    def _loop_hangs(self) -> bool:
        return self._stop_asked is None and time.monotonic() - self.loop_turned_at > LOOP_HANGS_S

    def _end_process(self) -> None:
        """Ends rank 0, of which nothing counts any more, so that its job starts anew."""
        why = f"rank 0's loop has not turned for {time.monotonic() - self.loop_turned_at:.0f} s"
        try:
            print(f"pod: {why}; leaving", file=sys.stderr, flush=True)
            self._events.write(PodEvent(state="lost", why=why))
            self._events.flush()
        finally:
            os._exit(1)

    def _commit(self) -> None:
        if not self._ledger.may_commit:
            return
        while self._results:
            result = self._results.popleft()
            self._appended.append(result)  # first: after an error the journal keeps the record
            self._journal.append(result.record)
        if self._appended:
            if not self._ledger.committed(self._journal.commit):
                return  # too late: whoever takes over may not see it
            for result in self._appended:
                self._events.write(result.outcome.to_event())
            self._events.flush()  # before a block's mark: who sees the mark counts the rollout too
            self._committed.extend(self._appended)
            self._appended = []
        self._settle()

    def _settle(self) -> None:
        """Notes in their blocks what is durable, and reports it."""
        settled = []
        try:
            while self._committed:
                self._blocks.settled(self._committed[0].block, self._committed[0].outcome.id)
                settled.append(self._committed.popleft())
        finally:
            if settled:
                self._post(Durable(tuple(settled)))

    def _claim(self) -> None:
        if self._claim_asked and self._stop_asked is None:
            began = time.monotonic()
            block = self._blocks.claim()
            self._claim_asked = False
            self._post(Claimed(block, time.monotonic() - began))

    def _share(self) -> None:
        self._blocks.retry_hand_offs()
        while self._hand_offs:
            one = self._hand_offs.popleft()  # from here on the blocks keep it
            self._hand_offs_begun += 1
            self._blocks.hand_off(one.rollouts, one.each)
        if self._hand_offs_begun and not self._blocks.handing_off:
            self._post(HandedOff(self._hand_offs_begun))
            self._hand_offs_begun = 0
        slots, self._work_asked = self._work_asked, None
        if slots or (slots == 0 and self._requested_slots):
            self._requested_slots = slots
            self._ledger.request_work(slots)
        if self._look_asked:
            self._look_asked = False
            for request, wanted in self._ledger.work_requests().items():
                if request not in self._reported_requests:
                    self._reported_requests.add(request)
                    self._post(WorkRequested(wanted))

    def _list_endpoints(self) -> None:
        if self._list_asked:
            self._list_asked = False
            if self._coordination.list_engines():
                found = self._endpoints
                self._post(EndpointsChanged(found.all, found.names, found.unanswered))

    def _look_at_limits(self) -> None:
        if not self._exceeded and (why := self._coordination.report.exceeded):
            self._exceeded = why
            self._post(LimitExceeded(why))

    def _look_for_viewers(self) -> None:
        if (asked := self._viewers.look(self._coordination.asked)) is not None:
            self._post(asked)

    # --- the end ---

    def _release(self, stop: Stop) -> None:
        """Leaves word of the rollouts that go back, gives the blocks back, and tidies up after a finished campaign."""
        identity = self._ledger.identity
        try:
            histories.write(self._run, identity.name if identity else "", stop.histories)
        except OSError as error:
            print(f"pod: {self._run.partial}: {error}; what was cut short starts anew", file=sys.stderr)
        if self._requested_slots:
            self._ledger.request_work(0)
        self._blocks.release(self._journal.committed)
        self._viewers.leave()
        if self._ledger.finished:
            histories.remove_partials(self._run)
            self._viewers.clear()
        self._coordination.leave()
        self._summary.finish()
        self._renew(ended="released")

    # --- reports ---

    def state(self) -> RunState:
        """Returns what the thread knows; of the thread itself, or before it starts."""
        ledger = self._ledger
        return RunState(
            held=len(self._blocks),
            closes_at=ledger.closes_at,
            seen=replace(ledger.seen),
            claimed_all=not ledger.free,
            stuck_since=self._stuck_since,
        )

    def _post(self, report: Report) -> None:
        """Reports something, after the state that it comes with."""
        self._post_state()
        self.reports.put(report)

    def _post_state(self) -> None:
        state = self.state()
        if state != self._state:
            self._state = state
            self.reports.put(state)
