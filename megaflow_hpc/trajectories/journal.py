"""The journal: an append-only file of records that survive SIGKILL, power loss and full disks.

One file per pod and start, created with ``O_EXCL`` and never reopened for writing, so a crashed writer's tail is never
built upon. A record is *acknowledged* once :meth:`JournalWriter.commit` has returned; committing many at once (group
commit) costs one fsync. All integers are little-endian::

    header   8s magic "MFHPCJNL" | u32 version | 8s salt | u32 crc of the 20 bytes before
    frame    4s marker | u32 length | u64 time, ns UTC | u32 crc of the 16 bytes before | u32 crc of the payload
             payload: `length` bytes of msgpack, a map with the key "kind"

Both CRCs of a frame (CRC-32 as in zlib) are seeded with the file's salt and the frame's own offset. So a frame is valid
at one place of one file only: a stale disk block, or a journal kept as an artifact inside another, is never mistaken
for a record. The marker serves to find the next frame behind damage.

Reading ends at the *torn tail*: the first byte behind which no whole valid frame follows. Anything invalid before a
valid frame is *damage*: an error that names file and offset or, for tolerant readers, a gap, logged and skipped.
A file may be read while it is written; the reader sees what was whole when it came by.

Record kinds: ``{"kind": "trajectory", "epoch": int, "block": int, "trajectory": Trajectory.to_record()}``. Readers skip
the kinds they do not know.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from megaflow_hpc.errors import ConfigError

logger = logging.getLogger(__name__)

MAGIC = b"MFHPCJNL"
VERSION = 1
MARKER = b"\xf5\xc1MJ"
"""0xf5 is never part of UTF-8 and 0xc1 never of msgpack, so text and small integers do not look like it."""

_HEADER = struct.Struct("<8sI8sI")
_FRAME = struct.Struct("<4sIQII")
_SEED = struct.Struct("<8sQ")
HEADER_SIZE = _HEADER.size
FRAME_SIZE = _FRAME.size

MAX_RECORD = 1 << 30
"""Bytes of one record: above this a length is damage, and a record is refused."""
_WRITE_BUFFER = 4 << 20
"""Appended bytes are kept in memory up to this size between commits, then given to the kernel."""
_SEARCH_WINDOW = 1 << 20


class Frame(NamedTuple):
    """One record as it lies in the file: ``[start, end)`` in bytes, ``time_ns`` UTC when it was appended."""

    start: int
    end: int
    time_ns: int
    payload: bytes


# --- records ---------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, array | memoryview):
        return value.tobytes()
    if isinstance(value, set | frozenset):
        return list(value)
    return str(value)


def pack_record(record: Mapping[str, Any]) -> bytes:
    """msgpack of a record. Lone surrogates in strings pass unchanged; what msgpack has no type for becomes a string."""
    packed: bytes = msgpack.packb(record, use_bin_type=True, unicode_errors="surrogatepass", default=_plain)
    return packed


def unpack_record(payload: bytes) -> dict[str, Any]:
    """Inverse of :func:`pack_record`; also takes strings packed with ``surrogateescape``.

    Raises:
        ValueError: the bytes are not the msgpack of a map.
    """
    try:
        record = msgpack.unpackb(payload, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
    except UnicodeDecodeError:
        record = msgpack.unpackb(payload, raw=False, strict_map_key=False, unicode_errors="surrogateescape")
    except msgpack.exceptions.UnpackException as error:
        raise ValueError(f"not msgpack ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, expected a map")
    return record


# --- writing ---------------------------------------------------------------------------------------------------------


class JournalWriter:
    """Creates a journal and appends to it. For one thread of one process.

    Args:
        path: a file that does not exist yet, in a directory that does.

    Raises:
        ConfigError: the file exists (two pods with one name), or cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._salt = os.urandom(8)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.open(self.path, flags, 0o600)
        except FileExistsError:
            raise ConfigError(f"{self.path}: exists already; each start of a pod needs a journal of its own") from None
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be created ({error.strerror}); check the run directory") from error
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written = 0
        self._durable = 0
        self._broken = ""
        head = struct.pack("<8sI8s", MAGIC, VERSION, self._salt)
        self._pending.append(head + struct.pack("<I", zlib.crc32(head)))
        self._pending_bytes = HEADER_SIZE
        try:
            self.commit()
            _fsync_directory(self.path.parent)
        except BaseException:
            os.close(self._file)
            self.path.unlink(missing_ok=True)
            raise

    @property
    def length(self) -> int:
        """Offset behind the last appended record."""
        return self._written + self._pending_bytes

    @property
    def committed(self) -> int:
        """Offset up to which everything is durable."""
        return self._durable

    def append(self, record: bytes | Mapping[str, Any]) -> int:
        """Adds one record, as a map or as the bytes :func:`pack_record` made of one; not durable before ``commit``.

        Returns:
            The offset behind it, comparable with ``committed`` and with a seal.

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
        seed = _seed(self._salt, self.length)
        head = struct.pack("<4sIQ", MARKER, len(payload), time.time_ns())
        self._pending.append(head + struct.pack("<II", zlib.crc32(head, seed), zlib.crc32(payload, seed)))
        self._pending.append(payload)
        self._pending_bytes += FRAME_SIZE + len(payload)
        end = self.length
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
        return self._durable

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
        data = b"".join(self._pending)
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, memoryview(data)[done:], self._written + done)
        except OSError:
            try:  # the records stay pending and will be written at the same place; leave no half of one until then
                os.ftruncate(self._file, self._written)
            except OSError:
                pass
            self._pending = [data]
            raise
        self._pending.clear()
        self._written += len(data)
        self._pending_bytes = 0


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot, and need not: they create synchronously
        logger.debug("fsync of directory %s: %s", path, error)
    finally:
        os.close(descriptor)


def _seed(salt: bytes, offset: int) -> int:
    return zlib.crc32(_SEED.pack(salt, offset))


# --- reading ---------------------------------------------------------------------------------------------------------


def read_journal(
    path: str | os.PathLike[str], limit: int | None = None, *, tolerant: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields ``(offset behind the record, record)`` in the order of appending, up to the torn tail.

    Args:
        path: the journal; may be written meanwhile.
        limit: bytes; records that end behind it are left out (a seal).
        tolerant: log and skip damage instead of raising.

    Raises:
        ConfigError: not a journal, of a newer version, unreadable, or damaged in its middle.
    """
    for frame in read_frames(path, limit, tolerant=tolerant):
        try:
            yield frame.end, unpack_record(frame.payload)
        except ValueError as error:
            if not tolerant:
                raise ConfigError(
                    f"{path}: the record at byte {frame.start} is {error}; was it written by us?"
                ) from None
            logger.warning("%s: the record at byte %d is %s; skipped", path, frame.start, error)


def read_frames(path: str | os.PathLike[str], limit: int | None = None, *, tolerant: bool = False) -> Iterator[Frame]:
    """As :func:`read_journal`, without decoding the records."""
    with _open(path) as file:
        salt = _read_header(file, path)
        if salt is None:
            return
        position = HEADER_SIZE
        while True:
            size = os.fstat(file.fileno()).st_size  # afresh: the writer may be at work
            size = size if limit is None else min(size, limit)
            frame, torn = _frame_at(file, salt, position, size)
            if frame is None and not torn:
                frame = _next_frame(file, salt, position + 1, size)
            if frame is None:
                return
            if frame.start > position:
                gap = f"{path}: damaged at byte {position}: {frame.start - position} bytes before the next whole record"
                if not tolerant:
                    raise ConfigError(f"{gap}; restore the file, or gather, which skips what is lost")
                logger.warning("%s; skipped", gap)
            yield frame
            position = frame.end


def read_frame(path: str | os.PathLike[str], start: int) -> Frame:
    """The frame that starts at byte ``start``, as :func:`read_frames` once gave it.

    Raises:
        ConfigError: there is none any more.
    """
    with _open(path) as file:
        salt = _read_header(file, path)
        size = os.fstat(file.fileno()).st_size
        frame = _frame_at(file, salt, start, size)[0] if salt is not None else None
    if frame is None:
        raise ConfigError(f"{path}: no whole record at byte {start}; the file changed or is damaged")
    return frame


def valid_length(path: str | os.PathLike[str]) -> int:
    """Bytes up to the end of the last whole record: what a successor seals. 0 for a file that is not there.

    A journal's directory entry is durable before its first record, so a missing file never held an acknowledged one.
    """
    if not os.path.exists(path):
        return 0
    end = min(HEADER_SIZE, os.path.getsize(path))
    for frame in read_frames(path, tolerant=True):
        end = frame.end
    return end


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a journal") from error


def _read_header(file: BinaryIO, path: str | os.PathLike[str]) -> bytes | None:
    """The file's salt; ``None`` when its creation never finished, so that it holds nothing."""
    raw = file.read(HEADER_SIZE)
    if len(raw) < HEADER_SIZE and MAGIC.startswith(raw[: len(MAGIC)]):
        return None
    if not raw.strip(b"\0"):
        return None
    if len(raw) < HEADER_SIZE or not raw.startswith(MAGIC):
        raise ConfigError(f"{path}: not a megaflow-hpc journal (it begins with {raw[:8]!r}); remove it from the run")
    _, version, salt, crc = _HEADER.unpack(raw)
    if crc != zlib.crc32(raw[:-4]):
        raise ConfigError(f"{path}: damaged at byte 0: the journal's header fails its checksum; restore the file")
    if version != VERSION:
        raise ConfigError(f"{path}: journal version {version}, expected {VERSION}; use a newer megaflow-hpc")
    return bytes(salt)


def _frame_at(file: BinaryIO, salt: bytes, position: int, size: int) -> tuple[Frame | None, bool]:
    """The valid frame at ``position`` within the first ``size`` bytes; else whether the bytes surely just end early."""
    file.seek(position)
    head = file.read(FRAME_SIZE)
    if position + FRAME_SIZE > size or len(head) < FRAME_SIZE:
        return None, True
    seed = _seed(salt, position)
    marker, length, time_ns, head_crc, payload_crc = _FRAME.unpack(head)
    if marker != MARKER or length > MAX_RECORD or zlib.crc32(head[:16], seed) != head_crc:
        return None, False
    end = position + FRAME_SIZE + length
    if end > size:
        return None, True
    payload = file.read(length)
    if len(payload) < length or zlib.crc32(payload, seed) != payload_crc:
        return None, False
    return Frame(position, end, time_ns, payload), False


def _next_frame(file: BinaryIO, salt: bytes, position: int, size: int) -> Frame | None:
    """The first valid frame at or behind ``position``."""
    while position + FRAME_SIZE <= size:
        file.seek(position)
        window = file.read(_SEARCH_WINDOW)
        found = window.find(MARKER)
        while found >= 0:
            frame, _ = _frame_at(file, salt, position + found, size)
            if frame is not None:
                return frame
            found = window.find(MARKER, found + 1)
        if len(window) < len(MARKER):
            return None
        position += len(window) - len(MARKER) + 1
    return None
