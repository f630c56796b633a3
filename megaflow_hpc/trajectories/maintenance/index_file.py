"""Stores an index of journals in a file, in chunks that bound memory.

Each chunk is ``u32 length | u32 crc | msgpack``, little-endian. The first chunk contains the fingerprint of the
journals, the second their names and the number of winners. The remaining chunks are lists of entries, winners first.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from megaflow_hpc.host.files import open_regular
from megaflow_hpc.trajectories.journal.winners import Index, RecordEntry

T = TypeVar("T")

_PIECE = struct.Struct("<II")
_ENTRIES = 1 << 16
"""Number of entries per chunk."""

_Fields = tuple[str, str, int, int, int, int, int, int]
"""An index entry: (id, status, epoch, attempt, time_ns, journal number, start, size)."""


class _Contents(msgspec.Struct, array_like=True):
    journals: list[str]
    winners: int


def write_index(path: Path, index: Index, fingerprint: dict[str, Any]) -> None:
    """Writes an index. Raises OSError.

    Args:
        fingerprint: Fingerprint of the journals and seals from which the index was made.
    """
    numbers: dict[str, int] = {}
    for entry in chain(index.winners, *index.losers.values()):
        numbers.setdefault(entry.journal, len(numbers))
    with open(path, "xb") as file:
        _write(file, fingerprint)
        _write(file, _Contents(list(numbers), len(index.winners)))
        entries = chain(index.winners, *index.losers.values())
        while piece := [_fields(entry, numbers) for entry in islice(entries, _ENTRIES)]:
            _write(file, piece)


def read_index(path: Path, root: Path, fingerprint: dict[str, Any]) -> Index | None:
    """Reads an index. Returns ``None`` if it was built from other journals or seals.

    Args:
        root: Directory of the journals.

    Raises:
        OSError: The file is missing or unreadable.
        ValueError: The file is damaged.
    """
    with open_regular(path) as file:
        pieces = _pieces(file)
        if _decoded(next(pieces, b""), dict[str, Any]) != fingerprint:
            return None
        contents = _decoded(next(pieces, b""), _Contents)
        index = Index(root)
        for piece in pieces:
            for fields in _decoded(piece, list[_Fields]):
                journal = contents.journals[fields[5]]
                entry = RecordEntry(fields[0], sys.intern(fields[1]), *fields[2:5], journal, *fields[6:])
                if len(index.winners) < contents.winners:
                    index.winners.append(entry)
                else:
                    index.losers.setdefault(entry.id, []).append(entry)
    if len(index.winners) < contents.winners:
        raise ValueError("truncated")
    return index


def _fields(entry: RecordEntry, numbers: dict[str, int]) -> _Fields:
    order = entry.epoch, entry.attempt, entry.time_ns
    return entry.id, entry.status, *order, numbers[entry.journal], entry.start, entry.size


def _write(file: BinaryIO, content: object) -> None:
    data = msgspec.msgpack.encode(content)
    file.write(_PIECE.pack(len(data), zlib.crc32(data)))
    file.write(data)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while head := file.read(_PIECE.size):
        if len(head) < _PIECE.size:
            raise ValueError("truncated")
        length, crc = _PIECE.unpack(head)
        data = file.read(length)
        if len(data) < length or zlib.crc32(data) != crc:
            raise ValueError("damaged")
        yield data


def _decoded(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)
