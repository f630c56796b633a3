"""The journal: an append-only file of records that survive SIGKILL, power loss and full disks.

Each start of a pod writes one journal, ``journal/<pod>.<start>.journal``. The file is created with ``O_EXCL`` and never
reopened for writing, so no record is ever appended behind a crashed writer's torn tail. A record is *acknowledged* once
:meth:`JournalWriter.commit` has returned. Committing many records at once (group commit) costs one fsync.
:mod:`megaflow_hpc.trajectories.journal.frames` describes the bytes.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import file_mode
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE, MAX_RECORD, frame_head, header, pack_record

logger = logging.getLogger(__name__)

_WRITE_BUFFER = 4 << 20
"""Appended bytes that stay in memory between commits before the kernel gets them."""


class _State(enum.Enum):
    OPEN = "open"
    FAILED = "failed"
    """An fsync failed. The kernel may have dropped pages, so nothing more is acknowledged."""
    CLOSED = "closed"


class JournalWriter:
    """Creates a journal and appends to it. For one thread of one process.

    Args:
        path: a file that does not exist yet, in a directory that does.

    Raises:
        ConfigError: the file exists (two pods have one name), or cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._salt = os.urandom(8)
        self._file = _create(self.path, header(self._salt))
        self._state = _State.OPEN
        self._buffer = bytearray()
        """Appended frames that are not in the file yet."""
        self._written = HEADER_SIZE
        """Bytes in the file."""
        self._durable = HEADER_SIZE
        """Bytes in the file that an fsync covers."""

    @property
    def length(self) -> int:
        """The offset behind the last appended record."""
        return self._written + len(self._buffer)

    @property
    def committed(self) -> int:
        """The offset up to which everything is durable."""
        return self._durable

    def append(self, record: bytes | Mapping[str, Any]) -> int:
        """Adds one record, as a map or packed; it is not durable before :meth:`commit`.

        Returns:
            The offset behind it, comparable with ``committed`` and with a seal.

        Raises:
            ConfigError: the record is larger than ``MAX_RECORD``.
            OSError: the file system refused; the record stays in memory, see :meth:`commit`.
        """
        self._check_open()
        payload = pack_record(record) if isinstance(record, Mapping) else bytes(record)
        if len(payload) > MAX_RECORD:
            raise ConfigError(
                f"{self.path}: a record of {len(payload)} bytes, at most {MAX_RECORD}; bound its artifacts"
            )
        self._buffer += frame_head(payload, self._salt, self.length, time.time_ns())
        self._buffer += payload
        end = self.length
        if len(self._buffer) >= _WRITE_BUFFER:
            self._write()
        return end

    def commit(self) -> int:
        """Makes every appended record durable and returns the journal's length.

        Raises:
            OSError: nothing new is acknowledged. If the disk is full, the records stay in memory and ``commit`` may be
                called again. If the fsync fails, every later call raises and the pod needs a new journal.
        """
        self._check_open()
        self._write()
        if self._durable < self._written:
            try:
                os.fsync(self._file)
            except OSError:
                self._state = _State.FAILED
                raise
            self._durable = self._written
        return self._durable

    def close(self) -> None:
        """Commits and closes. May be called twice."""
        if self._state is _State.CLOSED:
            return
        try:
            if self._state is _State.OPEN:
                self.commit()
        finally:
            os.close(self._file)
            self._state = _State.CLOSED

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._state is _State.CLOSED:
            raise ValueError(f"{self.path}: the journal is closed")
        if self._state is _State.FAILED:
            raise OSError(f"{self.path}: an earlier fsync failed; continue with a new journal")

    def _write(self) -> None:
        """Gives the buffer to the kernel; keeps the buffer if that fails."""
        if not self._buffer:
            return
        try:
            _write_at(self._file, bytes(self._buffer), self._written)
        except OSError:
            with contextlib.suppress(OSError):  # leave no half record until the same bytes are written again
                os.ftruncate(self._file, self._written)
            raise
        self._written += len(self._buffer)
        self._buffer = bytearray()


def _create(path: Path, head: bytes) -> int:
    """Creates a durable file that contains ``head``, and returns its descriptor."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; each start of a pod needs a journal of its own") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be created ({error.strerror}); check the run directory") from error
    try:
        mode = file_mode(path.parent)
        if mode != 0o600:
            os.fchmod(file, mode)
        _write_at(file, head, 0)
        os.fsync(file)
        _fsync_directory(path.parent)
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def _write_at(file: int, data: bytes, offset: int) -> None:
    """Writes all of ``data``. After an OSError, part of it may be written."""
    view = memoryview(data)
    done = 0
    while done < len(data):
        done += os.pwrite(file, view[done:], offset + done)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot, and need not: they create files synchronously
        logger.debug("fsync of directory %s: %s", path, error)
    finally:
        os.close(descriptor)
