"""The journal: append-only files of records that survive SIGKILL, power loss and full disks.

One journal per pod and start. It is created with ``O_EXCL`` and never reopened for writing, so a crashed writer's tail
is never built upon. A record is *acknowledged* once :meth:`JournalWriter.commit` has returned; committing many at once
(group commit) costs one fsync. The bytes are described in :mod:`megaflow_hpc.trajectories.journal.frames`.

A journal that grows past :data:`ROTATE_BYTES` goes on in a new *part*; a part with a successor never changes again::

    journal/<pod>.<start>.journal         part 0
    journal/<pod>.<start>+0001.journal    part 1, and so on; its first record says how many bytes lie before it

*Logical offsets* count over all parts. Seals, ``length`` and ``committed`` are logical; frames have the offset within
their own file.

Each commit also adds what it made durable to the journal's table of contents
(:mod:`megaflow_hpc.trajectories.journal.contents`), without a second fsync.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import file_mode
from megaflow_hpc.trajectories.journal.checks import heading_in
from megaflow_hpc.trajectories.journal.contents import ContentsWriter, ListedFields
from megaflow_hpc.trajectories.journal.frames import (
    FRAME_SIZE,
    HEADER_SIZE,
    MAX_RECORD,
    frame_head,
    header,
    pack_record,
    read_frames,
    unpack_record,
    write_at,
)
from megaflow_hpc.trajectories.journal.headings import HeadingFields

logger = logging.getLogger(__name__)

SUFFIX = ".journal"
ROTATE_BYTES = 128 << 20
"""Size of a part, in bytes: small enough that its shard takes a second, large enough that files stay few."""
_WRITE_BUFFER = 4 << 20
"""Appended bytes kept in memory between commits before they are given to the kernel."""


def owner_of(name: str) -> str:
    """Returns ``<pod>.<start>`` from the name of a journal's part."""
    return name.removesuffix(SUFFIX).partition("+")[0]


def part_path(path: Path, number: int) -> Path:
    """Returns the path of part ``number`` of the journal whose part 0 is ``path``."""
    if number == 0:
        return path
    suffix = SUFFIX if path.name.endswith(SUFFIX) else ""
    return path.with_name(f"{path.name.removesuffix(SUFFIX)}+{number:04d}{suffix}")


class JournalWriter:
    """Creates a journal and appends to it. For one thread of one process.

    Args:
        path: a file that does not exist yet, in a directory that does.
        rotate_bytes: size in bytes from which on the next part is begun.
        on_rotate: called with the path of each finished part.

    Raises:
        ConfigError: the file exists (two pods with one name), or cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rotate_bytes: int = ROTATE_BYTES,
        on_rotate: Callable[[Path], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self._rotate_bytes = rotate_bytes
        self._on_rotate = on_rotate
        self._part = 0
        self._base = 0
        """Bytes in the parts before this one."""
        self._broken = ""
        self._file, self._salt, self._written = _create(self.path, b"")
        self._durable = self._written
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._contents = ContentsWriter(self.path, self._salt)
        self._listed: list[ListedFields] = []
        """Records that are not durable yet."""

    @property
    def length(self) -> int:
        """The logical offset behind the last appended record."""
        return self._base + self._written + self._pending_bytes

    @property
    def committed(self) -> int:
        """The logical offset up to which everything is durable."""
        return self._base + self._durable

    @property
    def part(self) -> Path:
        """The path of the part being written."""
        return part_path(self.path, self._part)

    def append(self, record: bytes | Mapping[str, Any], heading: HeadingFields | None = None) -> int:
        """Adds one record, as a map or as the bytes :func:`pack_record` made of one; not durable before ``commit``.

        Args:
            heading: of the record (id, status, epoch, attempt, block), where the caller knows it: looking for it takes
                some time.

        Returns:
            The logical offset behind it, comparable with ``committed`` and with a seal.

        Raises:
            ConfigError: larger than ``MAX_RECORD``.
            OSError: the file system refused; see :meth:`commit`.
        """
        self._check()
        payload = bytes(record) if isinstance(record, bytes | bytearray | memoryview) else pack_record(record)
        if len(payload) > MAX_RECORD:
            raise ConfigError(
                f"{self.path}: a record of {len(payload)} bytes, at most {MAX_RECORD}; bound its artifacts"
            )
        place = self._written + self._pending_bytes
        self._pending.append(frame_head(payload, self._salt, place, time.time_ns()))
        self._pending.append(payload)
        self._pending_bytes += FRAME_SIZE + len(payload)
        end = self.length
        if heading := heading or _heading_of(payload):
            self._listed.append((end, FRAME_SIZE + len(payload), *heading))
        if self._pending_bytes >= _WRITE_BUFFER:
            self._write()
        return end

    def commit(self) -> int:
        """Makes every appended record durable and returns the journal's length.

        Raises:
            OSError: nothing new is acknowledged. When the disk is full the records stay in memory and ``commit`` may be
                called again. When fsync itself fails the kernel may have dropped the pages, so the writer is finished:
                every later call raises, and the pod has to go on with a new journal.
        """
        self._check()
        self._write()
        if self._durable < self._written:
            try:
                os.fsync(self._file)
            except OSError as error:
                self._broken = f"fsync failed: {error.strerror}"
                raise
            self._durable = self._written
            self._contents.add(self._part, self._base, self.committed, self._listed)
            self._listed = []
        if self._durable >= self._rotate_bytes:
            self._rotate()
        return self.committed

    def close(self) -> None:
        """Commits and closes. May be called twice."""
        if self._file < 0:
            return
        try:
            if not self._broken:
                self.commit()
        finally:
            os.close(self._file)
            self._file = -1
            self._contents.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._file < 0:
            raise ValueError(f"{self.path}: the journal is closed")
        if self._broken:
            raise OSError(f"{self.path}: {self._broken}; go on with a new journal")

    def _write(self) -> None:
        if not self._pending:
            return
        data = b"".join(self._pending)
        try:
            end = write_at(self._file, data, self._written)
        except OSError:
            try:  # the records stay pending and will be written at the same place; leave no half of one until then
                os.ftruncate(self._file, self._written)
            except OSError:
                pass
            self._pending = [data]
            raise
        self._pending.clear()
        self._written = end
        self._pending_bytes = 0

    def _rotate(self) -> None:
        """Goes on in the next part. Where that cannot be made now, this one simply grows on."""
        finished, base = self.part, self._base + self._written
        path = part_path(self.path, self._part + 1)
        try:
            file, salt, written = _create(path, pack_record({"kind": "part", "number": self._part + 1, "base": base}))
        except OSError as error:
            logger.warning("%s: the journal's next part cannot be made now (%s); %s grows", path, error, finished)
            return
        os.close(self._file)
        self._file, self._salt, self._part, self._base = file, salt, self._part + 1, base
        self._written = self._durable = written
        if self._on_rotate is not None:
            self._on_rotate(finished)


def _heading_of(payload: bytes) -> HeadingFields | None:
    """Returns the heading of a record, or none as for whoever reads the journal."""
    try:
        return heading_in(payload)
    except (KeyError, TypeError, ValueError):
        return None


def _create(path: Path, first: bytes) -> tuple[int, bytes, int]:
    """Creates a durable journal file with a header and perhaps a first record; returns descriptor, salt, length."""
    salt = os.urandom(8)
    data = header(salt)
    if first:
        data += frame_head(first, salt, HEADER_SIZE, time.time_ns()) + first
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; each start of a pod needs a journal of its own") from None
    except OSError as error:
        if first:
            raise
        raise ConfigError(f"{path}: cannot be created ({error.strerror}); check the run directory") from error
    try:
        if (mode := file_mode(path.parent)) != 0o600:
            os.fchmod(file, mode)
        write_at(file, data, 0)
        os.fsync(file)
        _fsync_directory(path.parent)
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file, salt, len(data)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot, and need not: they create synchronously
        logger.debug("fsync of directory %s: %s", path, error)
    finally:
        os.close(descriptor)


# --- a journal as a whole ---------------------------------------------------------------------------------------------


def base_of(path: str | os.PathLike[str]) -> int:
    """Returns the bytes in the parts before this one: from its first record or, if damaged, from their sizes."""
    path = Path(path)
    stem, _, number = path.name.removesuffix(SUFFIX).rpartition("+")
    if not stem:
        return 0
    frame = next(read_frames(path, tolerant=True), None)
    if frame is not None and frame.start == HEADER_SIZE:
        record = unpack_record(frame.payload)
        if record.get("kind") == "part":
            return int(record["base"])
    first = path.with_name(stem + path.name[len(stem) + 1 + len(number) :])
    return sum(part.stat().st_size for part in parts(first)[: int(number)])


def parts(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the files of the journal whose part 0 is ``path``, in order.

    A directory entry is durable before its first acknowledged record, so the first missing one ends the journal.
    """
    found: list[Path] = []
    while (part := part_path(Path(path), len(found))).exists():
        found.append(part)
    return found


def valid_length(path: str | os.PathLike[str]) -> int:
    """Returns the logical offset behind the last whole record, at which a successor seals; 0 for a missing journal.

    Args:
        path: part 0 of the journal; the others are found beside it.
    """
    found = parts(path)
    for part in reversed(found):
        end = 0
        for frame in read_frames(part, tolerant=True):
            end = frame.end
        if end:
            return base_of(part) + end
    return min(HEADER_SIZE, found[0].stat().st_size) if found else 0
