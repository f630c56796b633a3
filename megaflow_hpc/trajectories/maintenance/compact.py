"""Reduces the size of campaigns by dropping superseded attempts, selected artifacts and the journals of a finished run.
Also measures disk usage.

The new file is written under a temporary name and renamed. Journals are removed only if the campaign is finished, the
file contains all their records, and every column of the file can be read.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.hdf5.columns import Array, offset_faults, read, read_column, texts
from megaflow_hpc.trajectories.hdf5.file import (
    attribute,
    attribute_text,
    datasets,
    new_file,
    open_file,
    recorded_sources,
)
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS
from megaflow_hpc.trajectories.hdf5.writer import column_writer, reward_writer
from megaflow_hpc.trajectories.journal import packs
from megaflow_hpc.trajectories.journal.winners import fingerprint, seals_of
from megaflow_hpc.trajectories.maintenance.validate import column_digests

_WINDOW = 1 << 20
"""Number of entries to copy at a time, to bound memory."""

Mask = NDArray[np.bool_]
"""Boolean array that is True for each item to keep."""


def compact(
    path: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, drop: Sequence[str] = ()
) -> dict[str, int]:
    """Rewrites a campaign file without superseded attempts.

    Args:
        path: The campaign file.
        output: The file to write. Default: replace ``path``.
        drop: Shell patterns of artifact names to drop.

    Returns:
        Counts: ``bytes_before``, ``bytes_after``, ``attempts_dropped`` and ``artifacts_dropped``.

    Raises:
        ConfigError: ``path`` is not a campaign file.
        OSError: There is no space left, the directory is read-only, or a chunk is damaged. ``path`` is unchanged.
    """
    path = Path(path)
    target = Path(output) if output else path
    before = path.stat().st_size if path.exists() else 0
    with open_file(path) as source:
        for fault in offset_faults(source):
            raise ConfigError(f"{path}: {fault}; run: megaflow-hpc validate {path}")
        attempts = _final_attempts(source)
        artifacts = _kept_artifacts(source, drop)
        others = {name: attribute_text(source, name) for name in ("config", "versions") if name in source.attrs}
        campaign = attribute_text(source, "campaign")
        with (
            published(target) as temporary,
            new_file(temporary, campaign, attribute(source, "sources"), others) as (file, backing),
        ):
            for spec in COLUMNS.values():
                column = column_writer(file, spec)
                for values in _kept_values(source, spec.path, attempts, artifacts):
                    column.append(values)
                    backing.check()
                column.finish()
            file.create_group("rewards")
            for name in source.get("rewards", ()):
                column = reward_writer(file, name)
                column.append(read(source[f"rewards/{name}"]))
                column.finish()
    return {
        "bytes_before": before,
        "bytes_after": target.stat().st_size,
        "attempts_dropped": int((~attempts).sum()),
        "artifacts_dropped": int((~artifacts).sum()),
    }


def _kept_values(source: h5py.File, path: str, attempts: Mask, artifacts: Mask) -> Iterator[Array]:
    """Yields the values of a column for the new file, in windows that bound memory."""
    if path == "trajectories/attempt_offset":
        kept_before = np.concatenate([[0], np.cumsum(attempts)])
        yield kept_before[read(source[path])]
    elif path.startswith("attempts/"):
        yield read_column(source, path)[attempts]
    elif path in ("artifacts/name", "artifacts/trajectory"):
        yield read(source[path])[artifacts]
    elif path == "artifacts/offset":
        sizes = np.diff(read(source[path]))
        yield np.concatenate([[0], np.cumsum(sizes[artifacts])])
    elif path == "artifacts/bytes":
        offsets = read(source["artifacts/offset"])
        for number in np.flatnonzero(artifacts).tolist():
            yield read(source[path], offsets[number], offsets[number + 1])
    else:
        for start in itertools.count(step=_WINDOW):
            values = read_column(source, path, start, start + _WINDOW)
            if not len(values):
                return
            yield values


def _final_attempts(source: h5py.File) -> Mask:
    """Returns a mask of the attempts to keep. For each trajectory, this is the last attempt with its attempt number and
    status."""
    offsets = read(source["trajectories/attempt_offset"])
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    same = read(source["attempts/attempt"]) == read(source["trajectories/attempt"])[owner]
    same &= texts(source["attempts/status"]) == texts(source["trajectories/status"])[owner]
    candidates = np.flatnonzero(same)
    last = np.full(len(offsets) - 1, -1)
    np.maximum.at(last, owner[candidates], candidates)
    keep = np.zeros(len(owner), bool)
    keep[last[last >= 0]] = True
    return keep


def _kept_artifacts(source: h5py.File, drop: Sequence[str]) -> Mask:
    names = texts(source["artifacts/name"])
    return np.array([not any(fnmatch.fnmatch(name, pattern) for pattern in drop) for name in names], bool)


def drop_journals(run: RunDir, dry_run: bool = False) -> dict[str, int]:
    """Permanently removes the journals of a finished run, if its campaign file contains all their trajectories.

    Args:
        dry_run: Check everything but remove nothing.

    Returns:
        Counts: ``journals`` (files) and ``journal_bytes``.

    Raises:
        ConfigError: The campaign is not finished, or its file is incomplete or damaged.
    """
    if not Ledger(run).finished:
        raise ConfigError(f"{run}: the campaign is not finished; its journals are still needed")
    if recorded_sources(run.trajectories) != fingerprint(run, seals_of(run)):
        raise ConfigError(f"{run.trajectories}: does not hold all that the journals do; run: megaflow-hpc gather {run}")
    for check in column_digests(run.trajectories):
        if not check.good:
            raise ConfigError(
                f"{run.trajectories}: /{check.path} {check.state}; "
                f"the journals stay, recreate the file with: megaflow-hpc gather {run} --rebuild"
            )
    files = [path for path in run.journal.iterdir() if path.suffix in (packs.JOURNAL, packs.PACK)]
    size = sum(path.stat().st_size for path in files)
    if not dry_run:
        for path in files:
            path.unlink()
    return {"journals": len(files), "journal_bytes": size}


# --- disk usage -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskShare:
    """Disk usage of a directory, file or column: bytes on disk, and uncompressed bytes. The latter are 0 if unknown."""

    name: str
    files: int
    stored: int
    raw: int = 0


def usage_of_run(path: Path) -> list[DiskShare]:
    """Returns the disk usage of each top-level directory and file of a run directory, largest first."""
    sizes: dict[str, list[int]] = {}
    for directory, _, names in os.walk(path):
        for name in names:
            file = Path(directory, name)
            parts = file.relative_to(path).parts
            top = f"{parts[0]}/" if len(parts) > 1 else name
            with suppress(FileNotFoundError):  # replaced in the meantime
                sizes.setdefault(top, []).append(file.lstat().st_size)
    shares = [DiskShare(name, len(own), sum(own)) for name, own in sizes.items()]
    return sorted(shares, key=lambda share: -share.stored)


def usage_of_file(path: Path) -> list[DiskShare]:
    """Returns the usage of each column, largest first.

    The last entry, ``(structure)``, covers attributes and indices.

    Raises:
        ConfigError: ``path`` is not a campaign file.
    """
    shares: list[DiskShare] = []
    with open_file(path, complete=False) as file:
        for name, dataset in datasets(file).items():
            shares.append(DiskShare(name, 1, dataset.id.get_storage_size(), dataset.size * dataset.dtype.itemsize))
    shares.sort(key=lambda share: -share.stored)
    rest = path.stat().st_size - sum(share.stored for share in shares)
    return [*shares, DiskShare("(structure)", 1, rest)]
