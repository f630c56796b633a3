"""Unpacks untrusted archives into one directory, within a budget, without following symlinks.

Every file is created by its bare name in a directory that is already open. Every such directory was opened step by step
from the root without following symlinks. An obstacle, such as a symlink from an earlier archive, is replaced. No string
from the archive is ever resolved as a path.

Symlinks are created last, and only if their target is relative and has ``..`` only at its beginning. The number of
``..`` must not exceed the symlink's depth. Each symlink then stays inside, whatever the tree contains now or later: the
``..`` lead through real directories, and every later name leads down, or to a symlink with the same property.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self, cast

from megaflow_hpc.host.tar import Kind, Member, RefusedMember, TarReader

MAX_DEPTH = 200
"""Maximum depth of directories, because later tree walks may recurse and path lengths are limited."""
MAX_PATH_BYTES = 2000
"""Maximum length in bytes of a path in the archive."""
_CHUNK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Parts = tuple[bytes, ...]


@dataclass
class Budget:
    """Remaining budget for writing: bytes of content, and number of files, directories and links."""

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
        stream: The archive; see :class:`.tar.TarReader`.
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
        raise RefusedMember(f"{len(parts)} directories in one another, or a name of {len(name)} bytes")
    return parts


class TreeWriter:
    """Writes files below one directory. The directory's own path is trusted and may be a symlink; see the module.

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
        """Symlink targets by path. Empty for skipped symlinks."""

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
            raise RefusedMember(f"a link to {b'/'.join(source)[:200]!r}, which did not come before it")

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
                raise RefusedMember(f"a file {name[:200]!r} where there is a directory") from None
            return os.open(name, _NEW, mode, dir_fd=parent)

    def _open(self, parts: Parts) -> int:
        """Returns a descriptor of the directory at ``parts``, creating missing parents. It stays open until another
        directory is requested."""
        if parts == self._at:
            return self._here
        begin = len(self._at) if parts[: len(self._at)] == self._at else 0
        here = os.dup(self._here if begin else self._root)
        try:
            for part in parts[begin:]:
                below = self._enter(here, part)
                os.close(here)
                here = below
        except BaseException:
            os.close(here)
            raise
        os.close(self._here)
        self._here, self._at = here, parts
        return here

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
    """Returns whether a symlink in a directory at this depth can never point outside, whatever the tree contains."""
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = next((number for number, part in enumerate(parts) if part != b".."), len(parts))
    return bool(target) and not target.startswith(b"/") and up <= depth and b".." not in parts[up:]
