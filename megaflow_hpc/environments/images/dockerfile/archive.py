"""Unpacks ``ADD`` archives, which are recognised by their content, and limits how much an instruction may copy.

Archives are untrusted. :class:`.unpacking.LayerWriter` writes them without following links.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from megaflow_hpc.environments.images.layers.unpacking import LayerWriter
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.tar import Member, Parts, RefusedMember, TarReader, plain

ArchivedAttributes = dict[tuple[int, int], tuple[int, int, int]]
"""Device and inode of a file → its mode, uid and gid as recorded in an archive."""

MAX_BYTES = 20 * 10**9
MAX_ENTRIES = 500_000
_DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)


class DockerfileBounds:
    """Remaining bytes and entries for one instruction. Raises :class:`ConfigError` when either is exhausted."""

    def __init__(self) -> None:
        self.bytes = MAX_BYTES
        self.entries = MAX_ENTRIES

    def take(self, size: int) -> None:
        """Counts ``size`` bytes."""
        self.bytes -= size
        if self.bytes < 0:
            raise ConfigError(f"more than {MAX_BYTES} bytes of the context in one instruction; copy less at once")

    def count(self) -> None:
        """Counts one file, link or directory."""
        self.entries -= 1
        if self.entries < 0:
            raise ConfigError(f"more than {MAX_ENTRIES} entries of the context in one instruction; copy less at once")


def is_archive(path: Path) -> bool:
    """Returns whether ``ADD`` unpacks a file, which it does for tar archives, plain or compressed."""
    with open(path, "rb") as file:
        if file.read(4) == b"\x28\xb5\x2f\xfd":
            raise ConfigError(
                f"{path.name}: archives compressed with zstd are not unpacked here; use gzip, or COPY and RUN tar"
            )
    try:
        with _decompressed(path) as content:
            block = content.read(tarfile.BLOCKSIZE)
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, *_DAMAGED):
        return False
    return True


def unpack(archive: Path, target: Path, bounds: DockerfileBounds) -> ArchivedAttributes:
    """Unpacks an archive into a directory, with files owned by the caller. Returns the attributes recorded in the
    archive.

    Raises:
        ConfigError: The archive cannot be unpacked, or exceeds ``bounds``.
    """
    try:
        members = _write(archive, target, bounds)
    except (RefusedMember, ConfigError, *_DAMAGED) as error:
        raise ConfigError(f"{archive.name}: cannot be unpacked: {error}; correct it, or COPY it and RUN tar") from None
    top = os.lstat(target)
    attributes: ArchivedAttributes = {(top.st_dev, top.st_ino): (0o755, 0, 0)}
    for parts, member in members.items():
        try:
            status = os.lstat(os.path.join(os.fsencode(target), *parts))
        except OSError:  # skipped, such as a device
            continue
        attributes[status.st_dev, status.st_ino] = (member.mode & 0o7777, member.uid, member.gid)
    return attributes


def _write(archive: Path, target: Path, bounds: DockerfileBounds) -> dict[Parts, Member]:
    members: dict[Parts, Member] = {}
    links: set[Parts] = set()
    with LayerWriter(target, owners=False, marks=True) as tree, _decompressed(archive) as content:
        reader = TarReader(content)
        for member in reader:
            bounds.count()
            bounds.take(member.size)
            parts = plain(member.name)
            for depth in range(1, len(parts)):
                if parts[:depth] in links:
                    raise RefusedMember(f"{member.name[:200]!r} is below a link of the archive")
            tree.add(member, reader)
            members[parts] = member
            if member.kind == "symlink":
                links.add(parts)
            else:
                links.discard(parts)
    return members


def _decompressed(path: Path) -> BinaryIO:
    """Opens a file for reading, decompressed according to its magic bytes."""
    with open(path, "rb") as file:
        magic = file.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if magic.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path, "rb"))
    if magic.startswith((b"\xfd7zXZ", b"\x5d\x00\x00")):
        return cast(BinaryIO, lzma.open(path, "rb"))
    return open(path, "rb")
