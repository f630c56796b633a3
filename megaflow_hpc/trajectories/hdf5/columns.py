"""Reads columns of a campaign file, or parts of them. Everything except :func:`read_slices` is plain h5py."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.chunks import ChunkDecoder
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OFFSETS, OPTIONAL, STRING, TEXT, text_offset

_MAX_THREADS = 4
_MIN_CHUNK = 256
"""Entries of the smallest chunk that :func:`read_slices` decodes. No file that this package wrote has a smaller one."""
_CHUNKS_PER_TASK = 16
"""Chunks that a thread decodes one after another, since a task for each chunk costs more than a short chunk does."""


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

    Decodes each chunk once, in file order. A few threads decode, since inflating releases Python's lock.

    Args:
        dataset: numbers.
        starts, ends: (S), bounds of the slices, in entries.

    Raises:
        OSError: a chunk is damaged.
    """
    sizes = ends - starts
    targets = np.cumsum(sizes) - sizes
    result = np.empty(int(sizes.sum()), dataset.dtype)
    if dataset.chunks is None or dataset.chunks[0] < _MIN_CHUNK:
        for start, end, target in zip(starts.tolist(), ends.tolist(), targets.tolist(), strict=True):
            result[target : target + end - start] = read(dataset, start, end)
        return result
    chunk_size = dataset.chunks[0]
    pieces = _pieces_by_chunk(starts, ends, targets, chunk_size)
    decoder = ChunkDecoder(dataset)

    def copy_chunks(numbers: list[int]) -> None:
        for number in numbers:
            first = number * chunk_size
            values = decoder.decode(number)
            if values is None:
                values = read(dataset, first, first + chunk_size)
            for start, end, target in pieces[number]:
                result[target : target + end - start] = values[start - first : end - first]

    numbers = sorted(pieces)
    tasks = [numbers[place : place + _CHUNKS_PER_TASK] for place in range(0, len(numbers), _CHUNKS_PER_TASK)]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(copy_chunks, tasks):
            pass
    return result


Piece = tuple[int, int, int]
"""(start, end, target): entries ``[start, end)``, all in one chunk, go to position ``target`` of the result."""


def _pieces_by_chunk(
    starts: NDArray[np.int64], ends: NDArray[np.int64], targets: NDArray[np.int64], chunk_size: int
) -> dict[int, list[Piece]]:
    """Returns the slices, divided at the bounds of chunks, by number of the chunk."""
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for start, end, target in zip(starts.tolist(), ends.tolist(), targets.tolist(), strict=True):
        first = start
        while first < end:
            number = first // chunk_size
            last = min(end, (number + 1) * chunk_size)
            pieces[number].append((first, last, target + first - start))
            first = last
    return pieces


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
