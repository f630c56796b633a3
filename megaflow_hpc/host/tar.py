"""Tar archives of strangers, read from a stream: what is in them, and nothing that they can make the reader do.

A sandbox's archive is whatever its agent wants it to be, and the reader runs in the process that holds every rollout of
a rank. ``tarfile`` of the oldest Python that is supported loops for ever on a negative size, takes quadratic time over
an extended header and expands a sparse file of any size in memory, so the few records that tar programs write are read
here. Anything else is refused. Work and memory are linear in the bytes read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

Kind = Literal["file", "directory", "symlink", "hardlink", "fifo", "special"]

BLOCK = 512
LONGEST_EXTENSION = 1 << 20
"""Bytes of an extended header, which holds a name or two."""
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
    """An archive is broken, or asks for what is not done; the message says what."""


@dataclass(frozen=True)
class Member:
    """One entry, by its name as it stands in the archive. ``size`` in bytes, of files only."""

    name: bytes
    kind: Kind
    size: int
    mode: int
    target: bytes
    """Of links."""
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    """Seconds since 1970."""


class TarReader:
    """Reads the members of an archive one after the other; :meth:`content` is that of the one read last.

    Args:
        stream: gives the archive, uncompressed; is read to the archive's end and never sought.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        """Yields the members.

        Raises:
            Refused: the archive is broken, ends before its end mark, or has a member of another kind (sparse files).
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
        if letter == b"\0" and name.endswith(b"/"):  # of the tars before 1988
            kind = "directory"
        target = header[157:257].partition(b"\0")[0] if target is None else target
        if b"\0" in name or b"\0" in target:
            raise RefusedMember("a zero byte in a name")
        self._left = size if kind == "file" else 0
        self._padding = -self._left % BLOCK
        mode = _number(header[100:108]) & 0o7777
        uid, gid = _said(header[108:116], extended.get(b"uid")), _said(header[116:124], extended.get(b"gid"))
        return Member(name, kind, self._left, mode, target, uid, gid, _said(header[136:148], extended.get(b"mtime")))

    def content(self) -> Iterator[bytes]:
        """Yields what is left of the content of the file read last, in pieces.

        Raises:
            Refused: the archive ends in it.
        """
        while self._left:
            piece = self._stream.read(min(self._left, _CHUNK))
            if not piece:
                raise RefusedMember("the archive ends in the middle")
            self._left -= len(piece)
            yield piece

    def _extension(self, size: int) -> bytes:
        if size > LONGEST_EXTENSION:
            raise RefusedMember(f"an extended header of {size} bytes")
        return self._read(size + -size % BLOCK)[:size]

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:  # a decompressor may give less than it was asked for
            piece = self._stream.read(size - len(data))
            if not piece:
                raise RefusedMember("the archive ends in the middle" if data else "the archive has no end")
            data += piece
        return data


def _checked(header: bytes) -> int:
    """The size that a header declares, after its checksum was compared."""
    if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise RefusedMember("not a tar archive, or a damaged one")
    return _number(header[124:136])


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's binary form, for what has no room in octal digits
        if field[0] != 0x80 or any(field[1:-7]):
            raise RefusedMember("a number that is negative or beyond reason")
        return int.from_bytes(field[-7:], "big")
    text = field.partition(b"\0")[0].strip()
    if text.strip(b"01234567"):
        raise RefusedMember(f"{text!r} instead of an octal number")
    return int(text or b"0", 8)


def _said(field: bytes, extended: bytes | None) -> int:
    """A number that nothing depends on; 0 where it is none."""
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
    """The keywords of a POSIX extended header: records of ``LENGTH KEYWORD=VALUE`` and a line end."""
    found: dict[bytes, bytes] = {}
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
        found[keyword] = value
        at += length
    return found
