"""Columns of an HDF5 file that grow at their end; chunks are compressed by threads and written as they are.

HDF5's own filters run under one lock, and on zlib. A column here takes arrays, cuts them into the dataset's chunks,
has a thread apply shuffle and deflate (:mod:`~megaflow_hpc.trajectories.hdf5.deflate`) and writes the result with
``write_direct_chunk``; what is in the file is what HDF5's filters would have made, and every HDF5 reads it.

Chunks of another file that lie on the same grid are copied as they are (:meth:`Column.extend`). Every column gets the
attribute ``crc32``, the CRC-32 of its values as little-endian bytes, for which threads inflate the copied chunks.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5 import schema
from megaflow_hpc.trajectories.hdf5.chunks import raw_chunk
from megaflow_hpc.trajectories.hdf5.columns import read
from megaflow_hpc.trajectories.hdf5.deflate import THREADS, compress, crc32, inflate

_BATCH_BYTES = 1 << 20
"""Bytes per task of a thread: enough to make the hand-over cheap."""
_OUTSTANDING = 4 * THREADS
"""Tasks under way per column, which bounds memory."""
_MIN_WIDTH = 16

Array = NDArray[Any]
Packed = tuple[bytes, Array]
"""A chunk's stored bytes, and its values."""


def encode(values: Array, shuffle: bool, level: int = 1) -> bytes:
    """Returns the bytes that HDF5's shuffle and deflate make of a chunk."""
    size = values.dtype.itemsize
    values = np.ascontiguousarray(values).view(np.uint8)
    if shuffle and size > 1:
        values = np.ascontiguousarray(values.reshape(-1, size).T)
    return compress(values.data, level)


def decode(raw: bytes, dtype: Any, shuffle: bool, entries: int) -> Array:
    """Inverts :func:`encode`, of a chunk of so many entries.

    Raises:
        OSError: the chunk is damaged, or holds another number of entries.
    """
    size = np.dtype(dtype).itemsize
    data = np.frombuffer(inflate(raw, entries * size), np.uint8)
    if shuffle and size > 1:
        planes = data.reshape(size, -1)
        data = np.empty((planes.shape[1], size), np.uint8)
        if size > 16:
            data[:] = planes.T
        else:  # two to four times as fast for numbers
            for byte in range(size):
                data[:, byte] = planes[byte]
    return data.reshape(-1).view(dtype)


def pool() -> ThreadPoolExecutor:
    """Returns a pool of :data:`THREADS` threads for columns to share."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="deflate")


def create(file: h5py.File, path: str, dtype: Any, chunk: int, shuffle: bool, **options: Any) -> h5py.Dataset:
    """Creates an empty dataset of one dimension that can grow, with deflate and perhaps shuffle."""
    return file.create_dataset(
        path,
        shape=(0,),
        maxshape=(None,),
        dtype=dtype,
        chunks=(chunk,),
        shuffle=shuffle,
        compression="gzip",
        compression_opts=1,
        track_times=False,
        **options,
    )


class Column:
    """A numeric column, or one of fixed-width strings, which is rewritten when a string does not fit.

    Args:
        file: a file open for writing.
        path: name of the dataset, which must not exist.
        dtype: type of the entries; ``S`` for strings.
        chunk: entries per chunk.
        shuffle: whether bytes are shuffled before deflate.
        threads: the pool that compresses.
        fill: the value that pads the last chunk.
        level: compression level of :func:`~megaflow_hpc.trajectories.hdf5.deflate.compress`.
    """

    def __init__(
        self,
        file: h5py.File,
        path: str,
        dtype: Any,
        chunk: int,
        shuffle: bool,
        threads: ThreadPoolExecutor,
        fill: Any = None,
        level: int = 1,
    ) -> None:
        self._file, self._path, self._chunk, self._shuffle, self._threads = file, path, chunk, shuffle, threads
        self._level = level
        self._text = np.dtype(dtype).kind == "S"
        self.dtype = np.dtype(f"S{_MIN_WIDTH}") if self._text else np.dtype(dtype)
        self._options = {} if fill is None else {"fillvalue": self.dtype.type(fill)}
        self._fill = fill
        self._dataset = self._create()
        self._held: list[Array] = []
        self._held_count = 0
        self._cut = 0
        """Entries before the held ones: always whole chunks."""
        self._under_way: deque[tuple[int, Future[list[Packed]]]] = deque()
        self._crc = 0

    def __len__(self) -> int:
        return self._cut + self._held_count

    def put(self, values: Array) -> None:
        """Appends an array (n), which must not be changed afterwards."""
        if not len(values):
            return
        if self._text:
            values = self._fitted(values if values.dtype.kind == "S" else np.array(values.tolist(), "S"))
        self._held.append(values)
        self._held_count += len(values)
        if self._held_count >= self._chunk and self._held_count * self.dtype.itemsize >= _BATCH_BYTES:
            self._flush()

    def extend(self, source: h5py.Dataset, start: int, end: int) -> int:
        """Appends entries ``[start, end)`` of a dataset, and returns how many were copied in compressed form."""
        size = source.chunks[0] if source.chunks else 0
        readable = size and source.dtype == self.dtype and source.compression == "gzip"
        if not readable:
            for first in range(start, end, 1 << 20):
                self.put(read(source, first, min(end, first + (1 << 20))))
            return 0
        alike = size == self._chunk and source.shuffle == self._shuffle
        if alike and start % size == len(self) % size:
            return self._take_over(source, start, end)
        waiting: deque[Future[Array]] = deque()
        step = max(1, _BATCH_BYTES // (size * self.dtype.itemsize)) * size
        for first in range(start - start % size, end, step):
            numbers = range(first, min(first + step, end), size)
            raw = [chunk for number in numbers if (chunk := raw_chunk(source, number)) is not None]
            cut = slice(max(start - first, 0), min(end - first, step))
            if len(raw) < len(numbers):  # some were never written: only HDF5 knows what is there
                waiting.append(self._threads.submit(read, source, first + cut.start, first + cut.stop))
            else:
                waiting.append(self._threads.submit(_decode_all, raw, self.dtype, source.shuffle, size, cut))
            if len(waiting) > 2 * THREADS:
                self.put(waiting.popleft().result())
        for values in waiting:
            self.put(values.result())
        return 0

    def _take_over(self, source: h5py.Dataset, start: int, end: int) -> int:
        """Does the same where both grids of chunks meet: whole chunks are copied as they are."""
        taken, size = 0, self._chunk
        step = max(1, _BATCH_BYTES // (size * self.dtype.itemsize))
        whole: list[bytes] = []

        def hand_over() -> None:
            if whole:
                self._flush()
                self._submit(
                    self._threads.submit(_decode_each, list(whole), self.dtype, self._shuffle, size), len(whole)
                )
                whole.clear()

        for first in range(start - start % size, end, size):
            begin, stop = max(first, start), min(first + size, end)
            raw = raw_chunk(source, first) if stop - begin == size else None
            if raw is None:
                hand_over()
                self.put(read(source, begin, stop))
                continue
            whole.append(raw)
            taken += size
            if len(whole) == step:
                hand_over()
        hand_over()
        return taken

    def finish(self) -> None:
        """Writes what is held and the checksum; nothing can be appended afterwards."""
        self._flush()
        self._write(0)
        if self._held_count:
            last = np.zeros(self._chunk, self.dtype)
            if self._fill is not None:
                last[:] = self._fill
            last[: self._held_count] = np.concatenate(self._held)
            self._dataset.resize((len(self),))
            self._dataset.id.write_direct_chunk((self._cut,), encode(last, self._shuffle, self._level))
            self._crc = crc32(last[: self._held_count], self._crc)
        self._dataset.attrs["crc32"] = np.uint32(self._crc)

    def _create(self) -> h5py.Dataset:
        dtype = h5py.string_dtype("utf-8", self.dtype.itemsize) if self._text else self.dtype
        return create(self._file, self._path, dtype, self._chunk, self._shuffle, **self._options)

    def _flush(self) -> None:
        """Hands the whole chunks among the held entries to the threads."""
        whole = self._held_count - self._held_count % self._chunk
        if not whole:
            return
        held = deque(self._held)
        step = max(1, _BATCH_BYTES // (self._chunk * self.dtype.itemsize)) * self._chunk
        for first in range(0, whole, step):
            size = min(step, whole - first)
            future = self._threads.submit(_encode_all, _cut(held, size), self._chunk, self._shuffle, self._level)
            self._submit(future, size // self._chunk)
        self._held, self._held_count = list(held), self._held_count - whole

    def _submit(self, future: Future[list[Packed]], chunks: int) -> None:
        self._under_way.append((self._cut, future))
        self._cut += chunks * self._chunk
        self._write(_OUTSTANDING)

    def _write(self, leave: int) -> None:
        """Writes finished chunks, and waits until at most ``leave`` tasks are under way."""
        while self._under_way and (len(self._under_way) > leave or self._under_way[0][1].done()):
            first, future = self._under_way.popleft()
            packed = future.result()
            end = first + len(packed) * self._chunk
            if len(self._dataset) < end:
                self._dataset.resize((end,))
            for number, (raw, values) in enumerate(packed):
                self._dataset.id.write_direct_chunk((first + number * self._chunk,), raw)
                self._crc = crc32(values, self._crc)

    def _fitted(self, values: Array) -> Array:
        if values.dtype.itemsize > self.dtype.itemsize:
            lengths = np.char.str_len(values)
            if lengths.max() > self.dtype.itemsize:
                self._widen(1 << int(lengths.max() - 1).bit_length())
        return values.astype(self.dtype)

    def _widen(self, width: int) -> None:
        """Rewrites the column with wider strings, which is rare; strings are a small part of a file."""
        self._write(0)
        done = self._dataset[: self._cut]
        held = [*([done] if len(done) else []), *self._held]
        del self._file[self._path]
        self.dtype = np.dtype(f"S{width}")
        self._dataset = self._create()
        self._held = [part.astype(self.dtype) for part in held]
        self._cut, self._held_count, self._crc = 0, sum(len(part) for part in held), 0
        self._flush()


def _cut(held: deque[Array], size: int) -> list[Array]:
    """Takes the first ``size`` entries off the arrays, and returns them as arrays."""
    taken = []
    while size:
        values = held.popleft()
        if len(values) > size:
            held.appendleft(values[size:])
            values = values[:size]
        taken.append(values)
        size -= len(values)
    return taken


def _encode_all(pieces: list[Array], chunk: int, shuffle: bool, level: int) -> list[Packed]:
    values = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    parts = (values[first : first + chunk] for first in range(0, len(values), chunk))
    return [(encode(part, shuffle, level), np.ascontiguousarray(part)) for part in parts]


def _decode_all(raw: list[bytes], dtype: Any, shuffle: bool, entries: int, cut: slice) -> Array:
    return np.concatenate([decode(chunk, dtype, shuffle, entries) for chunk in raw])[cut]


def _decode_each(raw: list[bytes], dtype: Any, shuffle: bool, entries: int) -> list[Packed]:
    return [(chunk, decode(chunk, dtype, shuffle, entries)) for chunk in raw]


def text_crc(values: Array, crc: int) -> int:
    """Returns the CRC-32, continued from ``crc``, of texts of variable length, each followed by NUL."""
    joined = b"".join((v if isinstance(v, bytes) else v.encode()) + b"\0" for v in values.tolist())
    return crc32(joined, crc)


class TextColumn:
    """A column of strings of variable length, written through HDF5, whose heap holds their bytes."""

    def __init__(self, file: h5py.File, path: str, chunk: int) -> None:
        self._dataset = create(file, path, h5py.string_dtype(), chunk, False)
        self._crc = 0

    def put(self, values: Array) -> None:
        """Appends an array (n) of strings."""
        if not len(values):
            return
        self._crc = text_crc(values, self._crc)
        start = len(self._dataset)
        self._dataset.resize((start + len(values),))
        self._dataset[start:] = values

    def extend(self, source: h5py.Dataset, start: int, end: int) -> int:
        """Appends entries ``[start, end)`` of a dataset, and returns 0: none is copied in compressed form."""
        for first in range(start, end, 1 << 16):
            self.put(read(source, first, min(end, first + (1 << 16))))
        return 0

    def finish(self) -> None:
        """Writes the checksum; nothing can be appended afterwards."""
        self._dataset.attrs["crc32"] = np.uint32(self._crc)


def column(file: h5py.File, spec: schema.Column, threads: ThreadPoolExecutor) -> Column | TextColumn:
    """Creates an empty column of the schema."""
    if spec.dtype == schema.TEXT:
        return TextColumn(file, spec.path, schema.chunk(spec))
    dtype = "S" if spec.dtype == schema.STRING else spec.dtype
    return Column(file, spec.path, dtype, schema.chunk(spec), schema.shuffled(spec), threads, level=schema.level(spec))
