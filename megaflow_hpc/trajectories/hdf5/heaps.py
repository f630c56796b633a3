"""Global heaps: where a campaign file's texts of variable length lie, and how libhdf5 is kept from reading false ones.

::

    GCOL 1 | size || index, references, length | bytes, to the next multiple of 8 || … || 0, -, rest | free

A heap is a list of objects behind one another. To get from one to the next libhdf5 (2.0) adds the length that the file
says, and does not ask whether that leads on: free space of no length, or a length that makes the sum overflow, holds it
for ever, with every lock of the interpreter. So columns of texts are read here, and while a file is looked at before
anything of it is used, it is read through :class:`Watched`, which looks at every heap before libhdf5 does. No other
structure has been found by which a file holds libhdf5.
"""

from __future__ import annotations

import io
import os
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

ENTRY = np.dtype([("length", "<u4"), ("heap", "<u8"), ("index", "<u4")])
"""A string of variable length as it lies in a dataset: its bytes are elsewhere."""
_SIGNATURE = b"GCOL\x01"
_BEGINNINGS = tuple(_SIGNATURE[:count] for count in range(1, len(_SIGNATURE)))
_HEAD = struct.Struct("<5s3xQ")
_OBJECT = struct.Struct("<HHIQ")
OBJECTS = 1 << 20
"""Objects that are looked at before a file is opened; a heap of ours holds some hundred."""


class Heaps:
    """The global heaps of one file.

    Args:
        descriptor: the open file.
        base: where its addresses count from.
    """

    def __init__(self, descriptor: int, base: int = 0) -> None:
        self._descriptor, self._base = descriptor, base
        self._end = os.fstat(descriptor).st_size

    def objects(self, address: int) -> tuple[bytes, dict[int, tuple[int, int]]]:
        """Returns the bytes of the heap at an address, and where in them each object begins and ends, by its index.

        Raises:
            OSError: it is none, or its objects do not follow one another to its end.
        """
        start = self._base + address
        head = os.pread(self._descriptor, _HEAD.size, start) if start < self._end else b""
        signature, size = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0)
        if signature != _SIGNATURE or not _HEAD.size <= size <= self._end - start:
            raise OSError(f"no heap of texts at {address}; the file is damaged")
        data, found, place = os.pread(self._descriptor, size, start), dict[int, tuple[int, int]](), _HEAD.size
        while place + _OBJECT.size <= size:
            index, _, _, length = _OBJECT.unpack_from(data, place)
            begin = place + _OBJECT.size
            after = begin + -(-length // 8) * 8 if index else place + length
            if not begin <= after <= size or index in found or len(found) >= OBJECTS:
                raise OSError(f"the heap of texts at {address} does not go on at {place}; the file is damaged")
            if index:
                found[index] = begin, begin + length
            place = after
        return data, found

    def texts(self, places: NDArray[Any]) -> NDArray[Any]:
        """Returns the texts that entries of a dataset (:data:`ENTRY`) stand for, as objects of ``str``.

        Raises:
            OSError: a heap is damaged, or lacks one of them.
        """
        values = np.full(len(places), "", object)
        rows = np.flatnonzero(places["length"])
        rows = rows[np.argsort(places["heap"][rows], kind="stable")]
        data, found, last = b"", dict[int, tuple[int, int]](), -1
        for row, (length, heap, index) in zip(rows.tolist(), places[rows].tolist(), strict=True):
            if heap != last:
                (data, found), last = self.objects(heap), heap
            begin, end = found.get(index, (0, 0))
            if length > end - begin:
                raise OSError(f"the heap of texts at {heap} lacks text {index}; the file is damaged")
            values[row] = data[begin : begin + length].split(b"\0", 1)[0].decode("utf-8", "replace")
        return values


class Watched(io.FileIO):
    """A file for libhdf5 to read metadata from: a heap is looked at before libhdf5 gets its bytes.

    What is no heap and has a heap's first five bytes is refused too; our metadata has them nowhere else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "rb")
        self._heaps = Heaps(self.fileno())
        self._known: set[int] = set()
        self._objects = 0

    def readinto(self, buffer: Any) -> int:
        """Reads as a file does.

        Raises:
            OSError: a heap is among what was read, and is damaged.
        """
        place = self.tell()
        count = super().readinto(buffer) or 0
        data = bytes(memoryview(buffer)[:count])
        if data.endswith(_BEGINNINGS):
            data += os.pread(self.fileno(), len(_SIGNATURE), place + count)
        at = data.find(_SIGNATURE)
        while at >= 0:
            address = place + at
            if address not in self._known:
                self._known.add(address)
                self._objects += 1 + len(self._heaps.objects(address)[1])
                if self._objects > OBJECTS:
                    raise OSError("heaps of texts of too many objects; the file is damaged")
            at = data.find(_SIGNATURE, at + 1)
        return count
