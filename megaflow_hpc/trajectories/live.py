"""Following a campaign: each rollout once, as it becomes durable, whatever pod wrote it.

What is appended to the journals since the last look is read, and nothing twice: a look costs one listing of
``RUN/journal``, one stat per journal and what is new. A rollout is yielded when its first record that counts is seen; a
later one, of a failed rollout that was run again for example, is left to those who open the store afresh.

Seals are asked after the sizes of the journals and before their bytes: of what was there when a seal was made and what
a delayed writer appended behind it later, only the first is ever yielded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator

from megaflow_hpc.rundir import RunDir
from megaflow_hpc.trajectories.reader import open_trajectories
from megaflow_hpc.trajectories.row import Row
from megaflow_hpc.trajectories.sources import JournalSource
from megaflow_hpc.trajectories.winners import Entry, Index, Seals, entries, journals, seals_of

POLL_S = 1.0
"""Between two looks while nothing is new."""


class Follower:
    """The rollouts of a run that became durable since the last :meth:`poll`.

    Args:
        run: the run directory; its campaign may not have begun.
        after: ids that were seen before, by an earlier process for example.
        seals: where the seals are asked at every look; by default the ledger.
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
        """By journal: bytes of it that were read."""

    def poll(self) -> list[Row]:
        """What is new, in the order of commit as far as it is known now. Rows are lazy and stay valid."""
        sizes = {path: path.stat().st_size for path in journals(self._run)}
        grown = {path: size for path, size in sizes.items() if size > self._read.get(path.name, 0)}
        if not grown:
            return []
        seals = self._seals()
        found: list[Entry] = []
        for path, size in grown.items():
            new, self._read[path.name] = entries(path, seals, start=self._read.get(path.name, 0), limit=size)
            found += new
        winners: list[Entry] = []
        for entry in sorted(found, key=lambda e: (e.time_ns, e.journal, e.start)):
            if entry.id not in self._seen:
                self._seen.add(entry.id)
                winners.append(entry)
        source = JournalSource(Index(self._run.journal, winners))
        return [Row(source, row) for row in range(len(winners))]


def follow(
    run: RunDir | str | os.PathLike[str],
    over: Callable[[], bool],
    after: Iterable[str] = (),
    poll_s: float = POLL_S,
) -> Iterator[Row]:
    """Yields each rollout once, those that are there already first; ends when ``over`` said so before a last look.

    Args:
        run: the run directory.
        over: whether the campaign has ended; asked once per look.
        after: ids to leave out.
        poll_s: seconds between two looks while nothing is new.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    if not journals(run) and run.trajectories.exists():  # a result whose journals were removed since
        seen = set(after)
        with open_trajectories(run.trajectories) as store:
            yield from (row for row in store if row.id not in seen)
        return
    follower = Follower(run, after)
    while True:
        last = over()
        new = follower.poll()
        yield from new
        if last and not new:
            return
        if not new:
            time.sleep(poll_s)
