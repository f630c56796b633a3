"""Writes the journal: an append-only file whose records survive SIGKILL, power loss and full disks.

Each pod start that stores something creates one journal, ``journal/<pod>.<start>.journal``, when it writes its first
records. The file is created with ``O_EXCL`` and never reopened for writing, so no record is ever appended after a
crashed writer's torn tail. A record is *acknowledged* once :meth:`JournalWriter.commit` has returned. Committing many
records together (group commit) costs one fsync. See :mod:`megaflow_hpc.trajectories.journal.frames` for the format.
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
from megaflow_hpc.host.atomic import file_mode, fsync
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE, MAX_RECORD, frame_head, header, pack_record
from megaflow_hpc.trajectories.journal.packs import is_packed_by_later_start

logger = logging.getLogger(__name__)

_WRITE_BUFFER = 4 << 20
"""Maximum number of bytes to buffer between commits before they are written to the file."""


class _State(enum.Enum):
    OPEN = "open"
    FAILED = "failed"
    """State after a failed fsync. The kernel may have dropped pages, so nothing more is acknowledged."""
    CLOSED = "closed"


class JournalWriter:
    """Appends to a new journal. Must be used by only one thread of one process.

    The file is created when the first records are written, so a start that stores nothing creates no file.

    Args:
        path: The new journal. The file must not exist; its directory must.

    Raises:
        ConfigError: The file exists or was packed (two pods share a name), or cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.exists():
            raise _exists(self.path)
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{self.path}: cannot be created (directory missing or access denied); check the run")
        if is_packed_by_later_start(self.path):  # Slurm reuses ids if it loses its state
            raise _exists(self.path)
        self._salt = os.urandom(8)
        self._file: int | None = None
        """Descriptor of the file, or ``None`` before it is created."""
        self._state = _State.OPEN
        self._buffer = bytearray(header(self._salt))
        """Header and appended frames that are not yet written to the file."""
        self._written = 0
        """Number of bytes written to the file."""
        self._durable = 0
        """Number of bytes made durable by an fsync."""

    @property
    def length(self) -> int:
        """End offset of the last appended record."""
        return self._written + len(self._buffer)

    @property
    def committed(self) -> int:
        """Offset up to which all records are durable. 0 if there is no record yet."""
        return self._durable

    def append(self, record: bytes | Mapping[str, Any]) -> int:
        """Appends one record, as a map or already packed. It is durable only after :meth:`commit`.

        Returns:
            The end offset of the record, comparable with ``committed`` and with a seal.

        Raises:
            ConfigError: The record is larger than ``MAX_RECORD``, or another process has created the file.
            OSError: The write failed. The record stays in memory; see :meth:`commit`.
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
        """Makes all appended records durable and returns the length of the journal.

        Raises:
            ConfigError: Another process has created the file.
            OSError: No new records are acknowledged. If the disk is full, the records stay in memory and ``commit`` may
                be retried. If the fsync fails, every later call raises and the pod needs a new journal.
        """
        self._check_open()
        self._write()
        if self._file is not None and self._durable < self._written:
            try:
                os.fsync(self._file)
            except OSError:
                self._state = _State.FAILED
                raise
            if not self._durable:
                _fsync_directory(self.path.parent)
            self._durable = self._written
        return self._durable

    def close(self) -> None:
        """Commits and closes the journal. Idempotent."""
        if self._state is _State.CLOSED:
            return
        try:
            if self._state is _State.OPEN:
                self.commit()
        finally:
            if self._file is not None:
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
        """Writes the buffer to the file, creating the file if necessary. Keeps the buffer after an error."""
        if self.length == HEADER_SIZE or not self._buffer:
            return
        if self._file is None:
            self._file = _create(self.path)
        try:
            _write_at(self._file, bytes(self._buffer), self._written)
        except OSError:
            with contextlib.suppress(OSError):  # remove the partial record; the next attempt rewrites it
                os.ftruncate(self._file, self._written)
            raise
        self._written += len(self._buffer)
        self._buffer = bytearray()


def _create(path: Path) -> int:
    """Creates an empty file and returns its descriptor."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise _exists(path) from None
    try:
        mode = file_mode(path.parent)
        if mode != 0o600:
            os.fchmod(file, mode)
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"{path}: exists already; each start of a pod needs a journal of its own")


def _write_at(file: int, data: bytes, offset: int) -> None:
    """Writes all of ``data``. If an OSError is raised, part of it may have been written."""
    view = memoryview(data)
    done = 0
    while done < len(data):
        done += os.pwrite(file, view[done:], offset + done)


def _fsync_directory(path: Path) -> None:
    try:
        fsync(path)
    except OSError as error:  # some network file systems cannot fsync directories, but create files synchronously
        logger.debug("fsync of directory %s: %s", path, error)
