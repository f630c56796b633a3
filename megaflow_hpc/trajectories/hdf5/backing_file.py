"""The file that HDF5 writes through, which defers errors of writing.

When a write is refused (no space, quota, a limit on file sizes), HDF5 can neither go on nor close its file, and crashes
the process when it ends. So HDF5 writes through this object: it keeps the first error and holds in memory, for reading
back, whatever is written from then on. The owner calls :meth:`BackingFile.check` now and then, and stops soon.
"""

from __future__ import annotations

import io
import os
from pathlib import Path


class BackingFile(io.RawIOBase):
    """A new file at ``path``, for ``h5py.File(backing, "w")``. Errors of writing are kept, not raised.

    Raises:
        OSError: the file exists, or cannot be created.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._place = 0
        self._end = 0
        self._kept: list[tuple[int, bytes]] = []
        self.error: OSError | None = None

    def check(self) -> None:
        """Raises the first error of writing.

        Raises:
            OSError: something could not be written.
        """
        if self.error is not None:
            raise OSError(self.error.errno, self.error.strerror)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._end)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        """Writes all of ``data`` and returns its length; keeps in memory what the file does not take."""
        view = memoryview(data).cast("B")
        done = 0
        if self.error is None:
            try:
                while done < len(view):
                    done += os.pwrite(self._file, view[done:], self._place + done)
            except OSError as error:
                self.error = error
        if done < len(view):
            self._kept.append((self._place + done, bytes(view[done:])))
        self._place += len(view)
        self._end = max(self._end, self._place)
        return len(view)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads from the file and from what is kept in memory, and returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        found = os.pread(self._file, len(view), self._place)
        view[: len(found)] = found
        size = len(found)
        for start, data in self._kept:
            first, last = max(start, self._place), min(start + len(data), self._place + len(view))
            if first < last:
                view[first - self._place : last - self._place] = data[first - start : last - start]
                size = max(size, last - self._place)
        self._place += size
        return size

    def truncate(self, size: int | None = None) -> int:
        """Sets the size and returns it; once an error was kept, the size on disk stays as it is."""
        size = self._place if size is None else size
        if self.error is None:
            try:
                os.ftruncate(self._file, size)
            except OSError as error:
                self.error = error
        self._end = size
        return size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()
