"""Reads columns of a campaign file, whole or in slices. Everything except :func:`read_slices` is plain h5py.

HDF5 holds a process-wide lock while it decodes, and inflates at half the speed of isal. Random batches touch most
chunks of the token columns, so :func:`read_slices` decodes stored chunks itself, in threads. It decodes only chunks
with the filters that this package writes, and leaves all other chunks to HDF5, which also reports damage.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import h5py
import numpy as np
from h5py import h5z
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OFFSETS, TEXT, text_offset

try:
    from isal import isal_zlib
except ImportError:  # no wheel for this architecture
    inflater: Callable[[], Any] = zlib.decompressobj
    InflateError: Any = zlib.error
else:
    inflater = isal_zlib.decompressobj
    InflateError = isal_zlib.error

Array = NDArray[Any]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_FILTERS = [h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32]
"""Filters of every chunk that this package writes. Some columns are also shuffled before these are applied."""
_CHECKSUM_BYTES = 4
_OVERHEAD_BYTES = 64
"""Maximum number of bytes that header and checksum add to a short chunk. Deflate never doubles the size of its
input."""
_MAX_THREADS = 4
_MIN_CHUNK = 256
"""Minimum number of entries in a chunk that :func:`read_slices` decodes itself. This package writes no smaller
chunks."""
_CHUNKS_PER_TASK = 16
"""Number of chunks that a task in a thread decodes. One task for each chunk would cost more than decoding a short
chunk."""


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

    Decodes each chunk once, in file order, using a few threads (inflating releases the GIL).

    Args:
        dataset: A numeric dataset.
        starts, ends: Slice bounds in entries, of shape (S,).

    Raises:
        OSError: A chunk is corrupt.
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
    tasks = [numbers[i : i + _CHUNKS_PER_TASK] for i in range(0, len(numbers), _CHUNKS_PER_TASK)]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(copy_chunks, tasks))  # re-raises errors from threads
    return result


Piece = tuple[int, int, int]
"""Range to copy, as (start, end, target). Entries ``[start, end)`` of one chunk go to position ``target`` of the
result."""


def _pieces_by_chunk(starts: Integers, ends: Integers, targets: Integers, chunk_size: int) -> dict[int, list[Piece]]:
    """Splits the slices at chunk boundaries and groups the pieces by chunk number."""
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


# --- raw chunks -------------------------------------------------------------------------------------------------------


def filters_of(dataset: h5py.Dataset) -> list[int]:
    """Returns the filter ids of a dataset, in the order of application."""
    options = dataset.id.get_create_plist()
    return [options.get_filter(index)[0] for index in range(options.get_nfilters())]


class ChunkDecoder:
    """Decodes the chunks of a one-dimensional, chunked numeric dataset. Thread-safe."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        filters = filters_of(dataset)
        self._dataset = dataset
        self._dtype = dataset.dtype
        self._is_shuffled = filters == [h5z.FILTER_SHUFFLE, *_FILTERS]
        self._is_decodable = self._is_shuffled or filters == _FILTERS

    def decode(self, number: int) -> Array | None:
        """Returns the chunk with this index (from 0), or ``None`` if HDF5 must read it."""
        if not self._is_decodable:
            return None
        size = self._dataset.chunks[0]
        size_bytes = size * self._dtype.itemsize
        buffer = np.empty(2 * size_bytes + _OVERHEAD_BYTES, np.uint8)
        try:
            skipped_filters, stored = self._dataset.id.read_direct_chunk((number * size,), out=buffer)
        except (OSError, RuntimeError, ValueError):  # never written, corrupt, or larger than the buffer
            return None
        if skipped_filters:
            return None
        data = bytes(stored)
        data, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if not _matches_fletcher32(data, checksum):
            return None
        stream = inflater()
        try:
            inflated = stream.decompress(data, size_bytes + 1)  # +1: also verifies deflate's checksum
        except InflateError:
            return None
        if not stream.eof or len(inflated) != size_bytes:
            return None
        entries = np.frombuffer(inflated, np.uint8)
        if self._is_shuffled:
            entries = _unshuffled(entries, self._dtype.itemsize)
        return entries.view(self._dtype)


def _matches_fletcher32(data: bytes, stored: bytes) -> bool:
    """Returns whether ``stored`` is the fletcher32 checksum of ``data``: two sums of 16-bit words, modulo 65535."""
    padded = data + b"\0" * (len(data) % 2)
    words = np.frombuffer(padded, ">u2").astype(np.int64)
    weights = np.arange(len(words), 0, -1)
    checksum = int.from_bytes(stored, "little")
    sum_matches = (int(words.sum()) - (checksum & 0xFFFF)) % 65535 == 0
    weighted_sum_matches = (int(words @ weights) - (checksum >> 16)) % 65535 == 0
    return sum_matches and weighted_sum_matches


def _unshuffled(data: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Reverses HDF5's shuffle filter for entries of ``width`` bytes."""
    planes = data.reshape(width, -1)
    entries = np.empty((planes.shape[1], width), np.uint8)
    for position, plane in enumerate(planes):  # several times faster than copying the transposed matrix
        entries[:, position] = plane
    return entries.reshape(-1)
