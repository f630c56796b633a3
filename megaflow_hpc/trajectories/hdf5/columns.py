"""Reads columns of a campaign file, or parts of them, with plain h5py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OFFSETS, OPTIONAL, STRING, TEXT, text_offset

_WINDOW = 1 << 20
"""Maximum number of entries that :func:`read_slices` reads at once, unless one slice is longer."""


def read(dataset: h5py.Dataset, start: int = 0, end: int | None = None) -> NDArray[Any]:
    """Returns entries ``[start, end)`` of a dataset: numbers, ``S`` bytes, or ``str`` objects.

    Raises:
        OSError: a chunk is damaged.
    """
    start, end, _ = slice(start, end).indices(len(dataset))
    end = max(start, end)
    try:
        return _entries(dataset, start, end)
    except (OSError, RuntimeError) as error:
        first, last = _damaged_chunk(dataset, start, end)
        place = f"{dataset.file.filename}: {dataset.name}: entries {first} to {last - 1}"
        raise OSError(f"{place} cannot be read ({error}); the file is damaged") from error


def _entries(dataset: h5py.Dataset, start: int, end: int) -> NDArray[Any]:
    text = h5py.check_string_dtype(dataset.dtype)
    if text is not None and text.length is None:  # of variable length, in files of versions 1 and 2
        dataset = dataset.asstr("utf-8", "replace")
    values: NDArray[Any] = dataset[start:end]
    return values


def _damaged_chunk(dataset: h5py.Dataset, start: int, end: int) -> tuple[int, int]:
    """Returns the bounds of the first chunk between two entries that cannot be read."""
    size = dataset.chunks[0] if dataset.chunks else end - start
    for first in range(start - start % size, end, size):
        last = min(first + size, len(dataset))
        try:
            _entries(dataset, first, last)
        except (OSError, RuntimeError):
            return first, last
    return start, end


def read_column(file: h5py.File, path: str, start: int = 0, end: int | None = None) -> NDArray[Any]:
    """Returns entries ``[start, end)`` of a column of the schema, of a file of any version, as :func:`read` does.

    Columns that a file of an earlier version lacks have their default values.
    """
    if path not in file:
        return _defaults(file, path, start, end)
    if COLUMNS[path].dtype != TEXT or text_offset(path) not in file:
        return read(file[path], start, end)
    offset = file[text_offset(path)]
    start, end, _ = slice(start, end).indices(len(offset) - 1)
    bounds = read(offset, start, max(start, end) + 1).tolist()
    data = read(file[path], bounds[0], bounds[-1]).tobytes()
    found = np.empty(len(bounds) - 1, object)
    for row, (first, last) in enumerate(pairwise(bounds)):
        found[row] = data[first - bounds[0] : last - bounds[0]].decode("utf-8", "replace")
    return found


def _defaults(file: h5py.File, path: str, start: int, end: int | None) -> NDArray[Any]:
    if path == "messages/parent":  # each row's messages form one conversation
        bounds = read(file["trajectories/message_offset"])
        first = np.repeat(bounds[:-1], np.diff(bounds))
        parents: NDArray[Any] = np.arange(len(first)) - first - 1
        return parents[start:end]
    column = COLUMNS[path]
    like = next(other for other in COLUMNS.values() if other.extent == column.extent and other.path in file)
    count = len(range(*slice(start, end).indices(len(file[like.path]))))
    return np.full(count, OPTIONAL[path], "S1" if column.dtype == STRING else column.dtype)


def texts(dataset: h5py.Dataset, start: int = 0, end: int | None = None) -> NDArray[Any]:
    """Returns entries ``[start, end)`` of a dataset of strings as objects of ``str``."""
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


def read_slices(dataset: h5py.Dataset, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[Any]:
    """Returns the slices ``[starts[i], ends[i])`` end to end, in the given order.

    Slices that are close to each other are read together, so that HDF5 inflates each chunk once.

    Args:
        dataset: numbers.
        starts, ends: (S), bounds of the slices, in entries.

    Raises:
        OSError: a chunk is damaged.
    """
    sizes = ends - starts
    targets = np.cumsum(sizes) - sizes
    result = np.empty(int(sizes.sum()), dataset.dtype)
    order = np.argsort(starts, kind="stable")
    gap = dataset.chunks[0] if dataset.chunks else 1
    slices = zip(starts[order].tolist(), ends[order].tolist(), targets[order].tolist(), strict=True)
    for group in _neighbours(slices, gap):
        first = group[0][0]
        values = read(dataset, first, max(end for _, end, _ in group))
        for start, end, target in group:
            result[target : target + end - start] = values[start - first : end - first]
    return result


Slice = tuple[int, int, int]
"""(start, end, target): entries ``[start, end)`` go to position ``target`` of the result."""


def _neighbours(slices: Iterator[Slice], gap: int) -> Iterator[list[Slice]]:
    """Yields groups of ascending slices that have less than ``gap`` entries between them."""
    group: list[Slice] = []
    last = 0
    for item in slices:
        start, end, _ = item
        if group and (start > last + gap or end > group[0][0] + _WINDOW):
            yield group
            group = []
        last = max(last, end) if group else end
        group.append(item)
    if group:
        yield group


def offset_faults(file: h5py.File) -> Iterator[str]:
    """Yields the offset columns that do not ascend from 0 to the end of their target. Reads all offsets."""
    for path, target in OFFSETS.items():
        if path not in file:
            continue
        values = read(file[path])
        end = len(file[target]) - (path == "trajectories/message_offset")
        if not len(values) or values[0] != 0 or values[-1] != end:
            yield f"/{path}: runs from {values[:1]} to {values[-1:]}, expected 0 to {end}"
        elif len(bad := np.flatnonzero(np.diff(values) < 0)):
            yield f"/{path}: decreases at row {bad[0] + 1}"
