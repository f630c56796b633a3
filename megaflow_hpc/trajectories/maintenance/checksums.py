"""Reads every byte of a campaign file and compares it with the checksums that its writer left.

Each deflate stream carries a checksum of its own, so a flipped bit in a chunk is noticed even without ours; ours also
tell whether every chunk is in its place. The SHA-256 of a column depends on its values alone, not on chunks and
compression: two files with the same digests hold the same.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import h5py
import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories.hdf5.column_writer import text_crc
from megaflow_hpc.trajectories.hdf5.columns import read
from megaflow_hpc.trajectories.hdf5.deflate import crc32
from megaflow_hpc.trajectories.hdf5.file import open_file

_WINDOW_BYTES = 16 << 20


@dataclass(frozen=True)
class ColumnCheck:
    """The result of reading one column."""

    path: str
    entries: int
    sha256: str
    """Hexadecimal digest of the values as they lie in memory; texts of variable length are each followed by NUL."""
    state: str
    """``ok``, ``no checksum``, or what is wrong."""

    @property
    def good(self) -> bool:
        """Whether nothing is wrong with the column."""
        return self.state in ("ok", "no checksum")


def verify(path: str | os.PathLike[str]) -> list[ColumnCheck]:
    """Reads every column and returns their checks, by path.

    Raises:
        ConfigError: it cannot be opened as a campaign file at all, or what lists its columns is damaged.
    """
    found: list[ColumnCheck] = []
    with open_file(path, complete=False) as file:
        names: list[str] = []
        try:
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        except RuntimeError as error:  # an object's own head is damaged
            raise ConfigError(f"{path}: damaged ({error}); gather it anew with --rebuild") from None
        for name in sorted(names):
            found.append(_check(name, file[name]))
    return found


def _check(name: str, dataset: h5py.Dataset) -> ColumnCheck:
    if dataset.ndim != 1:
        return ColumnCheck(name, 0, "", "cannot be read: it is not one-dimensional")
    digest, crc = hashlib.sha256(), 0
    kind = h5py.check_string_dtype(dataset.dtype)
    text = kind is not None and kind.length is None
    step = max(1, _WINDOW_BYTES // (64 if text else dataset.dtype.itemsize))
    chunk = dataset.chunks[0] if dataset.chunks else 1
    step += -step % chunk
    try:
        for start in range(0, len(dataset), step):
            values = read(dataset, start, start + step)
            if text:
                crc = text_crc(values, crc)
                digest.update(b"".join(value.encode("utf-8", "surrogateescape") + b"\0" for value in values.tolist()))
            else:
                values = np.ascontiguousarray(values)
                crc = crc32(values.view(np.uint8), crc) if values.dtype.kind != "S" else crc32(values.tobytes(), crc)
                digest.update(values.tobytes())
    except OSError as error:
        return ColumnCheck(name, len(dataset), "", f"cannot be read: {error}")
    recorded = dataset.attrs.get("crc32")
    state = "no checksum" if recorded is None else "ok" if np.all(recorded == crc) else "differs from its checksum"
    return ColumnCheck(name, len(dataset), digest.hexdigest(), state)
