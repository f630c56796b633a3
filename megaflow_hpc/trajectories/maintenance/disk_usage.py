"""Disk usage of a run by directory, and of a campaign file by column."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.trajectories.hdf5.file import datasets, open_file


@dataclass(frozen=True)
class DiskShare:
    """The disk usage of a directory, file or column.

    ``stored`` counts bytes on disk, ``raw`` uncompressed bytes (0 if unknown).
    """

    name: str
    files: int
    stored: int
    raw: int = 0


def of_run(path: Path) -> list[DiskShare]:
    """Returns the usage of each top-level directory and file of a run directory, largest first."""
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


def of_file(path: Path) -> list[DiskShare]:
    """Returns the usage of each column, largest first.

    The last entry, ``(structure)``, covers attributes, indices and, in files of versions 1 and 2, strings.

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
