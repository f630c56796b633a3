"""The file that HDF5 writes to, which keeps a write error instead of raising it.

After a refused write (no space, quota, a limit on file sizes) HDF5 can neither continue nor close its file, and it
crashes the process at exit. So HDF5 writes to a :class:`BackingFile`. After the first error this keeps all further
writes in memory, where HDF5 can read them. The owner calls :meth:`BackingFile.check` regularly, and stops soon.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any


class BackingFile(io.FileIO):
    """A new file at ``path``, for ``h5py.File(backing, "w")``.

    Raises:
        OSError: the file exists, or cannot be created.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600))
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []
        """Offset and bytes of each write since the error."""

    def check(self) -> None:
        """Raises the first write error.

        Raises:
            OSError: something could not be written.
        """
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = super().seek(offset, whence)
        if whence == io.SEEK_END and self._kept:
            end = max(start + len(data) for start, data in self._kept)
            place = super().seek(max(place, end + offset))
        return place

    def write(self, data: Any) -> int:
        """Writes all of ``data`` and returns its length. Keeps in memory what the file refuses."""
        left = memoryview(data).cast("B")
        size = len(left)
        while len(left) and self._error is None:
            try:
                left = left[super().write(left) :]
            except OSError as error:
                self._error = error
        if len(left):
            self._kept.append((self.tell(), bytes(left)))
            self.seek(len(left), io.SEEK_CUR)
        return size

    def readinto(self, buffer: Any) -> int:
        """Reads from the file and from what is kept in memory; returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        start = self.tell()
        size = super().readinto(view) or 0
        for offset, data in self._kept:
            first = max(offset, start)
            last = min(offset + len(data), start + len(view))
            if first < last:
                view[first - start : last - start] = data[first - offset : last - offset]
                size = max(size, last - start)
        self.seek(start + size)
        return size

    def truncate(self, size: int | None = None) -> int:
        """Sets the size of the file, unless a write has failed before, and returns it."""
        size = self.tell() if size is None else size
        if self._error is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self._error = error
        return size
