"""Results on their way to the disk, each through four stages in this order.

======== ============================================================= =============================
stage    reached by                                                    an OSError leaves the result
======== ============================================================= =============================
QUEUED   the loop's request
APPENDED the journal took the record; it keeps what the disk refuses   QUEUED
DURABLE  fsync, while the fence was open before and after it           APPENDED
SETTLED  its block has recorded it, and is done if it was the last     DURABLE
======== ============================================================= =============================

A result counts once it is durable, and is reported once it is settled. Every call continues where an error stopped the
last one. One fsync serves all results that came in meanwhile (group commit).
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
    """A result to be journalled."""

    outcome: Outcome
    block: int
    epoch: int
    record: bytes


class Storing:
    """Takes results through the stages. Belongs to the I/O thread."""

    def __init__(self, journal: JournalWriter, ledger: Ledger, blocks: ClaimedBlocks, events: EventWriter) -> None:
        self._journal, self._ledger, self._blocks, self._events = journal, ledger, blocks, events
        self._queued: deque[PendingResult] = deque()
        self._appended: list[PendingResult] = []
        self._durable: deque[PendingResult] = deque()
        self._settled: list[PendingResult] = []

    def add(self, results: Iterable[PendingResult]) -> None:
        """Queues results."""
        self._queued.extend(results)

    def advance(self) -> None:
        """Takes results as far as the run directory permits. Does nothing while the fence is closed.

        Raises:
            LedgerError: a block was taken over.
            OSError: the run directory refuses, or does not answer.
        """
        if not self._ledger.may_commit:
            return
        while self._queued:
            result = self._queued.popleft()
            self._appended.append(result)  # first: after an error the journal keeps the record
            self._journal.append(result.record)
        if self._appended and not self._commit():
            return
        while self._durable:
            self._blocks.settled(self._durable[0].block, self._durable[0].outcome.id)
            self._settled.append(self._durable.popleft())

    def take_settled(self) -> tuple[PendingResult, ...]:
        """Returns the results that were settled since the last call."""
        settled, self._settled = tuple(self._settled), []
        return settled

    def _commit(self) -> bool:
        if not self._ledger.committed(self._journal.commit):
            return False  # too late: a pod that takes over may not see the results
        for result in self._appended:
            self._events.write(result.outcome.to_event())
        self._events.flush()  # before the block's mark: readers who see the mark count the rollouts too
        self._durable.extend(self._appended)
        self._appended = []
        return True
