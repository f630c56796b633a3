"""Reads chunked, compressed HDF5 columns: whole, or many short slices at once, as a random batch of trajectories needs.

h5py answers one slice per call under a global lock, and inflates a whole chunk for each. Here the slices of a request
are sorted by chunk, so that each chunk is read and inflated once. Chunks are read with ``pread`` and inflated in
threads, without the interpreter's lock; only the requested part of a chunk is unshuffled, right into the result.
Inflated chunks stay in a cache bounded in bytes.

This needs a file that does not change while it is open, which holds for all published files, and the filters that a
sound file has: shuffle and deflate. What is not in chunks is read through h5py. HDF5's own inflating is never used on a
file that is read: it goes on for as long as a chunk gives, whatever the size that was claimed.
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

from megaflow_hpc.trajectories.hdf5.deflate import THREADS, inflate

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

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._capacity > 0

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
    """A one-dimensional dataset of numbers or strings of fixed width, read by slices.

    Args:
        dataset: a dataset of a file that does not change.
        cache: the cache that all columns of the file share.
        dtype: what an entry is on disk, where the dataset's own type does not say it.
    """

    def __init__(self, dataset: h5py.Dataset, cache: ChunkCache, dtype: Any = None) -> None:
        self.dataset = dataset
        self.dtype = dataset.dtype if dtype is None else np.dtype(dtype)
        self.cache = cache
        self.name = str(dataset.name)
        self._size = self.dtype.itemsize
        plist = dataset.id.get_create_plist()
        self.direct = plist.get_layout() == h5py.h5d.CHUNKED
        """Whether its chunks are read without h5py."""
        self.chunk = int(dataset.chunks[0]) if self.direct else 0
        filters = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())] if self.direct else []
        self._shuffled = self._size > 1 and h5py.h5z.FILTER_SHUFFLE in filters
        self._deflated = h5py.h5z.FILTER_DEFLATE in filters
        self._skipped = 1 << (len(filters) - 1) if self._deflated else 0
        """The mask of a chunk that deflate would not have made smaller, and left as it was."""
        self._claimed = dtype is None
        self._descriptor = h5py.h5i.get_file_id(dataset.id).get_vfd_handle() if self.direct else -1
        self._places: tuple[array[int], array[int]] | None = None
        self._looked_up = 0

    def packed(self, numbers: Sequence[int]) -> list[Place | None]:
        """Returns each chunk's offset and size in the file, or its bytes; ``None`` where :meth:`odd` knows more.

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
            number = info.chunk_offset[0] // self.chunk
            if not info.filter_mask and number < total:
                offsets[number], sizes[number] = info.byte_offset, info.size

        try:
            self.dataset.id.chunk_iter(add)
        except RuntimeError as error:
            raise OSError(f"{self.name}: the list of its chunks is damaged ({error})") from None
        return offsets, sizes

    def odd(self, number: int) -> bytes | None:
        """Returns a chunk that was stored without being deflated; ``None`` for one never written: the fill value.

        Raises:
            OSError: the chunk skipped another filter, or the fill value is none of the column's.
        """
        try:
            mask, raw = self.dataset.id.read_direct_chunk((number * self.chunk,))
        except MemoryError:
            raise OSError(f"{self.name}: chunk {number} claims more than there is; the file is damaged") from None
        except (OSError, RuntimeError):
            if self._claimed:
                return None
            raise OSError(f"{self.name}: chunk {number} was never written; the file is damaged") from None
        if mask != self._skipped or len(raw) != self.chunk * self._size:
            raise OSError(f"{self.name}: chunk {number} is not stored as the others; the file is damaged")
        return bytes(raw)

    def inflate(self, number: int, packed: Place) -> bytes:
        """Returns a chunk inflated and still shuffled. Called in threads.

        Raises:
            OSError: the chunk is damaged.
        """
        expected = self.chunk * self._size
        if not isinstance(packed, bytes):
            packed = os.pread(self._descriptor, min(packed[1], 2 * expected + 1024), packed[0])
        try:
            if self._deflated:
                return inflate(packed, expected)
            if len(packed) != expected:
                raise OSError(f"holds {len(packed)} bytes, expected {expected}")
        except OSError as error:
            raise OSError(f"{self.name}: chunk {number} {error}") from error
        return packed

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
            if self._size > 16:
                wide[target : target + end - start] = planes[:, start:end].T
                continue
            for byte in range(self._size):
                wide[target : target + end - start, byte] = planes[byte, start:end]


def raw_chunk(dataset: h5py.Dataset, start: int) -> bytes | None:
    """Returns the stored bytes of the chunk that begins at entry ``start``; ``None`` where only HDF5 can read it."""
    try:
        mask, raw = dataset.id.read_direct_chunk((start,))
    except (OSError, RuntimeError, MemoryError):  # never written, it reads as the fill value; or damaged
        return None
    return None if mask else raw


def gather(
    columns: Sequence[ChunkedColumn],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    threads: ThreadPoolExecutor | None = None,
) -> list[NDArray[Any]]:
    """Returns, per column, the slices ``[starts[i], ends[i])`` end to end, in native byte order.

    Args:
        columns: columns of one file, of equal length.
        starts, ends: (S), bounds of the slices, in entries.
        threads: the pool that inflates. By default there is one per request: none is left behind in a process that
            forks.

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
    elif threads is not None:
        _keep(tasks, threads.map(_carry_out, tasks))
    else:
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
            data, place = column.odd(number), b""
        if data is None and not place:
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
        inflated.append(data if held is None and column.cache.keeps else None)
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
