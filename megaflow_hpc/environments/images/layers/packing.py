"""Writes layers: an archive of entries that are named one by one, or of all that an overlay's upper directory holds.

What is packed may be a step's work. It is read through descriptors, and no link in it is followed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megaflow_hpc.environments.images.layers.blob import (
    LayerFacts,
    Tally,
    deflater,
)
from megaflow_hpc.environments.images.layers.merging import DELETED, OPAQUE_MARK, has_opaque_attribute
from megaflow_hpc.host.tar import RefusedMember
from megaflow_hpc.host.unpack import DEEPEST

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Attributes:
    """Of one entry: permission bits, numeric owner and time of change in seconds."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0


def attributes_of(found: os.stat_result) -> Attributes:
    """Returns those of a file's status."""
    return Attributes(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, max(0, int(found.st_mtime)))


class Packer:
    """Writes one layer to ``target``, as a context manager; :meth:`facts` are known after it.

    Names are relative to the image's root. The same entries give the same bytes. Methods raise
    :class:`RefusedMember` for a name that a layer cannot hold.
    """

    def __init__(self, target: Path) -> None:
        self._file = open(target, "xb")  # noqa: SIM115
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._deflater = deflater()
        self._tally = Tally()
        self._links: dict[tuple[int, int], str] = {}

    def __enter__(self) -> Packer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._write(bytes(2 * tarfile.BLOCKSIZE))
                self._put(self._deflater.flush())
                self._file.flush()
                os.fsync(self._file.fileno())

    def facts(self) -> LayerFacts:
        """Returns digest and sizes of what was written."""
        return LayerFacts(self._digest.hexdigest(), self._bytes, self._tally.bytes, self._tally.inodes)

    # --- entries ------------------------------------------------------------------------------------------------

    def directory(self, name: str, attributes: Attributes) -> None:
        """Adds a directory."""
        self._header(name, tarfile.DIRTYPE, attributes)

    def link(self, name: str, target: str, attributes: Attributes) -> None:
        """Adds a symbolic link."""
        self._header(name, tarfile.SYMTYPE, attributes, target=target)

    def file(self, name: str, descriptor: int, attributes: Attributes) -> None:
        """Adds what an open regular file holds; one that was added before by another name becomes a hard link."""
        found = os.fstat(descriptor)
        if found.st_nlink > 1:
            known = self._links.setdefault((found.st_dev, found.st_ino), name)
            if known != name:
                self._header(name, tarfile.LNKTYPE, attributes, target=known)
                return
        self._header(name, tarfile.REGTYPE, attributes, found.st_size)
        left = found.st_size
        while left:
            data = os.read(descriptor, min(left, _CHUNK))
            if not data:
                raise RefusedMember(f"{name}: became shorter while it was read")
            self._write(data)
            left -= len(data)
        self._write(bytes(-found.st_size % tarfile.BLOCKSIZE))

    def content(self, name: str, content: bytes, attributes: Attributes) -> None:
        """Adds a file."""
        self._header(name, tarfile.REGTYPE, attributes, len(content))
        self._write(content + bytes(-len(content) % tarfile.BLOCKSIZE))

    def fifo(self, name: str, attributes: Attributes) -> None:
        """Adds a named pipe."""
        self._header(name, tarfile.FIFOTYPE, attributes)

    def whiteout(self, name: str) -> None:
        """Says that what is below at ``name`` is gone."""
        parent, _, last = name.rpartition("/")
        hidden = DELETED + last
        self._write_header(f"{parent}/{hidden}" if parent else hidden, tarfile.REGTYPE, Attributes(0))

    def opaque(self, name: str) -> None:
        """Says that nothing of what is below in the directory ``name`` is seen."""
        self._write_header(f"{name}/{OPAQUE_MARK}", tarfile.REGTYPE, Attributes(0))

    def _header(self, name: str, kind: bytes, attributes: Attributes, size: int = 0, target: str = "") -> None:
        if name.rpartition("/")[2].startswith(DELETED):
            raise RefusedMember(
                f"/{name}: a name that begins with .wh. marks what is gone in a layer; call it something else"
            )
        self._write_header(name, kind, attributes, size, target)

    def _write_header(self, name: str, kind: bytes, attributes: Attributes, size: int = 0, target: str = "") -> None:
        self._tally.add(size, is_directory=kind == tarfile.DIRTYPE)
        info = tarfile.TarInfo(name)
        info.type, info.size, info.linkname = kind, size, target
        info.mode, info.uid, info.gid, info.mtime = attributes.mode, attributes.uid, attributes.gid, attributes.mtime
        self._write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))

    def _write(self, data: bytes) -> None:
        self._put(self._deflater.compress(data))

    def _put(self, packed: bytes) -> None:
        self._digest.update(packed)
        self._bytes += len(packed)
        self._file.write(packed)


def pack_tree(packer: Packer, directory: int, name: str = "", *, marks: bool = False) -> None:
    """Adds all that an overlay's upper directory holds: its files, and what it marks as deleted.

    Devices other than those marks, and sockets, are left out.

    Args:
        directory: its descriptor.
        name: of the directory in the image; empty for the root, whose own attributes are left to the image below.
        marks: deleted is what an empty file ``.wh.NAME`` stands for (rootfs/copies.py), not a device 0/0.

    Raises:
        Refused: nested deeper than anything that reads it could go, or a file with the name of a mark.
    """
    if name.count("/") >= DEEPEST:
        raise RefusedMember(f"{name[:200]}: more than {DEEPEST} directories in one another")
    if name and has_opaque_attribute(directory):
        packer.opaque(name)
    for entry in _entries(directory):
        found = entry.stat(follow_symlinks=False)
        path, attributes = f"{name}/{entry.name}" if name else entry.name, attributes_of(found)
        if marks and entry.name.startswith(DELETED):
            hidden = entry.name.removeprefix(DELETED)
            packer.whiteout(f"{name}/{hidden}" if name else hidden)
        elif stat.S_ISDIR(found.st_mode):
            below = os.open(entry.name, _DIRECTORY, dir_fd=directory)
            try:
                packer.directory(path, attributes)
                pack_tree(packer, below, path, marks=marks)
            finally:
                os.close(below)
        elif stat.S_ISREG(found.st_mode):
            file = os.open(entry.name, _FILE, dir_fd=directory)
            try:
                packer.file(path, file, attributes)
            finally:
                os.close(file)
        elif stat.S_ISLNK(found.st_mode):
            packer.link(path, os.readlink(entry.name, dir_fd=directory), attributes)
        elif stat.S_ISFIFO(found.st_mode):
            packer.fifo(path, attributes)
        elif stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
            packer.whiteout(path)


def _entries(directory: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)
