"""Follows a campaign: yields each rollout as it becomes durable, from all pods, and can continue in a later process.

Each poll reads the bytes that were appended to the journals since the last one. It costs one listing of
``RUN/journal``, one stat per journal and the new bytes. A rollout is yielded at its first record that counts. A rollout
that was yielded as failed or cancelled is yielded a second time if a later attempt succeeds, and never again.

A follower's *cursor* contains everything that a follower in a later process needs to continue: the bytes read of each
journal, and the ids that were yielded without success. The cursor omits ids of successes, so it stays small in a long
campaign: the ledger lets only rollouts without a success run again. ::

    {"journals": {"pod-0.17.journal": 52100, …}, "failed": ["fix-humanize-3/default/1", …]}

At every poll, seals are read after the sizes of the journals and before their bytes. So records that a delayed writer
appends behind a seal are never yielded, also not after a cursor.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import Ledger, read_blocks
from megaflow_hpc.ledger.files import GIVE_UP_S, passing
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.winners import (
    Index,
    RecordEntry,
    Seals,
    decide,
    entries,
    in_commit_order,
    journals,
    seals_of,
)
from megaflow_hpc.trajectories.reading.journal_source import JournalSource
from megaflow_hpc.trajectories.reading.row import Row
from megaflow_hpc.trajectories.reading.store import open_trajectories
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import VERIFIED

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two looks while nothing is new."""
CACHED_S = 60.0
"""Seconds for which a network file system may show an earlier state of a journal."""


class Follower:
    """Finds the rollouts of a run that became durable since the last look.

    Args:
        run: the run directory; its campaign may not have begun.
        after: ids to leave out for good, for example those an earlier process has seen succeed.
        seals: called at every look for the seals; by default those of the ledger.
        cursor: the :attr:`cursor` of another follower of this run, to go on behind what that one returned.

    Raises:
        ConfigError: ``cursor`` is none.
    """

    def __init__(
        self,
        run: RunDir | str | os.PathLike[str],
        after: Iterable[str] = (),
        seals: Callable[[], Seals] | None = None,
        cursor: Mapping[str, Any] | None = None,
    ) -> None:
        self._run = run if isinstance(run, RunDir) else RunDir(run)
        self._seals = seals or (lambda: seals_of(self._run))
        self._read, self._failed = _places(cursor) if cursor is not None else ({}, set())
        self._seen = {*after, *self._failed}
        self._tails: dict[str, tuple[int, float, float]] = {}
        """Size of a journal that ended in half a record; when it was read first and last at that size."""

    @property
    def cursor(self) -> dict[str, Any]:
        """What was returned so far, as JSON: ``journals``, bytes read by file name, and ``failed``, ids."""
        return {"journals": dict(self._read), "failed": sorted(self._failed)}

    def poll(self) -> list[Row]:
        """Returns the new rows, in commit order as far as it is known now. Rows are lazy and stay valid.

        Raises:
            OSError: the run directory cannot be read now; the next call then returns the same rows.
        """
        found = self.entries()
        source = JournalSource(Index(self._run.journal, found))
        return [Row(source, row) for row in range(len(found))]

    def entries(self) -> list[RecordEntry]:
        """Returns what :meth:`poll` would have, as places in journals with what decided over them.

        Raises:
            OSError: as for :meth:`poll`.
        """
        sizes = {path: path.stat().st_size for path in journals(self._run)}
        grown = {path: size for path, size in sizes.items() if self._is_new(path.name, size)}
        if not grown:
            return []
        seals = self._seals()
        found: list[RecordEntry] = []
        read = dict(self._read)
        for path, size in grown.items():
            new, read[path.name] = entries(path, seals, start=read.get(path.name, 0), limit=size)
            found += new
        self._read = read
        for path, size in grown.items():
            self._note_tail(path.name, size)
        best, _ = decide(found)
        return [entry for entry in in_commit_order(best.values()) if self._take(entry)]

    def load(self, entry: RecordEntry) -> Trajectory:
        """Reads the trajectory of an entry, of this follower or of an earlier one of the run.

        Raises:
            ConfigError: its record is no longer there.
            OSError: the run directory cannot be read now.
        """
        return Index(self._run.journal).load(entry)

    def _is_new(self, name: str, size: int) -> bool:
        """Whether a journal may hold more than was read; what a killed writer left of a record is not read for ever."""
        if size <= self._read.get(name, 0):
            return False
        known, first, last = self._tails.get(name, (-1, 0.0, 0.0))
        return known != size or last - first <= CACHED_S  # a cache may show a size before the bytes

    def _note_tail(self, name: str, size: int) -> None:
        now = time.monotonic()
        known, first, _ = self._tails.pop(name, (-1, now, now))
        if self._read[name] < size:
            self._tails[name] = size, first if known == size else now, now

    def _take(self, entry: RecordEntry) -> bool:
        """Whether an entry is to be returned, which is then noted."""
        succeeded = entry.status in VERIFIED
        if entry.id in self._seen and not (succeeded and entry.id in self._failed):
            return False
        self._seen.add(entry.id)
        (self._failed.discard if succeeded else self._failed.add)(entry.id)
        return True

    def lacking(self) -> bool:
        """Returns whether the campaign is finished but not all was seen, because a cache hides the end of a journal.

        For a follower that began without a cursor, which does not tell what succeeded before it.
        """
        ledger = Ledger(self._run)
        if not ledger.finished:
            return False
        return any(rollout.id not in self._seen for block in read_blocks(self._run) for rollout in block.rollouts)


def follow(
    run: RunDir | str | os.PathLike[str],
    over: Callable[[], bool],
    after: Iterable[str] = (),
    poll_s: float = POLL_S,
) -> Iterator[Row]:
    """Yields each rollout once, present ones first, and ends with a last look after ``over`` returned true.

    While the run directory does not answer it waits, and says so in the log.

    Args:
        run: the run directory.
        over: returns whether the campaign has ended; called once per look.
        after: ids to leave out.
        poll_s: seconds between two looks while nothing is new.

    Raises:
        OSError: the run directory did not answer for too long.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    if not journals(run) and run.trajectories.exists():  # a result whose journals were removed since
        seen = set(after)
        with open_trajectories(run.trajectories) as store:
            yield from (row for row in store if row.id not in seen)
        return
    follower, away, ended, said = Follower(run, after), 0.0, 0.0, False
    while True:
        last = over()
        try:
            new = follower.poll()
            lacking = last and not new and follower.lacking()
        except OSError as error:
            now = time.monotonic()
            if not passing(error) or (away and now - away > GIVE_UP_S):
                raise
            if away and not said:  # a handle that is stale once is not worth a word
                logger.warning("%s does not answer (%s); waiting for it", run, error)
                said = True
            away = away or now
            time.sleep(poll_s)
            continue
        if said:
            logger.warning("%s is back after %.0f s", run, time.monotonic() - away)
        away, said = 0.0, False
        yield from new
        if last and not new:
            ended = ended or time.monotonic()
            if time.monotonic() - ended > CACHED_S or not lacking:
                return
        if not new:
            time.sleep(poll_s)


def _places(cursor: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    """Returns the bytes read by journal and the ids that failed, of a follower's cursor."""
    read, failed = cursor.get("journals"), cursor.get("failed")
    if (
        isinstance(read, dict)
        and isinstance(failed, list)
        and all(isinstance(name, str) for name in [*read, *failed])
        and all(isinstance(place, int) and place >= 0 for place in read.values())
    ):
        return dict(read), set(failed)
    raise ConfigError(
        f"cursor {str(cursor)[:80]}: expected what Follower.cursor gave, 'journals' with bytes by file name and "
        "'failed' with ids; leave it out to begin at the first rollout"
    )
