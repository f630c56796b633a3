"""Disk usage of a run by directory, and of a campaign file by column."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.trajectories.hdf5.file import datasets, open_file


@dataclass(frozen=True)
class DiskShare:
    """What a directory, file or column takes: ``stored`` bytes on disk, ``raw`` bytes of values (0 where unknown)."""

    name: str
    files: int
    stored: int
    raw: int = 0


def of_run(path: Path) -> list[DiskShare]:
    """Returns the usage of each directory and file at the top of a run directory, largest first."""
    found: dict[str, list[int]] = {}
    for directory, _, names in os.walk(path):
        for name in names:
            place = Path(directory, name)
            relative = place.relative_to(path)
            try:
                size = place.lstat().st_size
            except FileNotFoundError:
                continue  # replaced meanwhile
            found.setdefault(f"{relative.parts[0]}/" if len(relative.parts) > 1 else name, []).append(size)
    shares = [DiskShare(name, len(sizes), sum(sizes)) for name, sizes in found.items()]
    return sorted(shares, key=lambda share: -share.stored)


def of_file(path: Path) -> list[DiskShare]:
    """Returns the usage of each column, largest first; last ``(structure)``: attributes, indices and, in files of
    versions 1 and 2, texts.

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
