"""Gathers the journals and shards of a run into one self-contained ``RUN/trajectories.h5``.

The winners are decided first, then copied in commit order: rows that lie side by side in a shard are copied as columns,
single rows and those that no shard holds are decoded from the journals. The file is published by rename, so a reader
sees the old file or the new one, and a gather that was killed is simply run again. It may run while the campaign does.

With ``rebuild`` the shards are ignored. Both ways make the same file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import h5py

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.hdf5.attributes import campaign_name, root_attributes
from megaflow_hpc.trajectories.hdf5.file import recorded_sources
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.records import Entry, Seals
from megaflow_hpc.trajectories.journal.shards import open_shard
from megaflow_hpc.trajectories.journal.winners import Index, fingerprint, index, seals_of

_RUN_ROWS = 16
"""Copying columns is quicker than decoding records from this number of rows side by side on."""


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
        gone = sorted(set(before.get("journals", {})) - set(now["journals"]))
        kept = {name: size for name, size in before.get("journals", {}).items() if name not in gone}
        if gone and (rebuild or kept != now["journals"]):
            raise ConfigError(
                f"{run.trajectories}: was made from journals that are gone ({', '.join(gone)}) and cannot be made anew "
                f"without loss; restore them to {run.journal}, or move the file away to gather what is left"
            )
        if gone or (before == now and not rebuild):
            return run.trajectories
    found = index(run, seals, shards=not rebuild)
    with published(run.trajectories) as temporary:
        with TrajectoryWriter(temporary, campaign_name(run), now, root_attributes(run)) as writer:
            _copy(run, found, writer)
    return run.trajectories


def _copy(run: RunDir, found: Index, writer: TrajectoryWriter) -> None:
    with ExitStack() as opened:
        shard: tuple[str, h5py.File | None] = ("", None)
        for first, last in _runs(found):
            entry = found.winners[first]
            if last - first < _RUN_ROWS or entry.shard_row < 0:
                for other in found.winners[first:last]:
                    writer.append(found.load(other))
                continue
            if shard[0] != entry.journal:
                opened.close()
                shard = (entry.journal, open_shard(run, run.journal / entry.journal))
                if shard[1] is not None:
                    opened.enter_context(shard[1])
            if shard[1] is None:  # removed meanwhile
                for other in found.winners[first:last]:
                    writer.append(found.load(other))
            else:
                writer.extend(shard[1], entry.shard_row, entry.shard_row + last - first)


def _runs(found: Index) -> Iterator[tuple[int, int]]:
    """Yields spans ``[first, last)`` of winners that lie side by side in one shard, or single ones to be decoded."""
    first = 0
    winners = found.winners
    while first < len(winners):
        last = first + 1
        if winners[first].shard_row >= 0 and winners[first].id not in found.losers:
            while last < len(winners) and _follows(winners[last - 1], winners[last], found):
                last += 1
        yield first, last
        first = last


def _follows(one: Entry, other: Entry, found: Index) -> bool:
    side_by_side = other.journal == one.journal and other.shard_row == one.shard_row + 1
    return side_by_side and other.id not in found.losers
