"""Stores results. Each result passes through four stages, in this order:

======== ============================================================= ============================= stage    reached
when                                                  an OSError leaves the result ========
============================================================= ============================= QUEUED   the loop requests
to store it APPENDED the journal accepts the record, even if it cannot write it    QUEUED DURABLE  fsync succeeds, with
the fence open before and after it       APPENDED SETTLED  its block records it, and is done after its last result
DURABLE ======== ============================================================= =============================

The *fence* is open while no other pod can take over this pod's blocks. A result is valid once it is durable, and is
reported to the loop once it is settled. After an error, the next call resumes at the same point. One fsync covers all
results that have arrived since the previous fsync (group commit).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlocks
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.rundir.events import EventWriter
from megaflow_hpc.trajectories.journal.writer import JournalWriter


class PendingResult(NamedTuple):
    """A result that has not passed all stages yet."""

    outcome: Outcome
    block: int
    epoch: int
    record: bytes


class Storing:
    """Moves results through the stages. Only the I/O thread uses it."""

    def __init__(self, journal: JournalWriter, ledger: Ledger, blocks: ClaimedBlocks, events: EventWriter) -> None:
        self._journal, self._ledger, self._blocks, self._events = journal, ledger, blocks, events
        self._queued: deque[PendingResult] = deque()
        self._appended: list[PendingResult] = []
        self._durable: deque[PendingResult] = deque()
        self._settled: list[PendingResult] = []

    def add(self, results: Iterable[PendingResult]) -> None:
        self._queued.extend(results)

    def advance(self) -> None:
        """Moves all results to the last stage. Does nothing while the fence is closed.

        Raises:
            LedgerError: Another pod took over a block.
            OSError: The run directory fails or does not respond. The next call resumes at the same point.
        """
        if not self._ledger.may_commit:
            return
        while self._queued:
            result = self._queued.popleft()
            self._appended.append(result)  # before the append, because the journal keeps the record on an error
            self._journal.append(result.record)
        if self._appended and not self._commit():
            return
        while self._durable:
            self._blocks.settled(self._durable[0].block, self._durable[0].outcome.id)
            self._settled.append(self._durable.popleft())

    def take_settled(self) -> tuple[PendingResult, ...]:
        """Returns the results that reached the last stage since the last call."""
        settled, self._settled = tuple(self._settled), []
        return settled

    def _commit(self) -> bool:
        if not self._ledger.committed(self._journal.commit):
            return False  # too late, since a pod that takes over may not see the results
        for result in self._appended:
            self._events.write(result.outcome.to_event())
        self._events.flush()  # before the block is marked, so that readers who see the mark also see the rollouts
        self._durable.extend(self._appended)
        self._appended = []
        return True
