"""Writes layers, from single entries or from a whole overlay upper directory.

The packed files are untrusted, since build steps may have written them. They are read through descriptors, without
following links.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megaflow_hpc.environments.images.layers.blob import (
    LayerFacts,
    Tally,
    deflater,
)
from megaflow_hpc.environments.images.layers.merging import DELETED, OPAQUE_MARK, has_opaque_attribute
from megaflow_hpc.host.tar import MAX_DEPTH, RefusedMember

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Attributes:
    """Permission bits, numeric owner and mtime (Unix seconds) of an entry."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime: int = 0


def attributes_of(status: os.stat_result) -> Attributes:
    """Extracts the attributes from a ``stat`` result."""
    return Attributes(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, max(0, int(status.st_mtime)))


class Packer:
    """Context manager that writes one layer to ``target``. Call :meth:`facts` after leaving the context.

    Names are relative to the image's root. Equal entries produce equal bytes. Methods raise :class:`RefusedMember` for
    names that cannot be stored in a layer.
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
        """Returns the digest and sizes of the written layer."""
        return LayerFacts(self._digest.hexdigest(), self._bytes, self._tally.bytes, self._tally.inodes)

    # --- entries ------------------------------------------------------------------------------------------------

    def directory(self, name: str, attributes: Attributes) -> None:
        """Adds a directory."""
        self._header(name, tarfile.DIRTYPE, attributes)

    def link(self, name: str, target: str, attributes: Attributes) -> None:
        """Adds a symbolic link."""
        self._header(name, tarfile.SYMTYPE, attributes, target=target)

    def file(self, name: str, descriptor: int, attributes: Attributes) -> None:
        """Adds an open regular file, or a hard link if the same file was added before under another name."""
        status = os.fstat(descriptor)
        if status.st_nlink > 1:
            first = self._links.setdefault((status.st_dev, status.st_ino), name)
            if first != name:
                self._header(name, tarfile.LNKTYPE, attributes, target=first)
                return
        self._header(name, tarfile.REGTYPE, attributes, status.st_size)
        left = status.st_size
        while left:
            data = os.read(descriptor, min(left, _CHUNK))
            if not data:
                raise RefusedMember(f"{name}: became shorter while it was read")
            self._write(data)
            left -= len(data)
        self._write(bytes(-status.st_size % tarfile.BLOCKSIZE))

    def fifo(self, name: str, attributes: Attributes) -> None:
        """Adds a named pipe."""
        self._header(name, tarfile.FIFOTYPE, attributes)

    def whiteout(self, name: str) -> None:
        """Marks ``name`` as deleted from lower layers."""
        parent, _, last = name.rpartition("/")
        hidden = DELETED + last
        self._write_header(f"{parent}/{hidden}" if parent else hidden, tarfile.REGTYPE, Attributes(0))

    def opaque(self, name: str) -> None:
        """Marks the directory ``name`` as opaque, so that it hides the same directory in lower layers."""
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
    """Adds the whole content of an overlay's upper directory: its files and its deletion marks.

    Skips sockets, and devices other than deletion marks.

    Args:
        directory: Descriptor of the directory.
        name: Name of the directory in the image. Empty for the root, whose attributes are not packed.
        marks: Deletions are marked by empty files ``.wh.NAME`` (rootfs/copies.py) instead of 0/0 devices.

    Raises:
        RefusedMember: Directories are nested too deeply, or a file is named like a deletion mark.
    """
    if name.count("/") >= MAX_DEPTH:
        raise RefusedMember(f"{name[:200]}: more than {MAX_DEPTH} directories in one another")
    if name and has_opaque_attribute(directory):
        packer.opaque(name)
    for entry in scan(directory):
        status = entry.stat(follow_symlinks=False)
        path = f"{name}/{entry.name}" if name else entry.name
        attributes = attributes_of(status)
        if marks and entry.name.startswith(DELETED):
            hidden = entry.name.removeprefix(DELETED)
            packer.whiteout(f"{name}/{hidden}" if name else hidden)
        elif stat.S_ISDIR(status.st_mode):
            below = os.open(entry.name, OPEN_DIRECTORY, dir_fd=directory)
            try:
                packer.directory(path, attributes)
                pack_tree(packer, below, path, marks=marks)
            finally:
                os.close(below)
        elif stat.S_ISREG(status.st_mode):
            file = os.open(entry.name, OPEN_FILE, dir_fd=directory)
            try:
                packer.file(path, file, attributes)
            finally:
                os.close(file)
        elif stat.S_ISLNK(status.st_mode):
            packer.link(path, os.readlink(entry.name, dir_fd=directory), attributes)
        elif stat.S_ISFIFO(status.st_mode):
            packer.fifo(path, attributes)
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            packer.whiteout(path)


def scan(directory: int) -> list[os.DirEntry[str]]:
    """Returns the entries of an open directory, sorted by name."""
    with os.scandir(directory) as entries:
        return sorted(entries, key=lambda entry: entry.name)
