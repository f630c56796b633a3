"""Implements the binary format of a journal: its header, its frames, and the treatment of torn tails and damage.

All integers are little-endian::

    header   8s magic "MFHPCJNL" | u32 version | 8s salt | u32 crc of the preceding 20 bytes
    frame    4s marker | u32 length | u64 time, ns UTC | u32 crc of the preceding 16 bytes | u32 crc of the payload
             payload: `length` bytes of msgpack, a map with the key "kind"

Both CRCs of a frame (CRC-32 as in zlib) are seeded with the file's salt and the frame's own offset. A frame is
therefore valid only in its own file and at its own offset. A stale disk block, or a journal stored as an artifact in
another journal, is never mistaken for a record. After damage, readers search for the marker of the next frame.

Reading ends at the *torn tail*: the first byte that is not followed by a complete valid frame. Invalid bytes before a
valid frame are *damage*. Strict readers raise an error that names file and offset; tolerant readers log and skip it. A
file may be read while it is being written: the reader sees the frames that were complete at that time.

Each record is ``{"kind": "trajectory", "epoch": int, "block": int, "trajectory": Trajectory.to_record()}``. Readers
skip records of other kinds.
"""

from __future__ import annotations

import logging
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import behind_hole, open_regular
from megaflow_hpc.ledger.files import passing
from megaflow_hpc.trajectories.journal.packs import PackedJournal, open_packed

try:
    from isal.isal_zlib import crc32  # several times faster
except ImportError:  # no wheel for this architecture
    from zlib import crc32

logger = logging.getLogger(__name__)

MAGIC = b"MFHPCJNL"
VERSION = 1
MARKER = b"\xf5\xc1MJ"
"""First bytes of a frame. 0xf5 never occurs in UTF-8 and 0xc1 never in msgpack, so text and small integers cannot be
mistaken for a marker."""

_HEADER = struct.Struct("<8sI8sI")
_FRAME = struct.Struct("<4sIQII")
_SEED = struct.Struct("<8sQ")
HEADER_SIZE = _HEADER.size
FRAME_SIZE = _FRAME.size

MAX_RECORD = 1 << 30
"""Maximum size of a record in bytes. The writer rejects larger records, and readers treat a larger length as damage."""
_SEARCH_WINDOW = 1 << 20
_HEADING_BYTES = 4096
"""Number of bytes at the start of a record that contain its heading, if a pod wrote the record."""
_HEADING_FIELDS = frozenset({"id", "status", "attempt", "epoch"})


class Frame(NamedTuple):
    """One record in a journal file: bytes ``[start, end)``, appended at ``time_ns`` (Unix nanoseconds)."""

    start: int
    end: int
    time_ns: int
    payload: bytes


class Heading(NamedTuple):
    """The fields of a trajectory record that decide which record of a rollout wins."""

    id: str
    status: str
    epoch: int
    attempt: int
    block: int
    """Block of the rollout. -1 if the record does not specify one."""


# --- writing ----------------------------------------------------------------------------------------------------------


def pack_record(record: Mapping[str, Any]) -> bytes:
    """Encodes a record as msgpack. Keeps lone surrogates, and converts values without a msgpack type to strings."""
    packed: bytes = msgpack.packb(record, use_bin_type=True, unicode_errors="surrogatepass", default=_plain)
    return packed


def _plain(value: Any) -> Any:
    if isinstance(value, array | memoryview):
        return value.tobytes()
    if isinstance(value, set | frozenset):
        return list(value)
    return str(value)


def header(salt: bytes) -> bytes:
    """Returns the :data:`HEADER_SIZE` bytes at the start of a journal."""
    head = struct.pack("<8sI8s", MAGIC, VERSION, salt)
    return head + struct.pack("<I", crc32(head))


def frame_head(payload: bytes, salt: bytes, offset: int, time_ns: int) -> bytes:
    """Returns the :data:`FRAME_SIZE` bytes that precede ``payload`` in the frame at ``offset``."""
    seed = _seed(salt, offset)
    head = struct.pack("<4sIQ", MARKER, len(payload), time_ns)
    return head + struct.pack("<II", crc32(head, seed), crc32(payload, seed))


def _seed(salt: bytes, offset: int) -> int:
    """Returns the initial value of both CRCs for the frame at ``offset``."""
    return crc32(_SEED.pack(salt, offset))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_journal(
    path: str | os.PathLike[str], limit: int | None = None, *, tolerant: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields ``(end offset, record)`` in append order, up to the torn tail.

    Args:
        path: The journal; a pod may be writing it.
        limit: Maximum offset in bytes (a seal). Records that end after it are skipped.
        tolerant: Log and skip damage instead of raising.

    Raises:
        ConfigError: The file is not a journal, has a newer version, is unreadable, or is damaged before its tail.
    """
    for frame in read_frames(path, limit, tolerant=tolerant):
        try:
            yield frame.end, unpack_record(frame.payload)
        except ValueError as error:
            if not tolerant:
                raise ConfigError(
                    f"{path}: the record at byte {frame.start} is {error}; did megaflow-hpc write it?"
                ) from None
            logger.warning("%s: the record at byte %d is %s; skipped", path, frame.start, error)


def read_frames(
    path: str | os.PathLike[str], limit: int | None = None, *, tolerant: bool = False, start: int = 0
) -> Iterator[Frame]:
    """Yields undecoded frames, in the order and with the errors of :func:`read_journal`.

    Args:
        path, limit, tolerant: As for :func:`read_journal`.
        start: Offset to start at: the end of an earlier frame.
    """
    with _open_journal(path) as file:
        salt = _read_header(file, path)
        if salt is None:
            return
        position = max(HEADER_SIZE, start)
        while True:
            size = _size(file)  # checked again for each frame, because a writer may append
            if limit is not None:
                size = min(size, limit)
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


def read_frames_at(path: str | os.PathLike[str], starts: Iterable[int]) -> Iterator[Frame]:
    """Yields the frames at the given offsets, which must come from :func:`read_frames`.

    Raises:
        ConfigError: An offset no longer has a complete frame.
    """
    with _open_journal(path) as file:
        salt = _read_header(file, path)
        size = _size(file)
        for start in starts:
            frame = None
            if salt is not None:
                frame, _ = _frame_at(file, salt, start, size)
            if frame is None:
                raise ConfigError(f"{path}: no whole record at byte {start}; the file changed or is damaged")
            yield frame


def read_frame(path: str | os.PathLike[str], start: int) -> Frame:
    """Returns the frame that starts at byte ``start``. Raises the errors of :func:`read_frames_at`."""
    return next(read_frames_at(path, [start]))


def unpack_record(payload: bytes) -> dict[str, Any]:
    """Decodes the output of :func:`pack_record`.

    Raises:
        ValueError: The bytes are not a msgpack map.
    """
    try:
        record = msgpack.unpackb(payload, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
    except (TypeError, ValueError, msgpack.exceptions.UnpackException) as error:  # TypeError: a map used as a map key
        # The original exception would keep everything unpacked so far alive, however deep and large.
        raise ValueError(f"not msgpack ({type(error).__name__}: {error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, expected a map")
    return record


def head_of(payload: bytes) -> dict[str, Any]:
    """Decodes a record without its messages and tokens. Decodes the whole record if the heading is not at its start.

    Records written by pods start with the heading's fields.
    """
    # The size also limits how much memory a forged length can make the unpacker allocate.
    unpacker = msgpack.Unpacker(
        raw=False, strict_map_key=False, unicode_errors="surrogatepass", max_buffer_size=_HEADING_BYTES
    )
    unpacker.feed(payload[:_HEADING_BYTES])
    record: dict[str, Any] = {}
    try:
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            if key != "trajectory":
                record[key] = unpacker.unpack()
                continue
            data: dict[str, Any] = {}
            for _ in range(unpacker.read_map_header()):
                name = unpacker.unpack()
                if name in _HEADING_FIELDS:
                    data[name] = unpacker.unpack()
                else:
                    unpacker.skip()
                if len(data) == len(_HEADING_FIELDS) and {"kind", "epoch", "block"} <= record.keys():
                    return {**record, "trajectory": data}
            break
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        pass
    return unpack_record(payload)


def trajectory_data(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the trajectory of a record as a mapping. Decodes it first if a worker has packed it."""
    data = record["trajectory"]
    if isinstance(data, bytes):
        data = unpack_record(data)
    if not isinstance(data, dict):
        raise TypeError(f"a trajectory is a {type(data).__name__}, expected a map")
    return data


def _open_journal(path: str | os.PathLike[str]) -> BinaryIO | PackedJournal:
    """Opens a journal for reading, from its own file or from a pack (:mod:`~megaflow_hpc.trajectories.journal.packs`).

    Raises:
        ConfigError: The file is missing or unreadable.
        OSError: The run directory is temporarily unavailable.
    """
    try:
        return open_regular(path)
    except OSError as error:
        if passing(error):
            raise
        packed = open_packed(Path(path)) if isinstance(error, FileNotFoundError) else None
        if packed is not None:
            return packed
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a journal") from error


def _size(file: BinaryIO | PackedJournal) -> int:
    return file.size if isinstance(file, PackedJournal) else os.fstat(file.fileno()).st_size


def _read_header(file: BinaryIO | PackedJournal, path: str | os.PathLike[str]) -> bytes | None:
    """Reads the header and returns its salt. Returns ``None`` if the file is empty because its creation was
    interrupted.

    Raises:
        ConfigError: The file is not a journal, its header is damaged, or it has another version.
    """
    raw = file.read(HEADER_SIZE)
    if len(raw) < HEADER_SIZE and MAGIC.startswith(raw[: len(MAGIC)]):
        return None
    if not raw.strip(b"\0"):
        return None
    if len(raw) < HEADER_SIZE or not raw.startswith(MAGIC):
        raise ConfigError(f"{path}: not a megaflow-hpc journal (it begins with {raw[:8]!r}); remove it from the run")
    _, version, salt, crc = _HEADER.unpack(raw)
    if crc != crc32(raw[:-4]):
        raise ConfigError(f"{path}: damaged at byte 0: the journal's header fails its checksum; restore the file")
    if version != VERSION:
        raise ConfigError(f"{path}: journal version {version}, expected {VERSION}; use a newer megaflow-hpc")
    return bytes(salt)


def _frame_at(file: BinaryIO | PackedJournal, salt: bytes, position: int, size: int) -> tuple[Frame | None, bool]:
    """Returns (frame, whether the frame is cut off at ``size``). The frame is ``None`` unless there is a valid one at
    ``position``."""
    file.seek(position)
    head = file.read(FRAME_SIZE)
    if position + FRAME_SIZE > size or len(head) < FRAME_SIZE:
        return None, True
    seed = _seed(salt, position)
    marker, length, time_ns, head_crc, payload_crc = _FRAME.unpack(head)
    if marker != MARKER or length > MAX_RECORD or crc32(head[:16], seed) != head_crc:
        return None, False
    end = position + FRAME_SIZE + length
    if end > size:
        return None, True
    payload = file.read(length)
    if len(payload) < length or crc32(payload, seed) != payload_crc:
        return None, False
    return Frame(position, end, time_ns, payload), False


def _next_frame(file: BinaryIO | PackedJournal, salt: bytes, position: int, size: int) -> Frame | None:
    """Returns the first valid frame at or after ``position``. Returns ``None`` if there is none."""
    while position + FRAME_SIZE <= size:
        file.seek(position)
        window = file.read(_SEARCH_WINDOW)
        offset = window.find(MARKER)
        while offset >= 0:
            frame, _ = _frame_at(file, salt, position + offset, size)
            if frame is not None:
                return frame
            offset = window.find(MARKER, offset + 1)
        if len(window) < len(MARKER):
            return None
        position += len(window) - len(MARKER) + 1
        if not (window.strip(b"\0") or isinstance(file, PackedJournal)):
            position = behind_hole(file, position)
    return None
