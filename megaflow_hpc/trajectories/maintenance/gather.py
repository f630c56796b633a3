"""Gathers the journals and shards of a run into one self-contained ``RUN/trajectories.h5``.

The winners are decided first, then copied in commit order. Rows that lie side by side in a shard are copied as columns,
in compressed form where chunks meet. Rows of several shards that lie between one another are put in order as columns,
and compressed by as many threads as there are CPUs. What no shard holds is decoded from the journals;
where much of a finished campaign has none, and there are CPUs for it, shards are made first, by a process each.

The file is published by rename, so a reader sees the old file or the new one, and a gather that was killed is simply
run again. It may run while the campaign does.

With ``rebuild`` the shards are ignored. Both ways make the same file.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host import descriptors
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.trajectories.hdf5.attributes import campaign_name, root_attributes
from megaflow_hpc.trajectories.hdf5.chunks import ChunkCache
from megaflow_hpc.trajectories.hdf5.column_writer import pool
from megaflow_hpc.trajectories.hdf5.deflate import CPUS
from megaflow_hpc.trajectories.hdf5.file import recorded_sources
from megaflow_hpc.trajectories.hdf5.interleave import Part, interleaved, taken
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.records import Entry, Seals
from megaflow_hpc.trajectories.journal.shard_maker import make_shard
from megaflow_hpc.trajectories.journal.shards import open_shard, shard_path
from megaflow_hpc.trajectories.journal.winners import Index, fingerprint, index, journals, seals_of

logger = logging.getLogger(__name__)

_ENOUGH_CPUS = 4
"""CPUs from which on making shards in processes, and then copying them, takes less time than decoding in this one."""
_SHARD_BYTES = 16 << 20
"""Size of a journal file whose shard is worth a process."""
_RUN_ROWS = 16
"""From this number of rows side by side on, columns are copied by themselves: in compressed form, if possible."""
MOST_OPEN = 512
"""Shards that are open at a time, with a descriptor each, and half of the descriptors that are left at most."""
_HELD_BYTES = 1 << 30
"""Memory of their small columns from which no further one is opened."""
_CACHE_BYTES = 160 << 20
"""Inflated chunks that are kept: the last one of a column is needed again."""
_TOGETHER_BYTES = 128 << 20
"""Bytes of rows that are put in order at a time."""
_ROW_BYTES = 1 << 10
"""What a row counts for beside its tokens, messages and artifacts."""


def gather(run: RunDir | str | os.PathLike[str], seals: Seals | None = None, *, rebuild: bool = False) -> Path:
    """Writes ``RUN/trajectories.h5`` unless it already holds everything the journals do.

    Args:
        run: the run directory.
        seals: (block, epoch) → (``<pod>.<start>``, bytes that count); by default those of the ledger.
        rebuild: rewrite the file in any case, from the journals alone.

    Returns:
        The path of the file.

    Raises:
        ConfigError: a journal is foreign or of a newer version, or journals the present file was made from are gone.
        OSError: no space left, or a read-only directory; the present file stays as it was.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    seals = seals_of(run) if seals is None else seals
    now = fingerprint(run, seals)  # before the journals are read: what is appended meanwhile makes the file stale
    before = recorded_sources(run.trajectories)
    if before is not None:
        known = before["journals"]
        gone = sorted(set(known) - set(now["journals"]))
        kept = {name: size for name, size in known.items() if name not in gone}
        if gone and (rebuild or kept != now["journals"]):
            raise ConfigError(
                f"{run.trajectories}: was made from journals that are gone ({', '.join(gone)}) and cannot be made anew "
                f"without loss; restore them to {run.journal}, or move the file away to gather what is left"
            )
        if gone or (before == now and not rebuild):
            return run.trajectories
    if not rebuild:
        _make_shards(run)
    found = index(run, seals, shards=not rebuild)
    with published(run.trajectories) as temporary:
        with TrajectoryWriter(temporary, campaign_name(run), now, root_attributes(run)) as writer:
            _copy(run, found, writer)
    return run.trajectories


def gathered(path: str | os.PathLike[str]) -> Path:
    """Returns the campaign file that is meant: ``path`` itself, or of a run directory its ``trajectories.h5``.

    One that does not hold all that the journals do is returned with a warning.

    Raises:
        ConfigError: no run directory, or one that was not gathered.
    """
    if not Path(path).is_dir():
        return Path(path)
    run = RunDir(path)
    remedy = f"megaflow-hpc gather {run}"
    if not run.trajectories.exists():
        read_run(run)
        raise ConfigError(f"{run}: was not gathered yet; write its trajectories.h5 with: {remedy}")
    before, now = recorded_sources(run.trajectories), fingerprint(run, seals_of(run))
    if before is not None and now["journals"].items() - before["journals"].items():
        logger.warning("%s: the run has stored more since; bring it up to date with: %s", run.trajectories, remedy)
    return run.trajectories


def _make_shards(run: RunDir) -> None:
    """Makes the shards that a finished campaign lacks, where that takes less time than decoding its journals here."""
    if CPUS < _ENOUGH_CPUS or not Ledger(run).finished:  # unfinished: a journal may grow, and its shard no longer fit
        return
    large = [path for path in journals(run) if path.stat().st_size >= _SHARD_BYTES]
    lacking = [path for path in large if not shard_path(run, path.name).exists()]
    if len(lacking) < CPUS:
        return
    with ThreadPoolExecutor(CPUS) as threads:
        made = list(threads.map(lambda path: make_shard(run, path), lacking))
    if not all(made):
        logger.warning("%d of %d shards could not be made; the journals are read instead", made.count(False), len(made))


def _copy(run: RunDir, found: Index, writer: TrajectoryWriter) -> None:
    with _Shards(run, found) as shards:
        waiting: list[Entry] = []
        for first, last in _runs(found):
            entry = found.winners[first]
            shard = shards.part(entry) if found.in_shard(entry) else None
            if shard is not None and last - first < _RUN_ROWS:
                for other in found.winners[first:last]:
                    waiting.append(other)
                    if shards.wait(other):
                        shards.hand_over(waiting, writer)
                continue
            shards.hand_over(waiting, writer)
            if shard is not None:
                writer.extend(shard.file, entry.shard_row, entry.shard_row + last - first)
                shards.done(entry.journal, last - first)
            else:
                for other in found.winners[first:last]:
                    writer.append(found.load(other))
        shards.hand_over(waiting, writer)


class _Shards:
    """The shards whose rows are being copied. Those that are open at a time are bounded in number and memory; beyond
    that, rows are decoded from the journals.
    """

    def __init__(self, run: RunDir, found: Index) -> None:
        self._run, self._found = run, found
        self._cache = ChunkCache(_CACHE_BYTES)
        self._threads = pool()
        self._parts: dict[str, Part | None] = {}
        """By journal; ``None`` for those that are not read."""
        self._left = Counter(entry.journal for entry in found.winners if found.in_shard(entry))
        """Rows of each that are still to be copied."""
        self._most_open = min(MOST_OPEN, descriptors.left() // 2)
        self._held = self._open = self._waiting = 0

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for part in self._parts.values():
            if part is not None:
                part.file.close()

    def part(self, entry: Entry) -> Part | None:
        """Returns the shard that holds a winner; ``None`` where the journal is to be read instead."""
        if entry.journal not in self._parts:
            self._parts[entry.journal] = self._opened(entry.journal)
        return self._parts[entry.journal]

    def _opened(self, journal: str) -> Part | None:
        if self._open >= self._most_open or self._held >= _HELD_BYTES:
            return None
        file = open_shard(self._run, self._run.journal / journal)
        if file is None:  # removed meanwhile
            return None
        try:
            part = Part(file, self._cache)
        except (OSError, LookupError, ValueError) as error:
            logger.warning("%s: damaged (%s); the journal is read instead", file.filename, error)
            file.close()
            return None
        self._open += 1
        self._held += part.held_bytes
        return part

    def wait(self, entry: Entry) -> bool:
        """Notes a row that is to be copied with others; returns whether they are enough."""
        part = self._parts[entry.journal]
        assert part is not None, "only rows of open shards wait"
        self._waiting += _ROW_BYTES + int(part.row_bytes[entry.shard_row])
        return self._waiting >= _TOGETHER_BYTES

    def hand_over(self, waiting: list[Entry], writer: TrajectoryWriter) -> None:
        """Copies the rows that wait, and empties the list."""
        if not waiting:
            return
        rows = None
        try:
            order = [(part, entry.shard_row) for entry in waiting if (part := self._parts[entry.journal]) is not None]
            rows = interleaved(taken(order), self._threads)
        except (OSError, LookupError, ValueError) as error:
            logger.warning("a shard is damaged (%s); %d records are read from their journals", error, len(waiting))
        if rows is not None:
            writer.add(rows)
        else:
            for entry in waiting:
                writer.append(self._found.load(entry))
        for journal, count in Counter(entry.journal for entry in waiting).items():
            self.done(journal, count)
        waiting.clear()
        self._waiting = 0

    def done(self, journal: str, count: int) -> None:
        """Closes a shard when the last of its rows was copied."""
        self._left[journal] -= count
        part = self._parts[journal]
        if part is not None and self._left[journal] <= 0:
            part.file.close()
            self._parts[journal] = None
            self._open -= 1
            self._held -= part.held_bytes


def _runs(found: Index) -> Iterator[tuple[int, int]]:
    """Yields spans ``[first, last)`` of winners that lie side by side in one shard, or single ones to be decoded."""
    first = 0
    winners = found.winners
    while first < len(winners):
        last = first + 1
        if found.in_shard(winners[first]):
            while last < len(winners) and _follows(winners[last - 1], winners[last], found):
                last += 1
        yield first, last
        first = last


def _follows(one: Entry, other: Entry, found: Index) -> bool:
    side_by_side = other.journal == one.journal and other.shard_row == one.shard_row + 1
    return side_by_side and found.in_shard(other)
