"""Reads every byte of a campaign file, so that HDF5 compares each chunk with its checksum.

The SHA-256 of a column depends on its values alone, not on chunks and compression: two files with the same digests
contain the same data.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import h5py

from megaflow_hpc.trajectories.hdf5.columns import read
from megaflow_hpc.trajectories.hdf5.file import datasets, open_file

_WINDOW_BYTES = 16 << 20
_TEXT_BYTES = 64
"""Assumed size of a text of variable length."""


@dataclass(frozen=True)
class ColumnCheck:
    """The result of reading one column."""

    path: str
    entries: int
    sha256: str
    """Hexadecimal digest of the values as they are in memory. A NUL follows each text of variable length."""
    state: str
    """``ok``, or what is wrong."""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with the column."""
        return self.state == "ok"


def verify(path: str | os.PathLike[str]) -> list[ColumnCheck]:
    """Reads every column and returns their checks, by path.

    Raises:
        ConfigError: the file cannot be opened as a campaign file.
    """
    with open_file(path, complete=False) as file:
        return [_check(name, dataset) for name, dataset in sorted(datasets(file).items())]


def _check(name: str, dataset: h5py.Dataset) -> ColumnCheck:
    text = h5py.check_string_dtype(dataset.dtype)
    if dataset.ndim != 1 or (dataset.dtype.kind == "O" and text is None):
        return ColumnCheck(name, 0, "", "cannot be read: it is no column of numbers or texts")
    digest = hashlib.sha256()
    size = _TEXT_BYTES if dataset.dtype.kind == "O" else dataset.dtype.itemsize
    chunk = dataset.chunks[0] if dataset.chunks else 1
    step = max(1, _WINDOW_BYTES // (size * chunk)) * chunk
    try:
        for start in range(0, len(dataset), step):
            values = read(dataset, start, start + step)
            if values.dtype.kind == "O":
                for text in values.tolist():
                    digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
            else:
                digest.update(values.tobytes())
    except OSError as error:
        return ColumnCheck(name, len(dataset), "", f"cannot be read: {error}")
    return ColumnCheck(name, len(dataset), digest.hexdigest(), "ok")
