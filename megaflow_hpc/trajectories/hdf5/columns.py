"""Reads columns of a campaign file, whole or in slices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OFFSETS, TEXT, text_offset

Array = NDArray[Any]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def read(dataset: h5py.Dataset, start: int = 0, end: int | None = None) -> Array:
    """Returns entries ``[start, end)`` of a dataset: numbers or ``S`` bytes.

    Raises:
        OSError: A chunk is corrupt.
    """
    start, end, _ = slice(start, end).indices(len(dataset))
    end = max(start, end)
    try:
        values: Array = dataset[start:end]
    except (OSError, RuntimeError) as error:
        entries = f"{dataset.file.filename}: {dataset.name}: entries {start} to {end - 1}"
        raise OSError(f"{entries} cannot be read ({error}); the file is damaged") from error
    return values


def read_column(file: h5py.File, path: str, start: int = 0, end: int | None = None) -> Array:
    """Returns entries ``[start, end)`` of a schema column: numbers, ``S`` bytes, or ``str`` objects for a :data:`TEXT`
    column."""
    if COLUMNS[path].dtype != TEXT:
        return read(file[path], start, end)
    offset = file[text_offset(path)]
    start, end, _ = slice(start, end).indices(len(offset) - 1)
    bounds = read(offset, start, max(start, end) + 1).tolist()
    data = read(file[path], bounds[0], bounds[-1]).tobytes()
    values = np.empty(len(bounds) - 1, object)
    for row, (first, last) in enumerate(pairwise(bounds)):
        values[row] = data[first - bounds[0] : last - bounds[0]].decode("utf-8", "replace")
    return values


def texts(dataset: h5py.Dataset) -> Array:
    """Returns a whole string dataset as ``str`` objects."""
    return text(read(dataset))


def text(values: Array) -> Array:
    """Converts a text column to an object array of ``str``."""
    if values.dtype.kind != "S":
        return values.astype(object, copy=False)
    decoded: dict[bytes, str] = {}  # equal strings share one object
    result = np.empty(len(values), object)
    for row, value in enumerate(values.tolist()):
        if value not in decoded:
            decoded[value] = value.decode("utf-8", "replace")
        result[row] = decoded[value]
    return result


def read_slices(dataset: h5py.Dataset, starts: Integers, ends: Integers) -> Array:
    """Returns the slices ``[starts[i], ends[i])``, concatenated in the given order.

    Args:
        dataset: A numeric dataset.
        starts, ends: Slice bounds in entries, of shape (S,).

    Raises:
        OSError: A chunk is corrupt.
    """
    sizes = ends - starts
    targets = np.cumsum(sizes) - sizes
    result = np.empty(int(sizes.sum()), dataset.dtype)
    for number in np.argsort(starts).tolist():  # in file order, so that HDF5 decodes each chunk once
        target = targets[number]
        result[target : target + sizes[number]] = read(dataset, starts[number], ends[number])
    return result


def offset_faults(file: h5py.File) -> Iterator[str]:
    """Yields a message for each offset column that does not ascend from 0 to the length of its target. Reads all
    offsets."""
    for path, target in OFFSETS.items():
        values = read(file[path])
        end = offset_end(path, len(file[target]))
        if not len(values) or values[0] != 0 or values[-1] != end:
            yield f"/{path}: runs from {values[:1]} to {values[-1:]}, expected 0 to {end}"
            continue
        decreasing = np.flatnonzero(np.diff(values) < 0)
        if len(decreasing):
            yield f"/{path}: decreases at row {decreasing[0] + 1}"


def offset_end(path: str, target_length: int) -> int:
    """Returns the expected last value of an offset column, given the column that it points into."""
    is_messages = path == "trajectories/message_offset"  # messages/offset has one more entry than messages
    return target_length - 1 if is_messages else target_length


def filters_of(dataset: h5py.Dataset) -> list[int]:
    """Returns the filter ids of a dataset, in the order of application."""
    options = dataset.id.get_create_plist()
    return [options.get_filter(index)[0] for index in range(options.get_nfilters())]
