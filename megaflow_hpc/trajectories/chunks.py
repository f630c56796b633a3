"""Many short slices of a chunked, compressed HDF5 column at once: what a random batch of trajectories is.

h5py answers one slice per call under a global lock, and inflates a whole chunk for each. Here the slices of a request are
sorted by chunk, so that each chunk is read and inflated once. Chunks are read with ``pread`` and inflated in threads,
which lets go of the interpreter, and only the part of a chunk that is asked for is unshuffled, into the result itself.
Inflated chunks stay in a cache bounded in bytes.

This needs a file that does not change while it is open, which holds for all published files, and the filters that the
schema allows: shuffle and deflate. Any other layout is read through h5py.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.fastzlib import decompress

THREADS = max(1, min(8, len(os.sched_getaffinity(0))))
"""Threads that inflate."""

CACHE_BYTES = 128 << 20
"""Inflated chunks kept per open file."""

_BATCH = 16
"""Chunks per task of a thread: fewer cost more in hand-overs than they gain."""


class Piece(NamedTuple):
    """Part of one chunk: entries ``[start, end)`` of the chunk go to ``target`` of the result."""

    start: int
    end: int
    target: int


class ChunkCache:
    """Inflated chunks by (column, chunk number), the longest unused dropped first. Safe between threads."""

    def __init__(self, capacity: int = CACHE_BYTES) -> None:
        self._capacity = capacity
        self._held: OrderedDict[tuple[int, int], NDArray[np.uint8]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int]) -> NDArray[np.uint8] | None:
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def put(self, key: tuple[int, int], data: NDArray[np.uint8]) -> None:
        if data.nbytes > self._capacity // 4:
            return
        with self._lock:
            if key in self._held:
                return
            self._held[key] = data
            self._bytes += data.nbytes
            while self._bytes > self._capacity:
                self._bytes -= self._held.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._bytes = 0


class ChunkedColumn:
    """A one-dimensional numeric dataset, read by slices.

    Args:
        dataset: of a file that is not written any more.
        descriptor: of the same file, for ``pread``; not closed here.
        cache: shared by the columns of a file.
    """

    def __init__(self, dataset: h5py.Dataset, descriptor: int, cache: ChunkCache) -> None:
        self._dataset = dataset
        self._descriptor = descriptor
        self._cache = cache
        self._number = id(dataset.id)
        self.dtype = dataset.dtype
        self._size = dataset.dtype.itemsize
        self._chunk = dataset.chunks[0] if dataset.chunks else 0
        self._shuffled, self._direct = _filters(dataset)

    def gather(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[Callable[[], None]]:
        """Prepares :meth:`out` for the slices ``[starts[i], ends[i])`` end to end; returns the work that fills it."""
        lengths = np.maximum(ends - starts, 0)
        self.out = np.empty(int(lengths.sum()), self.dtype)
        targets = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        if not self._direct:
            return [lambda: self._through_h5py(starts, ends, targets)]
        pieces: dict[int, list[Piece]] = {}
        chunk = self._chunk
        for start, end, target in zip(starts.tolist(), ends.tolist(), targets.tolist(), strict=True):
            while start < end:
                number, offset = divmod(start, chunk)
                size = min(chunk - offset, end - start)
                pieces.setdefault(number, []).append(Piece(offset, offset + size, target))
                start += size
                target += size
        numbers = sorted(pieces)
        batches = [numbers[first : first + _BATCH] for first in range(0, len(numbers), _BATCH)]
        return [lambda batch=batch: self._fill(self.out, batch, pieces) for batch in batches]  # type: ignore[misc]

    def _fill(self, out: NDArray[Any], numbers: Sequence[int], pieces: dict[int, list[Piece]]) -> None:
        wide = out.view(np.uint8).reshape(-1, self._size)
        for number in numbers:
            raw = self._raw(number)
            if raw is None:  # stored in some other way: seldom
                first = number * self._chunk
                for piece in pieces[number]:
                    size = piece.end - piece.start
                    out[piece.target : piece.target + size] = self._dataset[first + piece.start : first + piece.end]
                continue
            for piece in pieces[number]:
                target = slice(piece.target, piece.target + piece.end - piece.start)
                if self._shuffled:
                    wide[target] = raw.reshape(self._size, -1)[:, piece.start : piece.end].T
                else:
                    wide[target] = raw.reshape(-1, self._size)[piece.start : piece.end]

    def _raw(self, number: int) -> NDArray[np.uint8] | None:
        """The chunk, inflated and still shuffled; ``None`` if its filters were left out or it was never written."""
        key = (self._number, number)
        found = self._cache.get(key)
        if found is not None:
            return found
        info = self._dataset.id.get_chunk_info_by_coord((number * self._chunk,))
        if info.byte_offset is None or info.filter_mask:
            return None
        packed = os.pread(self._descriptor, info.size, info.byte_offset)
        expected = self._chunk * self._size
        try:
            data = np.frombuffer(decompress(packed, 15, expected), np.uint8)
        except Exception as error:  # zlib.error, or ISA-L's own
            raise OSError(f"{self._dataset.name}: chunk {number} does not inflate ({error})") from error
        if len(data) != expected:
            raise OSError(f"{self._dataset.name}: chunk {number} holds {len(data)} bytes, expected {expected}")
        self._cache.put(key, data)
        return data

    def _through_h5py(self, starts: NDArray[np.int64], ends: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        for start, end, target in zip(starts.tolist(), ends.tolist(), targets.tolist(), strict=True):
            if start < end:
                self.out[target : target + end - start] = self._dataset[start:end]


def gather(columns: Sequence[ChunkedColumn], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[NDArray[Any]]:
    """The slices ``[starts[i], ends[i])`` of each column, end to end.

    Raises:
        OSError: a chunk is damaged.
    """
    work = [task for column in columns for task in column.gather(starts, ends)]
    if len(work) <= len(columns) or THREADS == 1:
        for task in work:
            task()
    else:
        # A pool per request: none is left behind in a process that forks.
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(task) for task in work]:
                done.result()
    return [column.out for column in columns]


def _filters(dataset: h5py.Dataset) -> tuple[bool, bool]:
    """(shuffled, whether chunks can be read here)."""
    if not dataset.chunks or dataset.dtype.kind not in "iuf" or not dataset.dtype.isnative:
        return False, False
    plist = dataset.id.get_create_plist()
    codes = [plist.get_filter(number)[0] for number in range(plist.get_nfilters())]
    if codes == [h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE]:
        return dataset.dtype.itemsize > 1, True
    return False, codes == [h5py.h5z.FILTER_DEFLATE]
