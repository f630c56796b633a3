"""Reads untrusted tar archives from a stream, so that their content cannot harm the reader.

A sandbox's agent controls the archive, and the reader runs in the process that holds all rollouts of a rank. In the
oldest supported Python, ``tarfile`` loops forever on a negative size and takes quadratic time for an extended header.
It also expands sparse files of any size in memory. So this module reads only the few record types that tar programs
write, and rejects all others. Time and memory are linear in the bytes read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

Kind = Literal["file", "directory", "symlink", "hardlink", "fifo", "special"]

BLOCK = 512
MAX_EXTENDED_HEADER_BYTES = 1 << 20
"""Maximum size in bytes of an extended header, which contains one or two names."""
_CHUNK = 1 << 20
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"3": "special",
    b"4": "special",
    b"5": "directory",
    b"6": "fifo",
}


class RefusedMember(ValueError):
    """The archive is damaged or uses an unsupported feature. The message says which."""


@dataclass(frozen=True)
class Member:
    """One entry, with its name as stored in the archive. ``size`` is in bytes, and set only for files."""

    name: bytes
    kind: Kind
    size: int
    mode: int
    target: bytes
    """Target of a link."""
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    """Modification time in Unix seconds."""


class TarReader:
    """Reads the members of an archive in order. :meth:`content` reads the content of the current one.

    Args:
        stream: The uncompressed archive. It is read sequentially to the end, without seeking.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        """Yields the members of the archive.

        Raises:
            RefusedMember: The archive is damaged, truncated, or has an unsupported member (such as a sparse file).
        """
        name = target = None
        size: int | None = None
        extended: dict[bytes, bytes] = {}
        while True:
            for _ in self.content():
                pass
            self._read(self._padding)
            self._padding = 0
            header = self._read(BLOCK)
            if not any(header):
                return
            declared = _checked(header)
            letter = header[156:157]
            if letter in (b"L", b"K"):
                text = self._extension(declared).partition(b"\0")[0]
                name, target = (text, target) if letter == b"L" else (name, text)
                continue
            if letter == b"g":
                self._extension(declared)
                continue
            if letter == b"x":
                extended = _records(self._extension(declared))
                name, target = extended.get(b"path", name), extended.get(b"linkpath", target)
                if b"size" in extended:
                    size = _decimal(extended[b"size"])
                continue
            yield self._member(header, letter, name, target, declared if size is None else size, extended)
            name = target = size = None
            extended = {}

    def _member(
        self,
        header: bytes,
        letter: bytes,
        name: bytes | None,
        target: bytes | None,
        size: int,
        extended: dict[bytes, bytes],
    ) -> Member:
        kind = _KINDS.get(letter)
        if kind is None:
            raise RefusedMember(f"a member of type {letter!r}, such as a sparse file")
        name = _name(header) if name is None else name
        if letter == b"\0" and name.endswith(b"/"):  # written by tar programs before 1988
            kind = "directory"
        target = header[157:257].partition(b"\0")[0] if target is None else target
        if b"\0" in name or b"\0" in target:
            raise RefusedMember("a zero byte in a name")
        self._left = size if kind == "file" else 0
        self._padding = -self._left % BLOCK
        mode = _number(header[100:108]) & 0o7777
        uid = _optional_number(header[108:116], extended.get(b"uid"))
        gid = _optional_number(header[116:124], extended.get(b"gid"))
        modified_at = _optional_number(header[136:148], extended.get(b"mtime"))
        return Member(name, kind, self._left, mode, target, uid, gid, modified_at)

    def content(self) -> Iterator[bytes]:
        """Yields the remaining content of the current file, in chunks.

        Raises:
            RefusedMember: The archive ends within the content.
        """
        while self._left:
            piece = self._stream.read(min(self._left, _CHUNK))
            if not piece:
                raise RefusedMember("the archive ends in the middle")
            self._left -= len(piece)
            yield piece

    def _extension(self, size: int) -> bytes:
        if size > MAX_EXTENDED_HEADER_BYTES:
            raise RefusedMember(f"an extended header of {size} bytes")
        return self._read(size + -size % BLOCK)[:size]

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:  # a decompressor may return less than requested
            piece = self._stream.read(size - len(data))
            if not piece:
                raise RefusedMember("the archive ends in the middle" if data else "the archive has no end")
            data += piece
        return data


def _checked(header: bytes) -> int:
    """Returns the size in a header, after verifying the checksum."""
    if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise RefusedMember("not a tar archive, or a damaged one")
    return _number(header[124:136])


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's base-256 encoding, for values too large for octal digits
        if field[0] != 0x80 or any(field[1:-7]):
            raise RefusedMember("a number that is negative or beyond reason")
        return int.from_bytes(field[-7:], "big")
    text = field.partition(b"\0")[0].strip()
    if text.strip(b"01234567"):
        raise RefusedMember(f"{text!r} instead of an octal number")
    return int(text or b"0", 8)


def _optional_number(field: bytes, extended: bytes | None) -> int:
    """Returns a non-essential number, or 0 if it is invalid."""
    try:
        return _number(field) if extended is None else _decimal(extended.partition(b".")[0])
    except RefusedMember:
        return 0


def _decimal(text: bytes) -> int:
    if len(text) > 16 or not text.isdigit():
        raise RefusedMember(f"{text[:40]!r} instead of a size")
    return int(text)


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _records(data: bytes) -> dict[bytes, bytes]:
    """Parses a POSIX extended header, made of records of ``LENGTH KEYWORD=VALUE`` and a newline."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        digits = data[at : at + 20].partition(b" ")[0]
        length = _decimal(digits)
        record = data[at + len(digits) + 1 : at + length]
        if length <= len(digits) + 2 or at + length > len(data) or record[-1:] != b"\n":
            raise RefusedMember("a broken extended header")
        keyword, equals, value = record[:-1].partition(b"=")
        if not equals or keyword.startswith(b"GNU.sparse"):
            raise RefusedMember(f"{keyword[:40]!r} in an extended header: a sparse file, or a broken one")
        records[keyword] = value
        at += length
    return records
