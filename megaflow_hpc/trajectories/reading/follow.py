"""Follows a campaign: yields the rollouts of all pods as they become durable. Following can be resumed in a later
process.

Each poll reads only the bytes appended to the journals since the last poll. Apart from those bytes, it costs one
listing of ``RUN/journal`` and one stat for the journal of each pod's latest start. Two kinds of journals are checked
only every :data:`FULL_INTERVAL_S`: journals of earlier starts, to which only a delayed writer can still append, and
journals that have not grown for :data:`QUIET_S`. A rollout is yielded at its first valid record. If that record failed
or was cancelled and a later attempt succeeds, the rollout is yielded a second time, and never again.

A follower's *cursor* allows a later process to continue: it contains the number of bytes read from each journal, and
the ids yielded without success. Successful ids are omitted, because the ledger lets only unsuccessful rollouts run
again. The cursor therefore stays small even in a long campaign. ::

    {"journals": {"pod-0.17.journal": 52100, …}, "failed": ["fix-humanize-3/default/1", …]}

Each poll first gets the journal sizes, then reads the seals, then the new bytes. This order ensures that records
appended after a seal by a delayed writer are never yielded, even after resuming from a cursor.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import Ledger, read_blocks
from megaflow_hpc.ledger.files import GIVE_UP_S, passing
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal import packs
from megaflow_hpc.trajectories.journal.winners import (
    Index,
    RecordEntry,
    decide,
    entries,
    in_commit_order,
    journals,
    seals_of,
    sizes_of,
)
from megaflow_hpc.trajectories.reading.sources import JournalSource
from megaflow_hpc.trajectories.reading.store import Row, open_trajectories
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import VERIFIED

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
"""Seconds between polls while there are no new records."""
FULL_INTERVAL_S = 30.0
"""Seconds between checks of all journals, including journals of earlier starts and journals that do not grow."""
QUIET_S = 600.0
"""Check a journal less often if it has not grown for this many seconds. Its pod may have ended, and a run whose pods
are not requeued has many such journals."""
MAX_CACHE_AGE_S = 60.0
"""Maximum time in seconds for which a network file system may return stale data for a journal."""


class Follower:
    """Finds the rollouts of a run that have become durable since the last poll.

    Args:
        run: The run directory. Its campaign may not have started yet.
        after: Ids that are never yielded, such as those whose success an earlier process has already seen.
        cursor: The :attr:`cursor` of an earlier follower of this run. Continues after that follower's last result.

    Raises:
        ConfigError: ``cursor`` is invalid.
    """

    def __init__(
        self,
        run: RunDir | str | os.PathLike[str],
        after: Iterable[str] = (),
        cursor: Mapping[str, Any] | None = None,
    ) -> None:
        self._run = run if isinstance(run, RunDir) else RunDir(run)
        self._read: dict[str, int] = {}
        """Number of bytes read from each journal, by file name."""
        self._skipped: set[str] = set()
        """Names of journals that are skipped until the next check of all journals."""
        self._grew_at: dict[str, float] = {}
        """Time at which each journal was first seen or last grew, by file name."""
        self._full_at = -math.inf
        """Time of the latest check of all journals."""
        self._failed: set[str] = set()
        """Ids of rollouts yielded without success."""
        if cursor is not None:
            self._read, self._failed = _read_cursor(cursor)
        self._seen = {*after, *self._failed}

    @property
    def cursor(self) -> dict[str, Any]:
        """Current position as JSON. It consists of ``journals`` (bytes read, by file name) and ``failed`` (ids of
        failed rollouts)."""
        return {"journals": dict(self._read), "failed": sorted(self._failed)}

    def poll(self) -> list[Row]:
        """Returns the new rows, in commit order among themselves. Rows are lazy, and stay valid after later polls.

        Raises:
            OSError: The run directory is unavailable. No rows are lost: the next call returns them.
        """
        new = self.entries()
        source = JournalSource(Index(self._run.journal, new))
        return [Row(source, row) for row in range(len(new))]

    def entries(self) -> list[RecordEntry]:
        """Returns the same results as :meth:`poll`, as index entries instead of rows.

        Raises:
            OSError: As for :meth:`poll`.
        """
        now = time.monotonic()
        if now >= self._full_at + FULL_INTERVAL_S:
            self._full_at, self._skipped = now, set()
        sizes = sizes_of(self._run, skip=self._skipped)
        grown = {name: size for name, size in sizes.items() if size > self._read.get(name, 0)}
        valid: list[RecordEntry] = []
        if grown:
            seals = seals_of(self._run)
            read = dict(self._read)
            for name, size in grown.items():
                of_journal, read[name] = entries(self._run.journal / name, seals, start=read.get(name, 0), limit=size)
                valid += of_journal
            self._read = read
        self._grew_at |= {name: now for name in sizes if name in grown or name not in self._grew_at}
        quiet = {name for name in sizes if now - self._grew_at[name] >= QUIET_S}
        self._skipped |= _of_earlier_starts(sizes) | quiet
        best, _ = decide(valid)
        return [entry for entry in in_commit_order(best.values()) if self._take(entry)]

    def load(self, entry: RecordEntry) -> Trajectory:
        """Reads the trajectory of an entry, returned by this or an earlier follower of the run.

        Raises:
            ConfigError: The record no longer exists.
            OSError: The run directory is unavailable.
        """
        return Index(self._run.journal).load(entry)

    def _take(self, entry: RecordEntry) -> bool:
        """Returns whether to yield an entry. If so, marks it as yielded."""
        succeeded = entry.status in VERIFIED
        if entry.id in self._seen and not (succeeded and entry.id in self._failed):
            return False
        self._seen.add(entry.id)
        if succeeded:
            self._failed.discard(entry.id)
        else:
            self._failed.add(entry.id)
        return True

    def lacking(self) -> bool:
        """Returns whether the campaign is finished although some rollouts have not been seen yet, because a cache hides
        them.

        Valid only for a follower that was created without a cursor, because a cursor omits earlier successes.
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
    """Yields each rollout once, starting with those already stored. Polls a last time after ``over`` has returned true.

    While the run directory is unavailable, logs the outage and waits.

    Args:
        run: The run directory.
        over: Returns whether the campaign has ended. Called once per poll.
        after: Ids to skip.
        poll_s: Seconds between polls while there are no new records.

    Raises:
        OSError: The run directory was unavailable for too long.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    if not journals(run) and run.trajectories.exists():  # the journals of this result have been removed
        seen = set(after)
        with open_trajectories(run.trajectories) as store:
            yield from (row for row in store if row.id not in seen)
        return
    follower = Follower(run, after)
    away_since: float | None = None
    ended: float | None = None
    while True:
        is_last = over()
        try:
            new = follower.poll()
            lacking = is_last and not new and follower.lacking()
        except OSError as error:
            if not passing(error) or (away_since and time.monotonic() - away_since > GIVE_UP_S):
                raise
            if away_since is None:
                away_since = time.monotonic()
                logger.warning("%s does not answer (%s); waiting for it", run, error)
            time.sleep(poll_s)
            continue
        if away_since is not None:
            logger.warning("%s is back after %.0f s", run, time.monotonic() - away_since)
            away_since = None
        yield from new
        if is_last and not new:
            ended = ended or time.monotonic()
            if not lacking or time.monotonic() - ended > MAX_CACHE_AGE_S:
                return
        if not new:
            time.sleep(poll_s)


def _of_earlier_starts(names: Iterable[str]) -> set[str]:
    """Returns all journals except the latest one of each pod."""
    of_pods: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        pod, _, start = name.removesuffix(packs.JOURNAL).rpartition(".")
        if start.isdecimal():
            of_pods.setdefault(pod, []).append((int(start), name))
    return {name for starts in of_pods.values() for _, name in sorted(starts)[:-1]}


def _read_cursor(cursor: Mapping[str, Any]) -> tuple[dict[str, int], set[str]]:
    """Parses a cursor. Returns the number of bytes read from each journal by file name, and the failed ids."""
    read, failed = cursor.get("journals"), cursor.get("failed")
    if (
        isinstance(read, dict)
        and isinstance(failed, list)
        and all(isinstance(name, str) for name in [*read, *failed])
        and all(isinstance(size, int) and size >= 0 for size in read.values())
    ):
        return dict(read), set(failed)
    raise ConfigError(
        f"cursor {str(cursor)[:80]}: expected what Follower.cursor gave, 'journals' with bytes by file name and "
        "'failed' with ids; leave it out to begin at the first rollout"
    )
