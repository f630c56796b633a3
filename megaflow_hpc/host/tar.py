"""Reads untrusted tar archives, and unpacks them into one directory, within a budget.

**Reading.** A sandbox's agent controls the archive, and the reader runs in the process that holds all rollouts of a
rank. In the oldest supported Python, ``tarfile`` loops forever on a negative size and takes quadratic time for an
extended header. It also expands sparse files of any size in memory. This module therefore reads only the few record
types that tar programs write, and rejects all others. Time and memory are linear in the bytes read.

**Unpacking.** Every file is created by its bare name in a directory that is already open. That directory was opened
step by step from the root, without following symlinks. An obstacle, such as a symlink from an earlier archive, is
replaced. No string from the archive is ever resolved as a path.

Symlinks are created last, and only if their target is relative and has ``..`` only at its beginning. The number of
``..`` must not exceed the symlink's depth. Each symlink then stays inside the tree, even if the tree changes later. Its
``..`` components lead through real directories. Its other components lead down, or to a symlink that satisfies the same
rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Self, cast

Kind = Literal["file", "directory", "symlink", "hardlink", "fifo", "special"]

BLOCK = 512
MAX_EXTENDED_HEADER_BYTES = 1 << 20
"""Maximum size in bytes of an extended header, which contains one or two names."""
_CHUNK = 1 << 20
MAX_DEPTH = 200
"""Maximum directory depth. It is limited because later tree walks may recurse."""
MAX_PATH_BYTES = 2000
"""Maximum length in bytes of a path in the archive."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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


Parts = tuple[bytes, ...]
"""Components of a path."""


class RefusedMember(ValueError):
    """The archive is damaged or uses an unsupported feature. The message says which."""


@dataclass(frozen=True)
class Member:
    """An entry of an archive, with its name as stored. ``size`` is in bytes, and set only for files."""

    name: bytes
    kind: Kind
    size: int
    mode: int
    target: bytes
    """Target of a link. Meaningless for other members."""
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    """Modification time in seconds since the Unix epoch."""


class TarReader:
    """Reads the members of an archive in order. :meth:`content` reads the content of the current member.

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
        """Yields the unread content of the current file, in chunks.

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
        raise RefusedMember("not a tar archive, or damaged")
    return _number(header[124:136])


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's base-256 encoding, for values too large for octal digits
        if field[0] != 0x80 or any(field[1:-7]):
            raise RefusedMember("a number that is negative or too large")
        return int.from_bytes(field[-7:], "big")
    text = field.partition(b"\0")[0].strip()
    if text.strip(b"01234567"):
        raise RefusedMember(f"{text!r} instead of an octal number")
    return int(text or b"0", 8)


def _optional_number(field: bytes, extended: bytes | None) -> int:
    """Parses a number from a header or an extended record. Returns 0 if it is invalid."""
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
    """Parses a POSIX extended header. Each record is ``LENGTH KEYWORD=VALUE`` followed by a newline."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        digits = data[at : at + 20].partition(b" ")[0]
        length = _decimal(digits)
        record = data[at + len(digits) + 1 : at + length]
        if length <= len(digits) + 2 or at + length > len(data) or record[-1:] != b"\n":
            raise RefusedMember("a damaged extended header")
        keyword, equals, value = record[:-1].partition(b"=")
        if not equals or keyword.startswith(b"GNU.sparse"):
            raise RefusedMember(f"{keyword[:40]!r} in an extended header: a sparse file, or a damaged archive")
        records[keyword] = value
        at += length
    return records


# --- unpacking -------------------------------------------------------------------------------------------------------


@dataclass
class Budget:
    """Remaining budget for unpacking: bytes of content, and number of files, directories and links."""

    bytes: int
    entries: int

    def spend(self, size: int, entries: int = 0) -> None:
        """Deducts an amount. Raises :class:`RefusedMember` if the budget is exceeded."""
        if size > self.bytes or entries > self.entries:
            raise RefusedMember("more bytes than are allowed" if size > self.bytes else "more files than are allowed")
        self.bytes -= size
        self.entries -= entries


def unpack_tar(
    stream: BinaryIO,
    target: str | os.PathLike[str],
    budget: Budget,
    keep: Callable[[Parts, Kind], bool] = lambda parts, kind: True,
) -> None:
    """Extracts the files, directories and links of a tar archive below ``target``, which is created.

    Devices, FIFOs and symlinks that could escape ``target`` are skipped. Setuid, setgid and sticky bits are dropped.
    Hard links become copies. Existing files are kept, unless the archive contains the same name.

    Args:
        stream: The archive; see :class:`TarReader`.
        keep: Called with each member's path components and kind. Returns whether to extract it.

    Raises:
        RefusedMember: The archive is damaged, contains a path outside ``target``, or exceeds ``budget``.
        OSError: A file cannot be written.
    """
    reader = TarReader(stream)
    with TreeWriter(target, budget) as tree:
        for member in reader:
            parts = plain(member.name)
            if keep(parts, member.kind):
                _write(tree, parts, member, reader)


def _write(tree: TreeWriter, parts: Parts, member: Member, reader: TarReader) -> None:
    if member.kind == "directory":
        tree.directory(parts)
    elif not parts:
        raise RefusedMember("a member without a name")
    elif member.kind == "file":
        tree.file(parts, reader.content(), member.mode & 0o777 | 0o600)
    elif member.kind == "hardlink":
        tree.copy(parts, plain(member.target), member.mode & 0o777 | 0o600)
    else:
        tree.link(parts, member.target if member.kind == "symlink" else b"")


def plain(name: bytes) -> Parts:
    """Splits a path in an archive into components, without ``.`` and surrounding slashes.

    Raises:
        RefusedMember: The path escapes with ``..``, is too deep, or is too long.
    """
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise RefusedMember(f"{name[:200]!r} leaves the directory")
    if len(parts) > MAX_DEPTH or len(name) > MAX_PATH_BYTES:
        raise RefusedMember(
            f"a path of {len(parts)} components and {len(name)} bytes; {MAX_DEPTH} and {MAX_PATH_BYTES} are allowed"
        )
    return parts


class TreeWriter:
    """Writes files below one directory. The directory's own path is trusted and may be a symlink. The module docstring
    describes the method.

    Methods raise :class:`RefusedMember` if the budget is exceeded or a directory exists in place of a file. They may
    also raise :class:`OSError`.
    """

    def __init__(self, root: str | os.PathLike[str], budget: Budget) -> None:
        Path(root).mkdir(parents=True, exist_ok=True)
        self.budget = budget
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._here, self._at = os.dup(self._root), cast(Parts, ())  # most files share the previous directory
        self._files: set[Parts] = set()
        self._links: dict[Parts, bytes] = {}
        """Symlink targets by path. The target of a skipped symlink is empty."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Creates the symlinks, unless an error occurred, and closes the descriptors."""
        try:
            if kind is None:
                for parts, target in self._links.items():
                    if target:
                        self._make_link(parts, target)
        finally:
            os.close(self._here)
            os.close(self._root)

    def directory(self, parts: Parts) -> None:
        """Creates a directory if it does not exist."""
        self._open(parts)

    def file(self, parts: Parts, content: Iterable[bytes], mode: int | None = None) -> None:
        """Writes a new file. If ``mode`` is ``None``, the umask applies."""
        self.budget.spend(0, 1)
        self._links.pop(parts, None)
        descriptor = self._create(self._open(parts[:-1]), parts[-1], 0o666 if mode is None else 0o600)
        try:
            for piece in content:
                self.budget.spend(len(piece))
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view) :]
            if mode is not None:
                os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        self._files.add(parts)

    def copy(self, parts: Parts, source: Parts, mode: int) -> None:
        """Copies a file that was written earlier. If it is a symlink, creates the same symlink."""
        if source in self._links and source != parts:
            self.link(parts, self._links[source])
        elif source in self._files and source != parts:
            descriptor = os.open(source[-1], _OLD, dir_fd=self._open(source[:-1]))
            with open(descriptor, "rb", buffering=0) as file:
                self.file(parts, iter(lambda: file.read(_CHUNK), b""), mode)
        else:
            raise RefusedMember(f"a link to {b'/'.join(source)[:200]!r}, which does not precede it")

    def link(self, parts: Parts, target: bytes) -> None:
        """Schedules a symlink for creation at the end. Skips a symlink that could escape the directory."""
        self.budget.spend(0, 1)
        self._files.discard(parts)
        self._links[parts] = target if stays_inside(target, len(parts) - 1) else b""

    def _make_link(self, parts: Parts, target: bytes) -> None:
        parent = self._open(parts[:-1])
        try:
            os.symlink(target, parts[-1], dir_fd=parent)
        except FileExistsError:
            try:
                os.unlink(parts[-1], dir_fd=parent)
            except IsADirectoryError:
                return
            os.symlink(target, parts[-1], dir_fd=parent)

    def _create(self, parent: int, name: bytes, mode: int) -> int:
        try:
            return os.open(name, _NEW, mode, dir_fd=parent)
        except FileExistsError:
            try:
                os.unlink(name, dir_fd=parent)
            except IsADirectoryError:
                raise RefusedMember(f"a file {name[:200]!r} in place of a directory") from None
            return os.open(name, _NEW, mode, dir_fd=parent)

    def _open(self, parts: Parts) -> int:
        """Returns a descriptor of the directory at ``parts``, creating missing parents. The descriptor stays open until
        the next call for another directory."""
        if parts == self._at:
            return self._here
        begin = len(self._at) if parts[: len(self._at)] == self._at else 0
        descriptor = os.dup(self._here if begin else self._root)
        try:
            for part in parts[begin:]:
                subdirectory = self._enter(descriptor, part)
                os.close(descriptor)
                descriptor = subdirectory
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._here)
        self._here, self._at = descriptor, parts
        return descriptor

    def _enter(self, here: int, name: bytes) -> int:
        try:
            return os.open(name, _DIRECTORY, dir_fd=here)
        except FileNotFoundError:
            pass
        except NotADirectoryError:  # a file or, because of O_NOFOLLOW, a symlink
            os.unlink(name, dir_fd=here)
        self.budget.spend(0, 1)
        os.mkdir(name, 0o777, dir_fd=here)
        return os.open(name, _DIRECTORY, dir_fd=here)


def stays_inside(target: bytes, depth: int) -> bool:
    """Returns whether a symlink in a directory at this depth can never point outside the tree, even if the tree
    changes."""
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = next((number for number, part in enumerate(parts) if part != b".."), len(parts))
    return bool(target) and not target.startswith(b"/") and up <= depth and b".." not in parts[up:]
