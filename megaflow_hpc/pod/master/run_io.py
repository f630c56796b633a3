"""The clerk: the one thread of a pod that touches the run directory while rollouts run.

Rank 0's loop must never wait for a disk: a slot would stay free meanwhile, and on a file system that hangs for a minute
the workers would miss rank 0's heartbeat and leave. So the loop only hands work over and collects what was done:

* a result is appended to the journal, the journal is fsynced once for all that came meanwhile (group commit), and only
  then is the result handed back as durable;
* blocks are claimed and marked done, the lease renewed, engines listed and events flushed in between.

What is not durable yet is bounded: with :attr:`Clerk.full` the loop starts nothing more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from megaflow_hpc.ledger import Claim, Ledger
from megaflow_hpc.pod.master.claimed_blocks import Holdings
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.rundir import budget as budgets
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter, PodEvent
from megaflow_hpc.types import Rollout

LOOK_S = 0.5
"""The clerk looks after the lease at least this often."""
RETRY_S = 1.0
"""Until a journal that refused is tried again."""
MOST_RECORDS = 20_000
MOST_BYTES = 512 << 20
"""What may wait for the disk before nothing more is started."""


class Journal(Protocol):
    def append(self, record: bytes) -> int: ...
    def commit(self) -> object: ...


@dataclass(slots=True)
class Filed:
    """A result on its way to the disk."""

    outcome: Outcome
    block: int
    record: bytes


class Clerk:
    """All methods are called by rank 0's loop and none of them waits, but for :meth:`finish`."""

    def __init__(
        self,
        journal: Journal,
        ledger: Ledger,
        holdings: Holdings,
        events: EventWriter,
        endpoints: Endpoints,
        budget: CampaignBudget,
    ) -> None:
        self._journal, self._ledger, self._holdings = journal, ledger, holdings
        self._events, self._endpoints, self._budget = events, endpoints, budget
        self._budgeted = -budgets.LOOK_S
        self.exceeded = ""
        """The limit of the whole campaign that is passed."""
        self._wake = threading.Event()
        self._filed: deque[Filed] = deque()
        self._appended: list[Filed] = []
        self._durable: deque[Filed] = deque()
        self._claims: deque[tuple[Claim, list[Rollout]] | None] = deque()
        self._claiming = self._listing = self._listed = False
        self._stopping = False
        self._waiting_records = self._waiting_bytes = 0
        self._working_since: float | None = None
        self._error: BaseException | None = None
        self.claim_s = 0.0
        """What the last claim took."""
        self.stuck_since: float | None = None
        """Since when the journal refuses to be written (monotonic)."""
        self._thread = threading.Thread(target=self._work, name="clerk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- handing over ---

    def file(self, outcome: Outcome, block: int, record: bytes) -> None:
        """Journals a result; it comes back from :meth:`durable`."""
        self._waiting_records += 1
        self._waiting_bytes += len(record)
        self._filed.append(Filed(outcome, block, record))
        if not self._wake.is_set():
            self._wake.set()

    def claim(self) -> None:
        """Asks for a block; the answer comes from :meth:`claimed`. One at a time."""
        self._claiming = True
        self._wake.set()

    def list_endpoints(self) -> None:
        self._listing = True
        self._wake.set()

    # --- collecting ---

    def durable(self) -> list[Filed]:
        """The results that are on the disk since the last call.

        Raises:
            MegaflowError: what ended the clerk: the pod cannot go on.
        """
        if self._error is not None:
            raise self._error
        done = []
        while self._durable:
            filed = self._durable.popleft()
            self._waiting_bytes -= len(filed.record)
            done.append(filed)
        self._waiting_records -= len(done)
        return done

    def claimed(self) -> list[tuple[Claim, list[Rollout]] | None]:
        """Answers to :meth:`claim`: a claim with what of it has to run, or ``None`` where there is nothing to claim."""
        answers = []
        while self._claims:
            answers.append(self._claims.popleft())
        return answers

    def listed(self) -> bool:
        """Whether engines have changed since the last call."""
        changed, self._listed = self._listed, False
        return changed

    @property
    def claiming(self) -> bool:
        return self._claiming or bool(self._claims)

    @property
    def filing(self) -> bool:
        """Some result is not known to be durable yet."""
        return self._waiting_records > 0

    @property
    def full(self) -> bool:
        return self._waiting_records >= MOST_RECORDS or self._waiting_bytes >= MOST_BYTES

    @property
    def quiet(self) -> bool:
        """Nothing is under way: ledger and holdings may be looked at from outside."""
        return not self.filing and not self.claiming and not self._holdings.sharing

    @property
    def stuck_s(self) -> float:
        """For how long the disk has refused, or not answered."""
        began = [since for since in (self.stuck_since, self._working_since) if since is not None]
        return time.monotonic() - min(began) if began else 0.0

    def finish(self, seconds: float) -> bool:
        """Ends the thread when everything handed over is done; False if that takes longer."""
        self._stopping = True
        self._wake.set()
        self._thread.join(seconds)
        return not self._thread.is_alive() and self._error is None

    # --- the thread ---

    def _work(self) -> None:
        try:
            while True:
                self._wake.wait(LOOK_S)
                self._wake.clear()
                stopping = self._stopping
                self._working_since = time.monotonic()
                self._turn()
                self._working_since = None
                if self.stuck_since is not None and not stopping:
                    time.sleep(RETRY_S)
                    self._wake.set()
                elif stopping:
                    return
        except BaseException as error:
            self._error = error

    def _turn(self) -> None:
        try:
            self._ledger.renew()
            self._commit()
            if self._claiming and not self._stopping:
                began = time.monotonic()
                self._claims.append(self._holdings.claim())
                self.claim_s = time.monotonic() - began
                self._claiming = False
            self._holdings.share()
            if self._listing:
                self._listing = False
                self._listed |= self._endpoints.refresh()
            if time.monotonic() - self._budgeted >= budgets.LOOK_S:
                self._budgeted = time.monotonic()
                self.exceeded = self.exceeded or self._budget.exceeded()
            self.stuck_since = None
        except OSError as error:
            # A full disk or quota: what was handed over waits in memory, and each look tries again.
            if self.stuck_since is None:
                why = f"the run directory cannot be written: {error}"
                self._events.write(PodEvent(state="started", why=why))
                self.stuck_since = time.monotonic()
        self._events.flush()

    def _commit(self) -> None:
        if not self._ledger.may_commit:
            return
        while self._filed:
            self._appended.append(self._filed.popleft())
            self._journal.append(self._appended[-1].record)  # what it refuses it keeps, and writes with the next
        if not self._appended:
            return
        if not self._ledger.committed(self._journal.commit):
            return  # too late: whoever takes over may not see it
        settled, self._appended = self._appended, []
        for filed in settled:
            self._events.write(filed.outcome.to_event())
        self._events.flush()  # before a mark says that its block is done: who sees the mark counts the rollout too
        for filed in settled:
            self._holdings.settled(filed.block, filed.outcome.id)
        self._durable.extend(settled)
