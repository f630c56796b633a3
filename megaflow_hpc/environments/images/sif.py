"""Reads SIF files: metadata and sizes from the header, and the files of the image with ``unsquashfs``.

Supports version 1 of the SIF format and squashfs 4.0.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import SandboxError, SiteError
from megaflow_hpc.host.apptainer import clean_environment
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.files import open_directories, remove_tree

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<iBIIIqqqqqqq128s384s")
_PARTITION, _GENERIC_JSON = 0x4004, 0x4006
_SQUASHFS = 1
_PRIMARY_SYSTEM = 2
_SUPERBLOCK = struct.Struct("<IIIIIHHHHHHQQ")
_SQUASHFS_MAGIC = 0x73717368
_BLOCK = 4096

_MAX_OBJECTS = 256
_MAX_DOCUMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class _Object:
    """A SIF descriptor in use: data type, position of the data, and type-specific fields."""

    kind: int
    offset: int
    size: int
    name: str
    extra: bytes


@dataclass(frozen=True)
class SifPartition:
    """The squashfs partition with an image's files. Offset and size are in bytes."""

    offset: int
    size: int
    inodes: int


def system_partition(path: str | os.PathLike[str]) -> SifPartition:
    """Returns the SIF partition that contains the root file system.

    Raises:
        SandboxError: The file is not a SIF, is truncated or encrypted, or its file system is not squashfs.
    """
    try:
        with open(path, "rb") as file:
            return _system_partition(file.fileno(), str(path))
    except (OSError, struct.error) as error:
        reason = error if isinstance(error, OSError) else "it has no complete SIF header"
        raise SandboxError(f"{path}: cannot be read as an image ({reason}); build or pull it again") from error


def _system_partition(descriptor: int, name: str) -> SifPartition:
    total = os.fstat(descriptor).st_size
    for each in _objects(descriptor, name):
        filesystem, role = struct.unpack_from("<ii", each.extra)
        if each.kind != _PARTITION or role != _PRIMARY_SYSTEM:
            continue
        if filesystem != _SQUASHFS:
            raise SandboxError(f"{name}: its root file system is not squashfs; build it without --encrypt")
        end = each.offset + each.size
        if end > total:
            raise SandboxError(
                f"{name}: {total} bytes, but its header requires {end}: it was cut short; build or pull it again"
            )
        superblock = _SUPERBLOCK.unpack(os.pread(descriptor, _SUPERBLOCK.size, each.offset))
        if superblock[0] != _SQUASHFS_MAGIC:
            raise SandboxError(
                f"{name}: no squashfs at byte {each.offset}; the file is damaged, build or pull it again"
            )
        return SifPartition(each.offset, each.size, superblock[1])
    raise SandboxError(f"{name}: a SIF without a root file system; it holds data, not an image")


def documents(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the JSON documents that Apptainer stores in a SIF, by name.

    Raises:
        SandboxError: The file is not a SIF.
        OSError, ValueError, struct.error: The file cannot be read.
    """
    with open(path, "rb") as file:
        return {
            each.name: json.loads(os.pread(file.fileno(), each.size, each.offset))
            for each in _objects(file.fileno(), str(path))
            if each.kind == _GENERIC_JSON and each.size <= _MAX_DOCUMENT_BYTES
        }


def _objects(descriptor: int, name: str) -> Iterator[_Object]:
    header = _HEADER.unpack(os.pread(descriptor, _HEADER.size, 0))
    if header[1].rstrip(b"\0") != b"SIF_MAGIC":
        raise SandboxError(f"{name}: not a SIF file; expected one that apptainer build or pull made")
    count, start = header[8], header[9]
    table = os.pread(descriptor, _DESCRIPTOR.size * min(max(count, 0), _MAX_OBJECTS), start)
    for row in range(len(table) // _DESCRIPTOR.size):
        fields = _DESCRIPTOR.unpack_from(table, row * _DESCRIPTOR.size)
        is_used = fields[1]
        if is_used:
            title = fields[12].split(b"\0")[0].decode("utf-8", "replace")
            yield _Object(fields[0], fields[5], fields[6], title, fields[13])


def run_unsquashfs(
    partition: SifPartition, arguments: Sequence[str], prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[bytes]:
    """Runs ``unsquashfs`` on the root file system of a SIF. The kernel kills the program if the calling thread exits.

    Args:
        arguments: Additional arguments: options, then the SIF, then file names.
        prefix: An argv prefix that enters a namespace.

    Raises:
        SiteError: ``unsquashfs`` is missing.
    """
    program = shutil.which("unsquashfs")
    if program is None:
        raise SiteError("unsquashfs: not on PATH, but needed to read images; install squashfs-tools")
    return subprocess.run(
        [*prefix, *dies_with_parent(), program, "-o", str(partition.offset), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**clean_environment(), "LC_ALL": "C", "TZ": "UTC"},
        cwd="/",
        check=False,
    )


def unpacked_bytes(path: str | os.PathLike[str], partition: SifPartition) -> int:
    """Returns the size in bytes of an image's unpacked files. The size is an estimate if ``unsquashfs`` is missing or
    fails."""
    estimate = 3 * partition.size
    try:
        listed = run_unsquashfs(partition, ["-lln", os.path.abspath(path)])
    except SiteError:
        return estimate
    if listed.returncode:
        return estimate
    total = 0
    for line in listed.stdout.decode("utf-8", "replace").splitlines():
        fields = line.split(None, 3)  # mode, owner, size, rest; devices have major,minor in place of a size
        if len(fields) == 4 and fields[2].isdecimal():
            if fields[0].startswith("-"):  # File systems allocate whole blocks.
                total += -(-int(fields[2]) // _BLOCK) * _BLOCK
            elif fields[0].startswith("d"):
                total += _BLOCK
    return total


def unpack(path: Path, target: Path, partition: SifPartition) -> bool:
    """Unpacks an image's files into ``target``. The caller owns them and can write to every directory.

    Returns ``False`` and removes ``target`` if ``unsquashfs`` is missing or fails. Callers then use Apptainer, which
    bundles its own ``unsquashfs``.
    """
    options = ["-n", "-q", "-no-xattrs", "-processors", str(len(os.sched_getaffinity(0)))]
    try:
        done = run_unsquashfs(partition, [*options, "-d", str(target.absolute()), str(path.absolute())])
    except SiteError:
        return False
    if done.returncode:
        remove_tree(target)
        return False
    open_directories(str(target))
    return True
