"""Follows a campaign: yields each rollout once, as it becomes durable, whichever pod wrote it.

Every look reads what was appended to the journals since the last, and nothing twice: it costs one listing of
``RUN/journal``, one stat per journal and the new bytes. A rollout is yielded at its first record that counts; a later
one, for example of a failed rollout that was run again, is seen by opening the store anew.

Seals are read after the sizes of the journals and before their bytes, so that records which a delayed writer appends
behind a seal are never yielded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator

from megaflow_hpc.ledger import Ledger, read_blocks
from megaflow_hpc.ledger.files import GIVE_UP_S, passing
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.records import Entry, Seals, entries
from megaflow_hpc.trajectories.journal.winners import Index, journals, seals_of
from megaflow_hpc.trajectories.reading.journal_source import JournalSource
from megaflow_hpc.trajectories.reading.row import Row
from megaflow_hpc.trajectories.reading.store import open_trajectories

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two looks while nothing is new."""
CACHED_S = 60.0
"""Seconds for which a network file system may show an earlier state of a journal."""


class Follower:
    """Finds the rollouts of a run that became durable since the last :meth:`poll`.

    Args:
        run: the run directory; its campaign may not have begun.
        after: ids to leave out, for example those an earlier process has seen.
        seals: called at every look for the seals; by default those of the ledger.
    """

    def __init__(
        self,
        run: RunDir | str | os.PathLike[str],
        after: Iterable[str] = (),
        seals: Callable[[], Seals] | None = None,
    ) -> None:
        self._run = run if isinstance(run, RunDir) else RunDir(run)
        self._seen = set(after)
        self._seals = seals or (lambda: seals_of(self._run))
        self._read: dict[str, int] = {}
        """Bytes read of each journal."""

    def poll(self) -> list[Row]:
        """Returns the new rows, in commit order as far as it is known now. Rows are lazy and stay valid.

        Raises:
            OSError: the run directory cannot be read now; the next call then returns the same rows.
        """
        sizes = {path: path.stat().st_size for path in journals(self._run)}
        grown = {path: size for path, size in sizes.items() if size > self._read.get(path.name, 0)}
        if not grown:
            return []
        seals = self._seals()
        found: list[Entry] = []
        read = dict(self._read)
        for path, size in grown.items():
            new, read[path.name] = entries(path, seals, start=read.get(path.name, 0), limit=size)
            found += new
        self._read = read
        winners: list[Entry] = []
        for entry in sorted(found, key=lambda e: (e.time_ns, e.journal, e.start)):
            if entry.id not in self._seen:
                self._seen.add(entry.id)
                winners.append(entry)
        source = JournalSource(Index(self._run.journal, winners))
        return [Row(source, row) for row in range(len(winners))]

    def lacking(self) -> bool:
        """Returns whether the campaign is finished but not all was seen, because a cache hides the end of a journal."""
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
