"""Reads many short slices of chunked, compressed HDF5 columns at once, as a random batch of trajectories needs.

h5py answers one slice per call under a global lock, and inflates a whole chunk for each. Here the slices of a request
are sorted by chunk, so that each chunk is read and inflated once. Chunks are read with ``pread`` and inflated in
threads, without the interpreter's lock; only the requested part of a chunk is unshuffled, right into the result.
Inflated chunks stay in a cache bounded in bytes.

This needs a file that does not change while it is open, which holds for all published files, and the filters that the
schema allows: shuffle and deflate. Any other layout is read through h5py.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.deflate import THREADS, decompress

CACHE_BYTES = 128 << 20
"""Bytes of inflated chunks kept per open file."""

_TASK_BYTES = 1 << 19
"""Bytes inflated per task of a thread: fewer cost more in hand-overs, more leave threads idle at the end."""


Piece = tuple[int, int, int]
"""(start, end, target): entries ``[start, end)`` of a chunk go to position ``target`` of the result."""

Place = tuple[int, int] | bytes
"""A stored chunk: its offset and size in the file, or its bytes."""

Found = tuple[int, bytes | None, Place, Sequence[Piece]]
"""(number, values or ``None``, place, pieces) of a chunk: cached values or else the place, and the pieces needed."""


class ChunkCache:
    """Inflated chunks by (column, chunk number), bounded in bytes; drops the least recently used. For one thread."""

    def __init__(self, capacity: int = CACHE_BYTES) -> None:
        self._capacity = capacity
        self._held: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[str, int]) -> bytes | None:
        """Returns a chunk, inflated and still shuffled, if it is held."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
        return found

    def put(self, key: tuple[str, int], data: bytes) -> None:
        """Keeps a chunk, unless it is a large part of the capacity by itself."""
        if key in self._held or len(data) > self._capacity // 4:
            return
        self._held[key] = data
        self._bytes += len(data)
        while self._bytes > self._capacity:
            self._bytes -= len(self._held.popitem(last=False)[1])

    def clear(self) -> None:
        """Drops every chunk."""
        self._held.clear()
        self._bytes = 0


class ChunkedColumn:
    """A one-dimensional numeric dataset, read by slices.

    Args:
        dataset: a dataset of a file that does not change.
        descriptor: file descriptor of the same file, for ``pread``; it is not closed here.
        cache: the cache that all columns of the file share.
    """

    def __init__(self, dataset: h5py.Dataset, descriptor: int, cache: ChunkCache) -> None:
        self.dataset = dataset
        self.dtype = dataset.dtype
        self.chunk = int(dataset.chunks[0]) if dataset.chunks else 0
        self.cache = cache
        self._descriptor = descriptor
        self.name = str(dataset.name)
        self._size = dataset.dtype.itemsize
        self._shuffled, self.direct = _filters(dataset)
        self._places: tuple[array[int], array[int]] | None = None
        self._looked_up = 0

    def packed(self, numbers: Sequence[int]) -> list[Place | None]:
        """Returns each chunk's offset and size in the file, or its bytes; ``None`` where only h5py can read it.

        HDF5 finds one chunk in some ten microseconds, or lists all of them at two each; so after many look-ups the
        whole column is listed.
        """
        total = -(-len(self.dataset) // self.chunk)
        self._looked_up += len(numbers)
        if self._places is None and self._looked_up * 5 >= total:
            self._places = self._list(total)
        if self._places is not None:
            offsets, sizes = self._places
            return [(offsets[n], sizes[n]) if sizes[n] else None for n in numbers]
        return [raw_chunk(self.dataset, number * self.chunk) for number in numbers]

    def _list(self, total: int) -> tuple[array[int], array[int]]:
        offsets, sizes = array("q", bytes(8 * total)), array("q", bytes(8 * total))

        def add(info: Any) -> None:
            if not info.filter_mask:
                number = info.chunk_offset[0] // self.chunk
                offsets[number], sizes[number] = info.byte_offset, info.size

        self.dataset.id.chunk_iter(add)
        return offsets, sizes

    def inflate(self, number: int, packed: Place) -> bytes:
        """Returns a chunk inflated and still shuffled. Called in threads.

        Raises:
            OSError: the chunk is damaged.
        """
        if not isinstance(packed, bytes):
            packed = os.pread(self._descriptor, packed[1], packed[0])
        expected = self.chunk * self._size
        try:
            data = decompress(packed, 15, expected + 1)  # room left: the end is seen without growing the buffer
        except Exception as error:  # zlib's error, or ISA-L's own
            raise OSError(f"{self.name}: chunk {number} does not inflate ({error}); the file is damaged") from error
        if len(data) != expected:
            raise OSError(f"{self.name}: chunk {number} holds {len(data)} bytes, expected {expected}")
        return data

    def copy(self, data: bytes, pieces: Sequence[Piece], out: NDArray[Any]) -> None:
        """Copies pieces of one inflated chunk into ``out``."""
        if not self._shuffled:
            values = np.frombuffer(data, self.dtype)
            for start, end, target in pieces:
                out[target : target + end - start] = values[start:end]
            return
        planes = np.frombuffer(data, np.uint8).reshape(self._size, -1)
        wide = out.view(np.uint8).reshape(-1, self._size)
        for start, end, target in pieces:
            for byte in range(self._size):
                wide[target : target + end - start, byte] = planes[byte, start:end]


def raw_chunk(dataset: h5py.Dataset, start: int) -> bytes | None:
    """Returns the stored bytes of the chunk that begins at entry ``start``; ``None`` where only HDF5 can read it."""
    try:
        mask, raw = dataset.id.read_direct_chunk((start,))
    except (OSError, RuntimeError):  # never written: it reads as the fill value
        return None
    return None if mask else raw


def gather(columns: Sequence[ChunkedColumn], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Returns, per column, the slices ``[starts[i], ends[i])`` end to end, in native byte order.

    Args:
        columns: columns of one file, of equal length.
        starts, ends: (S), bounds of the slices, in entries.

    Raises:
        OSError: a chunk is damaged.
    """
    total = int((ends - starts).sum())
    results = [np.empty(total, column.dtype.newbyteorder("=")) for column in columns]
    plans: dict[int, dict[int, list[Piece]]] = {}
    tasks: list[tuple[ChunkedColumn, NDArray[Any], list[Found]]] = []
    for column, out in zip(columns, results, strict=True):
        if not column.direct:
            _through_h5py(column.dataset, starts, ends, out)
            continue
        if column.chunk not in plans:
            plans[column.chunk] = _pieces(starts, ends, column.chunk)
        found = _look_up(column, plans[column.chunk], out)
        step = max(1, _TASK_BYTES // (column.chunk * column.dtype.itemsize))
        tasks += [(column, out, found[first : first + step]) for first in range(0, len(found), step)]
    if len(tasks) <= len(columns) or THREADS == 1:
        _keep(tasks, map(_carry_out, tasks))
    else:
        # A pool per request: none is left behind in a process that forks.
        with ThreadPoolExecutor(THREADS) as pool:
            _keep(tasks, pool.map(_carry_out, tasks))
    return results


def _look_up(column: ChunkedColumn, pieces: dict[int, list[Piece]], out: NDArray[Any]) -> list[Found]:
    """Returns where each chunk is found; chunks that only h5py can read are copied into ``out`` at once."""
    held = [column.cache.get((column.name, number)) for number in pieces]
    cold = [number for number, data in zip(pieces, held, strict=True) if data is None]
    places = iter(column.packed(cold))
    found: list[Found] = []
    for (number, parts), data in zip(pieces.items(), held, strict=True):
        place = next(places) if data is None else b""
        if place is None:
            first = number * column.chunk
            for start, end, target in parts:
                out[target : target + end - start] = column.dataset[first + start : first + end]
        else:
            found.append((number, data, place, parts))
    return found


def _carry_out(task: tuple[ChunkedColumn, NDArray[Any], list[Found]]) -> list[bytes | None]:
    """Copies from chunks, and returns the chunks it had to inflate. Called in threads."""
    column, out, found = task
    inflated: list[bytes | None] = []
    for number, held, place, parts in found:
        data = column.inflate(number, place) if held is None else held
        column.copy(data, parts, out)
        inflated.append(None if held is not None else data)
    return inflated


def _keep(
    tasks: Sequence[tuple[ChunkedColumn, NDArray[Any], list[Found]]], done: Iterable[Sequence[bytes | None]]
) -> None:
    """Puts inflated chunks into the cache while the next ones are inflated."""
    for (column, _, found), inflated in zip(tasks, done, strict=True):
        for (number, *_), data in zip(found, inflated, strict=True):
            if data is not None:
                column.cache.put((column.name, number), data)


def _pieces(starts: NDArray[np.int64], ends: NDArray[np.int64], chunk: int) -> dict[int, list[Piece]]:
    """Returns, by chunk number in ascending order, the pieces that the slices need."""
    full = ends > starts
    starts, lengths = starts[full], (ends - starts)[full]
    first = starts // chunk
    count = (starts + lengths - 1) // chunk - first + 1
    part = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    number = np.repeat(first, count) + part
    begin = np.maximum(np.repeat(starts, count), number * chunk)
    end = np.minimum(np.repeat(starts + lengths, count), (number + 1) * chunk)
    size = end - begin
    target = np.cumsum(size) - size
    order = np.argsort(number, kind="stable")
    begin, end = begin - number * chunk, end - number * chunk
    pieces: dict[int, list[Piece]] = {}
    columns = (values[order].tolist() for values in (number, begin, end, target))
    for of, *piece in zip(*columns, strict=True):
        pieces.setdefault(of, []).append(tuple(piece))
    return pieces


def _through_h5py(dataset: h5py.Dataset, starts: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[Any]) -> None:
    target = 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if start < end:
            out[target : target + end - start] = dataset[start:end]
            target += end - start


def _filters(dataset: h5py.Dataset) -> tuple[bool, bool]:
    """Returns whether the chunks are shuffled, and whether they can be read without h5py."""
    if not dataset.chunks or dataset.dtype.kind not in "iuf" or not dataset.dtype.isnative:
        return False, False
    plist = dataset.id.get_create_plist()
    codes = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    if codes == [h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE]:
        return dataset.dtype.itemsize > 1, True
    return False, codes == [h5py.h5z.FILTER_DEFLATE]
