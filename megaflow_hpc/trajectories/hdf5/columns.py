"""Reads a column of a campaign file, or a part of it, whatever the file claims.

All that reads columns comes through here or :mod:`~megaflow_hpc.trajectories.hdf5.chunks`: a chunk that inflates to
more than it should, and a long string that a million rows share, are errors before they are memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.chunks import ChunkCache, ChunkedColumn, gather
from megaflow_hpc.trajectories.hdf5.heaps import ENTRY, Heaps
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS
from megaflow_hpc.trajectories.hdf5.structure import TARGETS


def read(dataset: h5py.Dataset, start: int = 0, end: int | None = None) -> NDArray[Any]:
    """Returns entries ``[start, end)`` of a column: numbers, ``S`` bytes, or ``str`` objects.

    Raises:
        OSError: a chunk is damaged, or strings are claimed to be larger than the file.
    """
    start, end, _ = slice(start, end).indices(len(dataset))
    end = max(start, end)
    bounds = np.array([start], np.int64), np.array([end], np.int64)
    text = h5py.check_string_dtype(dataset.dtype)
    if text is None or text.length is not None:
        return gather([ChunkedColumn(dataset, ChunkCache(0))], *bounds)[0]
    if start == end:
        return np.empty(0, object)
    (places,) = gather([ChunkedColumn(dataset, ChunkCache(0), ENTRY)], *bounds)
    file = h5py.h5i.get_file_id(dataset.id)
    descriptor = file.get_vfd_handle()
    if int(places["length"].sum(dtype=np.int64)) > os.fstat(descriptor).st_size:
        raise OSError(f"{dataset.name}: strings that are longer together than the file; it is damaged")
    return Heaps(descriptor, file.get_create_plist().get_userblock()).texts(places)


def texts(dataset: h5py.Dataset, start: int = 0, end: int | None = None) -> NDArray[Any]:
    """Returns entries ``[start, end)`` of a column of text as objects of ``str``."""
    return text(read(dataset, start, end))


def text(values: NDArray[Any]) -> NDArray[Any]:
    """Returns a column of text as an object array of ``str``."""
    if values.dtype.kind != "S":
        return values.astype(object, copy=False)
    known: dict[bytes, str] = {}  # equal texts share one object
    found = np.empty(len(values), object)
    for row, value in enumerate(values.tolist()):
        if value not in known:
            known[value] = value.decode("utf-8", "replace")
        found[row] = known[value]
    return found


def offset_faults(file: h5py.File) -> Iterator[str]:
    """Yields which offsets of a whole file do not ascend to the end of their column; reads all of them."""
    for path, column in COLUMNS.items():
        if not column.is_offset:
            continue
        values = read(file[path])
        end = len(file[TARGETS[path]]) - (path == "trajectories/message_offset")
        if not len(values) or values[0] != 0 or values[-1] != end:
            yield f"/{path}: runs from {values[:1]} to {values[-1:]}, expected 0 to {end}"
        elif len(bad := np.flatnonzero(np.diff(values) < 0)):
            yield f"/{path}: decreases at row {bad[0] + 1}"
