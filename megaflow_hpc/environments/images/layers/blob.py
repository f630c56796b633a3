"""Reads and writes layer blobs, computing their digests in the same pass.

Deletions are stored as whiteouts, as in the OCI image specification. A file ``.wh.NAME`` hides NAME in the layers
below. A file ``.wh..wh..opq`` hides the contents of its directory in the layers below.

The packed files are untrusted, because build steps may have written them. The packer opens them relative to open
directories and does not follow links.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from megaflow_hpc.environments.images.layers.merging import DELETED, OPAQUE_MARK, has_opaque_attribute
from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host.tar import MAX_DEPTH, RefusedMember, TarReader

try:
    from isal import isal_zlib
except ImportError:  # There is no wheel for this architecture, or the program runs with minimal imports.
    inflater: Callable[..., Any] = zlib.decompressobj
    deflater: Callable[[], Any] = lambda: zlib.compressobj(1, zlib.DEFLATED, 31)  # noqa: E731
else:
    inflater = isal_zlib.decompressobj
    deflater = lambda: isal_zlib.compressobj(1, zlib.DEFLATED, 31)  # noqa: E731

BLOCK = 4096
"""Assumed block size in bytes. File systems allocate whole blocks, at least one for a non-empty file."""
MAX_LAYER_BYTES = 1 << 40
"""Maximum total size of a layer's files, and maximum size of its blob, in bytes."""
MAX_ENTRIES = 20_000_000

_CHUNK = 1 << 18
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class LayerFacts:
    """Digest and sizes of a layer. ``bytes`` is the size of its blob. ``unpacked_bytes`` and ``inodes`` are the sizes
    of its files."""

    digest: str
    """Hexadecimal SHA-256 of the blob."""
    bytes: int
    unpacked_bytes: int
    inodes: int


class LayerStream(io.RawIOBase):
    """Decompresses the archive of a blob that arrives in chunks, and computes the blob's digest."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._digest = hashlib.sha256()
        self._read_bytes = 0
        self._decompress: Callable[[bytes], bytes] | None = None
        self._decompressed = memoryview(b"")

    @classmethod
    def of_file(cls, file: BinaryIO) -> LayerStream:
        """Creates a stream from an open file."""
        return cls(iter(lambda: file.read(_CHUNK), b""))

    def members(self) -> TarReader:
        """Returns an iterator over the archive's members."""
        return TarReader(cast(BinaryIO, self))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads into ``buffer``. Returns the number of bytes read, 0 at the end."""
        while not self._decompressed:
            data = self._read_blob()
            if not data:
                return 0
            if self._decompress is None:
                self._decompress = _decompressor(data)
            try:
                self._decompressed = memoryview(self._decompress(data))
            except Exception as error:  # Each library raises its own exception class.
                raise RefusedMember(f"cannot be decompressed: {error}") from None
        view = memoryview(buffer).cast("B")
        size = min(len(view), len(self._decompressed))
        view[:size] = self._decompressed[:size]
        self._decompressed = self._decompressed[size:]
        return size

    def finish(self) -> tuple[str, int]:
        """Reads the rest of the blob. Returns its hexadecimal SHA-256 and its size in bytes."""
        while self._read_blob():
            pass
        return self._digest.hexdigest(), self._read_bytes

    def _read_blob(self) -> bytes:
        """Returns the next chunk of the blob, or no bytes at the end."""
        data = next(filter(None, self._pieces), b"")
        self._digest.update(data)
        self._read_bytes += len(data)
        if self._read_bytes > MAX_LAYER_BYTES:
            raise SandboxError(f"more than {MAX_LAYER_BYTES} bytes in one layer")
        return data


def _decompressor(first: bytes) -> Callable[[bytes], bytes]:
    """Returns the decompression function for a blob, chosen by its magic bytes."""
    if first.startswith(_GZIP):
        return _Gunzip()
    if first.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError:
            raise SiteError(
                "a layer is compressed by zstd, which this Python cannot read; pip install zstandard"
            ) from None
        zstd = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
        return cast(Callable[[bytes], bytes], zstd.decompress)
    return lambda data: data


class _Gunzip:
    """Decompresses concatenated gzip members as one stream."""

    def __init__(self) -> None:
        self._member: Any = inflater(wbits=31)

    def __call__(self, data: bytes) -> bytes:
        pieces = []
        while data:
            if self._member.eof:
                is_padding = not data.strip(b"\0")
                if is_padding:
                    break
                self._member = inflater(wbits=31)
            pieces.append(self._member.decompress(data))
            data = self._member.unused_data if self._member.eof else b""
        return b"".join(pieces)


class Tally:
    """Adds up the disk space of a layer's files. Raises :class:`RefusedMember` above the maximum."""

    def __init__(self) -> None:
        self.bytes = self.inodes = 0

    def add(self, size: int, *, is_directory: bool = False) -> None:
        """Counts one file of ``size`` bytes, or a directory."""
        self.bytes += BLOCK if is_directory else -(-size // BLOCK) * BLOCK
        self.inodes += 1
        if self.bytes > MAX_LAYER_BYTES or self.inodes > MAX_ENTRIES:
            raise RefusedMember("more files than a layer may have")


def measure(pieces: Iterable[bytes], digest: str) -> LayerFacts:
    """Reads a blob that arrives in chunks and returns its facts.

    Raises:
        SandboxError: The blob's digest is not ``digest``, or the blob is not a layer.
    """
    stream, tally = LayerStream(pieces), Tally()
    refusal: RefusedMember | None = None
    try:
        for member in stream.members():
            tally.add(member.size, is_directory=member.kind == "directory")
    except RefusedMember as error:
        refusal = error
    actual, size = stream.finish()
    if actual != digest:
        raise SandboxError(f"{digest}: the received blob has the digest {actual}; fetch it again")
    if refusal is not None:
        raise SandboxError(f"{digest}: not a layer of an image: {refusal}")
    return LayerFacts(digest, size, tally.bytes, tally.inodes)


OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        self._header(name, tarfile.DIRTYPE, attributes)

    def link(self, name: str, target: str, attributes: Attributes) -> None:
        """Adds a symbolic link."""
        self._header(name, tarfile.SYMTYPE, attributes, target=target)

    def file(self, name: str, descriptor: int, attributes: Attributes) -> None:
        """Adds an open regular file. If the same file was added before under another name, adds a hard link instead."""
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
                raise RefusedMember(f"{name}: was truncated while it was read")
            self._write(data)
            left -= len(data)
        self._write(bytes(-status.st_size % tarfile.BLOCKSIZE))

    def fifo(self, name: str, attributes: Attributes) -> None:
        self._header(name, tarfile.FIFOTYPE, attributes)

    def whiteout(self, name: str) -> None:
        """Adds a whiteout for ``name``, which hides the same name in lower layers."""
        parent, _, last = name.rpartition("/")
        hidden = DELETED + last
        self._write_header(f"{parent}/{hidden}" if parent else hidden, tarfile.REGTYPE, Attributes(0))

    def opaque(self, name: str) -> None:
        """Marks the directory ``name`` as opaque, so that it hides the same directory in lower layers."""
        self._write_header(f"{name}/{OPAQUE_MARK}", tarfile.REGTYPE, Attributes(0))

    def _header(self, name: str, kind: bytes, attributes: Attributes, size: int = 0, target: str = "") -> None:
        if name.rpartition("/")[2].startswith(DELETED):
            raise RefusedMember(f"/{name}: a name that begins with .wh. marks deletions in a layer; rename it")
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
    """Adds all contents of an overlay's upper directory: files and whiteouts.

    Skips sockets, and devices other than whiteouts.

    Args:
        directory: Descriptor of the directory.
        name: Name of the directory in the image. Empty for the root, whose attributes are not packed.
        marks: Whiteouts are empty files ``.wh.NAME`` (rootfs/copies.py) instead of 0/0 devices.

    Raises:
        RefusedMember: Directories are nested too deeply, or a file is named like a whiteout.
    """
    if name.count("/") >= MAX_DEPTH:
        raise RefusedMember(f"{name[:200]}: directories nested more than {MAX_DEPTH} deep")
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
            with opened(entry.name, OPEN_DIRECTORY, directory) as below:
                packer.directory(path, attributes)
                pack_tree(packer, below, path, marks=marks)
        elif stat.S_ISREG(status.st_mode):
            with opened(entry.name, OPEN_FILE, directory) as file:
                packer.file(path, file, attributes)
        elif stat.S_ISLNK(status.st_mode):
            packer.link(path, os.readlink(entry.name, dir_fd=directory), attributes)
        elif stat.S_ISFIFO(status.st_mode):
            packer.fifo(path, attributes)
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            packer.whiteout(path)


@contextmanager
def opened(path: str | os.PathLike[str], flags: int, directory: int | None = None) -> Iterator[int]:
    """Yields a descriptor of ``path``, which is relative to the open ``directory`` if given."""
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def scan(directory: int) -> list[os.DirEntry[str]]:
    """Returns the entries of an open directory, sorted by name."""
    with os.scandir(directory) as entries:
        return sorted(entries, key=lambda entry: entry.name)
