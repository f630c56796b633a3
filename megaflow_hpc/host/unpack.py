"""Unpacks what strangers have packed: below one directory, within a budget, through no link.

Every file is made by its bare name in a directory that was opened for it, and every such directory was reached from the
root step by step without following a link; what stands in the way (a link of an earlier archive, for one) is replaced.
Nothing that the archive says is ever resolved as a path.

A link is made, after all else, if its target is relative and ``..`` stands only at its beginning, no more often than
the link lies deep. So it can be said of each link by itself that it stays inside, whatever the tree holds now or later:
the ``..`` lead through real directories, and every name after them leads down, or to a link of which the same holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self, cast

from megaflow_hpc.host.tar import Kind, Member, RefusedMember, TarReader

DEEPEST = 200
"""Directories in one another; what walks the tree later may recurse, and its paths have an end."""
LONGEST_PATH = 2000
"""Bytes of a name with its directories."""
_CHUNK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Parts = tuple[bytes, ...]


@dataclass
class Budget:
    """What may still be written: bytes of content, and files, directories and links."""

    bytes: int
    entries: int

    def spend(self, size: int, entries: int = 0) -> None:
        """Takes off; raises :class:`RefusedMember` if there is not as much."""
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
    """Writes the files, directories and links of a tar archive below ``target``, which is made.

    Devices, FIFOs and links that may lead out are left out; modes lose setuid, setgid and sticky; a hard link becomes a
    copy. What is there already stays, unless the archive has the same name.

    Args:
        stream: the archive; see :class:`.tar.TarReader`.
        keep: is asked for each name, in parts, and its kind, whether to write it.

    Raises:
        Refused: the archive is broken, names what lies outside of ``target``, or is larger than ``budget``.
        OSError: something cannot be written.
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
    """Returns the parts of a name in an archive, ``.`` and slashes around it left out.

    Raises:
        Refused: it leads out by ``..``, is nested too deep, or too long.
    """
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise RefusedMember(f"{name[:200]!r} leaves the directory")
    if len(parts) > DEEPEST or len(name) > LONGEST_PATH:
        raise RefusedMember(f"{len(parts)} directories in one another, or a name of {len(name)} bytes")
    return parts


class TreeWriter:
    """Writes below one directory, whose path is the caller's and may be a link; see the module.

    Methods raise :class:`RefusedMember` when the budget is spent or a directory stands where a file should be, and
    :class:`OSError`.
    """

    def __init__(self, root: str | os.PathLike[str], budget: Budget) -> None:
        Path(root).mkdir(parents=True, exist_ok=True)
        self.budget = budget
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._here, self._at = os.dup(self._root), cast(Parts, ())  # most files are neighbours of the last
        self._files: set[Parts] = set()
        self._links: dict[Parts, bytes] = {}
        """Target by name; empty where nothing is made: of what is left out."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Makes the links, unless something went wrong, and lets go."""
        try:
            if kind is None:
                for parts, target in self._links.items():
                    if target:
                        self._make_link(parts, target)
        finally:
            os.close(self._here)
            os.close(self._root)

    def directory(self, parts: Parts) -> None:
        """Makes a directory, unless it is there."""
        self._open(parts)

    def file(self, parts: Parts, content: Iterable[bytes], mode: int | None = None) -> None:
        """Writes a new file; ``mode`` ``None``: what the umask leaves."""
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
        """Writes a file with the content of one that was written before; of a link, the same link."""
        if source in self._links and source != parts:
            self.link(parts, self._links[source])
        elif source in self._files and source != parts:
            descriptor = os.open(source[-1], _OLD, dir_fd=self._open(source[:-1]))
            with open(descriptor, "rb", buffering=0) as file:
                self.file(parts, iter(lambda: file.read(_CHUNK), b""), mode)
        else:
            raise RefusedMember(f"a link to {b'/'.join(source)[:200]!r}, which did not come before it")

    def link(self, parts: Parts, target: bytes) -> None:
        """Has a symbolic link made at the end; one that may lead out is left out."""
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
        """The directory at ``parts``, made with its parents; stays open until another is."""
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
        except NotADirectoryError:  # a file or, with O_NOFOLLOW, a link
            os.unlink(name, dir_fd=here)
        self.budget.spend(0, 1)
        os.mkdir(name, 0o777, dir_fd=here)
        return os.open(name, _DIRECTORY, dir_fd=here)


def stays_inside(target: bytes, depth: int) -> bool:
    """Whether a link that lies ``depth`` directories deep leads nowhere outside, whatever else is there."""
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = next((number for number, part in enumerate(parts) if part != b".."), len(parts))
    return bool(target) and not target.startswith(b"/") and up <= depth and b".." not in parts[up:]
