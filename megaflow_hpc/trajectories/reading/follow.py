"""Follow a campaign: yield each rollout as it becomes durable, from all pods, and continue in a later process.

Each poll reads the bytes that were appended to the journals since the last poll. It costs one listing of
``RUN/journal``, one stat per journal and the new bytes. A rollout is yielded at its first record that counts. If it was
yielded as failed or cancelled and a later attempt succeeds, it is yielded a second time, and never again.

A follower's *cursor* contains everything that a follower in a later process needs to continue: the bytes read of each
journal, and the ids that were yielded without success. The cursor omits ids of successes, because the ledger lets only
rollouts without a success run again. So it stays small in a long campaign. ::

    {"journals": {"pod-0.17.journal": 52100, …}, "failed": ["fix-humanize-3/default/1", …]}

At every poll, seals are read after the sizes of the journals and before their bytes. So records that a delayed writer
appends behind a seal are never yielded, not even after a cursor.
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

POLL_INTERVAL_S = 1.0
"""Seconds between two polls without new records."""
MAX_CACHE_AGE_S = 60.0
"""Seconds for which a network file system may show an earlier state of a journal."""


class Follower:
    """Finds the rollouts of a run that became durable since the last poll.

    Args:
        run: The run directory. Its campaign may not have started yet.
        after: Ids to leave out for good, such as those that an earlier process has seen succeed.
        seals: Called at every poll for the seals. Default: those of the ledger.
        cursor: The :attr:`cursor` of another follower of this run, to continue after its last result.

    Raises:
        ConfigError: ``cursor`` is invalid.
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
        """Size of a journal that ended in an incomplete record, and the first and last time of reading it at that size.
        Size of a journal that ended in an incomplete record, and the first and last time of reading it at that size."""

    @property
    def cursor(self) -> dict[str, Any]:
        """The position so far as JSON: ``journals``, the bytes read by file name, and ``failed``, ids."""
        return {"journals": dict(self._read), "failed": sorted(self._failed)}

    def poll(self) -> list[Row]:
        """Returns the new rows, in commit order as far as it is known. Rows are lazy and stay valid.

        Raises:
            OSError: The run directory cannot be read now. The next call returns the same rows.
        """
        found = self.entries()
        source = JournalSource(Index(self._run.journal, found))
        return [Row(source, row) for row in range(len(found))]

    def entries(self) -> list[RecordEntry]:
        """Returns the same results as :meth:`poll`, as positions in journals with the fields that decide the winner.

        Raises:
            OSError: As for :meth:`poll`.
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
        """Reads the trajectory of an entry, from this follower or from an earlier one of the run.

        Raises:
            ConfigError: Its record no longer exists.
            OSError: The run directory cannot be read now.
        """
        return Index(self._run.journal).load(entry)

    def _is_new(self, name: str, size: int) -> bool:
        """Return whether a journal may have new records. An incomplete record of a killed writer is not read for ever.
        Return whether a journal may have new records. An incomplete record of a killed writer is not read for ever."""
        if size <= self._read.get(name, 0):
            return False
        known, first, last = self._tails.get(name, (-1, 0.0, 0.0))
        return known != size or last - first <= MAX_CACHE_AGE_S  # a cache may show a size before the bytes

    def _note_tail(self, name: str, size: int) -> None:
        now = time.monotonic()
        known, first, _ = self._tails.pop(name, (-1, now, now))
        if self._read[name] < size:
            self._tails[name] = size, first if known == size else now, now

    def _take(self, entry: RecordEntry) -> bool:
        """Return whether an entry shall be yielded, and record it."""
        succeeded = entry.status in VERIFIED
        if entry.id in self._seen and not (succeeded and entry.id in self._failed):
            return False
        self._seen.add(entry.id)
        (self._failed.discard if succeeded else self._failed.add)(entry.id)
        return True

    def lacking(self) -> bool:
        """Returns whether the campaign is finished but a cache still hides the end of a journal.

        It only works for a follower without a cursor, since a cursor does not contain earlier successes.
        """
        ledger = Ledger(self._run)
        if not ledger.finished:
            return False
        return any(rollout.id not in self._seen for block in read_blocks(self._run) for rollout in block.rollouts)


def follow(
    run: RunDir | str | os.PathLike[str],
    over: Callable[[], bool],
    after: Iterable[str] = (),
    poll_s: float = POLL_INTERVAL_S,
) -> Iterator[Row]:
    """Yields each rollout once, existing ones first, and polls once more after ``over`` has returned true.

    It waits while the run directory does not answer, and logs that.

    Args:
        run: The run directory.
        over: Returns whether the campaign has ended. It is called once per poll.
        after: Ids to leave out.
        poll_s: Seconds between two polls without new records.

    Raises:
        OSError: The run directory did not answer for too long.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    if not journals(run) and run.trajectories.exists():  # the journals of this result were removed
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
            if away and not said:  # a single stale handle is not worth a message
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
            if time.monotonic() - ended > MAX_CACHE_AGE_S or not lacking:
                return
        if not new:
            time.sleep(poll_s)


def _places(cursor: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    """Return the bytes read by journal and the failed ids from a follower's cursor."""
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
