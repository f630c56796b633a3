"""Columns of an HDF5 file that grow at their end.

A column buffers its values and writes whole chunks, so HDF5 compresses each chunk once. Every chunk has HDF5's own
checksum (fletcher32), which HDF5 compares whenever the chunk is read.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5 import schema

_BATCH_BYTES = 1 << 20
"""A column writes its buffered values once they take this much memory."""
_MIN_STRING_BYTES = 16

Array = NDArray[Any]


class ColumnWriter:
    """Appends to a new column of numbers, or of strings of fixed width.

    Args:
        file: a file open for writing.
        path: name of the dataset, which must not exist.
        dtype: type of the entries; ``S`` for strings.
        chunk: entries per chunk.
        shuffle: whether HDF5 shuffles bytes before deflate.
        fill: value of entries that are never written.
    """

    def __init__(
        self,
        file: h5py.File,
        path: str,
        dtype: Any,
        chunk: int,
        shuffle: bool = True,
        fill: Any = None,
    ) -> None:
        self._file = file
        self._path = path
        self._options = {
            "shape": (0,),
            "maxshape": (None,),
            "chunks": (chunk,),
            "shuffle": shuffle,
            "compression": "gzip",
            "compression_opts": 1,
            "fletcher32": True,
            "fillvalue": fill,
            "track_times": False,
        }
        self._chunk = chunk
        self._is_text = np.dtype(dtype).kind == "S"
        self.dtype = h5py.string_dtype("utf-8", _MIN_STRING_BYTES) if self._is_text else np.dtype(dtype)
        self._dataset = file.create_dataset(path, dtype=self.dtype, **self._options)
        self._written = 0
        self._buffer: list[Array] = []
        self._buffered = 0

    def __len__(self) -> int:
        return self._written + self._buffered

    def append(self, values: Array) -> None:
        """Appends an array (n), which must not change afterwards."""
        if not len(values):
            return
        if self._is_text:
            values = self._fitted(values)
        self._buffer.append(values)
        self._buffered += len(values)
        if self._buffered * self.dtype.itemsize >= _BATCH_BYTES:
            self._write(self._buffered - self._buffered % self._chunk)

    def finish(self) -> None:
        """Writes what is buffered."""
        self._write(self._buffered)

    def _write(self, count: int) -> None:
        """Writes the first ``count`` buffered entries."""
        if not count:
            return
        values = np.empty(self._buffered, self.dtype)
        np.concatenate(self._buffer, out=values, casting="unsafe")
        end = self._written + count
        self._dataset.resize((end,))
        self._dataset[self._written : end] = values[:count]
        self._written = end
        self._buffer = [values[count:]] if count < len(values) else []
        self._buffered = len(values) - count

    def _fitted(self, values: Array) -> Array:
        """Returns strings as bytes, after widening the column if one is longer than all before."""
        if values.dtype.kind != "S":
            values = np.array([text.encode("utf-8", "replace") for text in values.tolist()], "S")
        if values.dtype.itemsize > self.dtype.itemsize:
            longest = int(np.char.str_len(values).max())
            if longest > self.dtype.itemsize:
                self._widen(1 << (longest - 1).bit_length())
        return values

    def _widen(self, width: int) -> None:
        """Writes the column again with wider strings. This is rare, and strings are a small part of a file."""
        written = self._dataset[: self._written]
        del self._file[self._path]
        self.dtype = h5py.string_dtype("utf-8", width)
        self._dataset = self._file.create_dataset(self._path, dtype=self.dtype, **self._options)
        self._buffer.insert(0, written)
        self._buffered += self._written
        self._written = 0


class TextColumnWriter:
    """A column of texts of any length: their UTF-8 bytes, and offsets into them."""

    def __init__(self, file: h5py.File, path: str, chunk: int) -> None:
        self._bytes = ColumnWriter(file, path, np.uint8, schema.BYTE_CHUNK, shuffle=False)
        self._offsets = ColumnWriter(file, schema.text_offset(path), np.int64, chunk)
        self._offsets.append(np.zeros(1, np.int64))
        self._end = 0

    def append(self, values: Array) -> None:
        """Appends an array (n) of ``str``."""
        encoded = [text.encode("utf-8", "replace") for text in values.tolist()]
        ends = self._end + np.cumsum([len(data) for data in encoded], dtype=np.int64)
        self._bytes.append(np.frombuffer(b"".join(encoded), np.uint8))
        self._offsets.append(ends)
        self._end = len(self._bytes)

    def finish(self) -> None:
        """Writes what is buffered."""
        self._bytes.finish()
        self._offsets.finish()


def column_writer(file: h5py.File, column: schema.Column) -> ColumnWriter | TextColumnWriter:
    """Creates an empty column of the schema."""
    chunk = schema.chunk(column)
    if column.dtype == schema.TEXT:
        return TextColumnWriter(file, column.path, chunk)
    dtype = "S" if column.dtype == schema.STRING else column.dtype
    return ColumnWriter(file, column.path, dtype, chunk, schema.shuffled(column))


def reward_writer(file: h5py.File, name: str) -> ColumnWriter:
    """Creates an empty column of a named reward."""
    return ColumnWriter(file, f"rewards/{name}", np.float32, schema.ROW_CHUNK, fill=np.float32(np.nan))
