"""The bytes of a journal: frames, what makes one valid, and how they are read past torn tails and damage.

All integers are little-endian::

    header   8s magic "MFHPCJNL" | u32 version | 8s salt | u32 crc of the 20 bytes before
    frame    4s marker | u32 length | u64 time, ns UTC | u32 crc of the 16 bytes before | u32 crc of the payload
             payload: `length` bytes of msgpack, a map with the key "kind"

Both CRCs of a frame (CRC-32 as in zlib) are seeded with the file's salt and the frame's own offset. So a frame is valid
at one place of one file only: a stale disk block, or a journal kept as an artifact inside another, is never mistaken
for a record. The marker serves to find the next frame behind damage.

Reading ends at the *torn tail*: the first byte behind which no whole valid frame follows. Anything invalid before a
valid frame is *damage*: an error that names file and offset or, for tolerant readers, a gap, logged and skipped.
A file may be read while it is written; the reader sees the frames that were whole at that time.

Record kinds: ``{"kind": "trajectory", "epoch": int, "block": int, "trajectory": Trajectory.to_record()}`` and
``{"kind": "part", "number": int, "base": int}``. Readers skip the kinds they do not know.
"""

from __future__ import annotations

import logging
import os
import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import msgpack

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import behind_hole, open_regular
from megaflow_hpc.ledger.files import passing
from megaflow_hpc.trajectories.hdf5.deflate import crc32

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
"""Largest size of a record, in bytes: a greater length in a frame is damage, and a larger record is refused."""
_SEARCH_WINDOW = 1 << 20


class Frame(NamedTuple):
    """One record in its file: bytes ``[start, end)``, appended at ``time_ns`` (nanoseconds UTC)."""

    start: int
    end: int
    time_ns: int
    payload: bytes


def _plain(value: Any) -> Any:
    if isinstance(value, array | memoryview):
        return value.tobytes()
    if isinstance(value, set | frozenset):
        return list(value)
    return str(value)


def pack_record(record: Mapping[str, Any]) -> bytes:
    """Packs a record by msgpack. Lone surrogates stay as they are; values msgpack has no type for become strings."""
    packed: bytes = msgpack.packb(record, use_bin_type=True, unicode_errors="surrogatepass", default=_plain)
    return packed


def unpack_record(payload: bytes) -> dict[str, Any]:
    """Inverts :func:`pack_record`; strings packed with ``surrogateescape`` are accepted too.

    Raises:
        ValueError: the bytes are not the msgpack of a map.
    """
    try:
        try:
            record = msgpack.unpackb(payload, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
        except UnicodeDecodeError:
            record = msgpack.unpackb(payload, raw=False, strict_map_key=False, unicode_errors="surrogateescape")
    except (TypeError, ValueError, msgpack.exceptions.UnpackException) as error:  # TypeError: a map as a map's key
        # Its own errors carry what they read so far, however deep and large.
        raise ValueError(f"not msgpack ({type(error).__name__}: {error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, expected a map")
    return record


def seed_of(salt: bytes, offset: int) -> int:
    """Returns the value that both CRCs of the frame at ``offset`` start from."""
    return crc32(_SEED.pack(salt, offset))


def header(salt: bytes) -> bytes:
    """Returns the header of a journal, its first :data:`HEADER_SIZE` bytes."""
    head = struct.pack("<8sI8s", MAGIC, VERSION, salt)
    return head + struct.pack("<I", crc32(head))


def frame_head(payload: bytes, salt: bytes, offset: int, time_ns: int) -> bytes:
    """Returns the :data:`FRAME_SIZE` bytes that precede ``payload`` in the frame at ``offset``."""
    seed = seed_of(salt, offset)
    head = struct.pack("<4sIQ", MARKER, len(payload), time_ns)
    return head + struct.pack("<II", crc32(head, seed), crc32(payload, seed))


def write_at(file: int, data: bytes, offset: int) -> int:
    """Writes all of ``data``; returns the offset behind it. Raises OSError, and some of it may be written then."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, memoryview(data)[done:], offset + done)
    return offset + done


def starts_frame(head: bytes, salt: bytes, offset: int) -> int | None:
    """Returns the size of the frame at ``offset`` by its first bytes; ``None`` where there is none."""
    if len(head) < FRAME_SIZE:
        return None
    marker, length, _, head_crc, _ = _FRAME.unpack(head[:FRAME_SIZE])
    if marker != MARKER or length > MAX_RECORD or crc32(head[:16], seed_of(salt, offset)) != head_crc:
        return None
    return FRAME_SIZE + int(length)


def read_journal(
    path: str | os.PathLike[str], limit: int | None = None, *, tolerant: bool = False, salt: bytes | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields ``(offset behind the record, record)`` in the order of appending, up to the torn tail.

    Args:
        path: the journal; may be written meanwhile.
        limit: number of bytes (a seal); records that end behind it are left out.
        tolerant: log and skip damage instead of raising.
        salt: of the file that is meant; any other holds nothing.

    Raises:
        ConfigError: the file is not a journal, of a newer version, unreadable, or damaged in its middle.
    """
    for frame in read_frames(path, limit, tolerant=tolerant, wanted=salt):
        try:
            yield frame.end, unpack_record(frame.payload)
        except ValueError as error:
            if not tolerant:
                raise ConfigError(
                    f"{path}: the record at byte {frame.start} is {error}; was it written by us?"
                ) from None
            logger.warning("%s: the record at byte %d is %s; skipped", path, frame.start, error)


def read_frames(
    path: str | os.PathLike[str],
    limit: int | None = None,
    *,
    tolerant: bool = False,
    start: int = 0,
    wanted: bytes | None = None,
) -> Iterator[Frame]:
    """Yields undecoded frames as :func:`read_journal` does records, from ``start``, the end of an earlier frame, on."""
    with open_journal(path) as file:
        salt = read_header(file, path)
        if salt is None or wanted not in (None, salt):
            return
        position = max(HEADER_SIZE, start)
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
    """Returns the frame that starts at byte ``start``, a place known from :func:`read_frames`.

    Raises:
        ConfigError: no whole frame is there any more.
    """
    with open_journal(path) as file:
        salt = read_header(file, path)
        size = os.fstat(file.fileno()).st_size
        frame = _frame_at(file, salt, start, size)[0] if salt is not None else None
    if frame is None:
        raise ConfigError(f"{path}: no whole record at byte {start}; the file changed or is damaged")
    return frame


def open_journal(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a journal for reading.

    Raises:
        ConfigError: there is no such file, or it may not be read.
        OSError: the run directory does not answer; it may later.
    """
    try:
        return open_regular(path)
    except OSError as error:
        if passing(error):
            raise
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a journal") from error


def read_header(file: BinaryIO, path: str | os.PathLike[str]) -> bytes | None:
    """Reads the header and returns its salt; ``None`` for a file whose creation never finished, and so holds nothing.

    Raises:
        ConfigError: the file is not a journal, its header is damaged, or it is of another version.
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


def _frame_at(file: BinaryIO, salt: bytes, position: int, size: int) -> tuple[Frame | None, bool]:
    """Returns the valid frame at ``position`` in the first ``size`` bytes, or else whether the bytes end too early."""
    file.seek(position)
    head = file.read(FRAME_SIZE)
    if position + FRAME_SIZE > size or len(head) < FRAME_SIZE:
        return None, True
    seed = seed_of(salt, position)
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


def _next_frame(file: BinaryIO, salt: bytes, position: int, size: int) -> Frame | None:
    """Returns the first valid frame at or behind ``position``."""
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
        if not window.strip(b"\0"):
            position = behind_hole(file, position)
    return None
