"""What a SIF file says about itself, read from its first kilobytes: no process is started, nothing is mounted.

The header and its table of descriptors are those of the SIF format, version 1; the superblock is that of squashfs 4.0.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.files import open_directories, remove_tree

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<iBIIIqqqqqqq128s384s")
_PARTITION, _GENERIC_JSON = 0x4004, 0x4006
_SQUASHFS = 1
_PRIMARY_SYSTEM = 2
_SUPERBLOCK = struct.Struct("<IIIIIHHHHHHQQ")
_SQUASHFS_MAGIC = 0x73717368


_MAX_OBJECTS = 256
_MAX_DOCUMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class _Object:
    """One used row of a SIF's table: a type, where its bytes lie, and what its type adds."""

    kind: int
    offset: int
    size: int
    name: str
    extra: bytes


@dataclass(frozen=True)
class SifPartition:
    """The squashfs that holds an image's files. Sizes in bytes."""

    offset: int
    size: int
    inodes: int


def system_partition(path: str | os.PathLike[str]) -> SifPartition:
    """Returns where in a SIF its root file system lies.

    Raises:
        SandboxError: not a SIF, cut short, encrypted, or not of squashfs.
    """
    try:
        with open(path, "rb") as file:
            return _read(file.fileno(), str(path))
    except (OSError, struct.error) as error:
        raise SandboxError(f"{path}: cannot be read as an image ({error}); build or pull it again") from error


def _read(descriptor: int, name: str) -> SifPartition:
    total = os.fstat(descriptor).st_size
    for found in _objects(descriptor, name):
        filesystem, role = struct.unpack_from("<ii", found.extra)
        if found.kind != _PARTITION or role != _PRIMARY_SYSTEM:
            continue
        if filesystem != _SQUASHFS:
            raise SandboxError(f"{name}: its root file system is not squashfs; build it without --encrypt")
        end = found.offset + found.size
        if end > total:
            raise SandboxError(f"{name}: {total} bytes, but its header speaks of {end}: it was cut short")
        block = _SUPERBLOCK.unpack(os.pread(descriptor, _SUPERBLOCK.size, found.offset))
        if block[0] != _SQUASHFS_MAGIC:
            raise SandboxError(
                f"{name}: no squashfs at byte {found.offset}; the file is damaged, build or pull it again"
            )
        return SifPartition(found.offset, found.size, block[1])
    raise SandboxError(f"{name}: a SIF without a root file system; it holds data, not an image")


def documents(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the JSON documents that Apptainer stores in a SIF beside the file system, by name.

    Raises:
        SandboxError: not a SIF.
        OSError, ValueError, struct.error: it cannot be read.
    """
    with open(path, "rb") as file:
        return {
            found.name: json.loads(os.pread(file.fileno(), found.size, found.offset))
            for found in _objects(file.fileno(), str(path))
            if found.kind == _GENERIC_JSON and found.size <= _MAX_DOCUMENT_BYTES
        }


def _objects(descriptor: int, name: str) -> Iterator[_Object]:
    fields = _HEADER.unpack(os.pread(descriptor, _HEADER.size, 0))
    if fields[1].rstrip(b"\0") != b"SIF_MAGIC":
        raise SandboxError(f"{name}: not a SIF file; expected one that apptainer build or pull made")
    count, start = fields[8], fields[9]
    table = os.pread(descriptor, _DESCRIPTOR.size * min(max(count, 0), _MAX_OBJECTS), start)
    for row in range(len(table) // _DESCRIPTOR.size):
        entry = _DESCRIPTOR.unpack_from(table, row * _DESCRIPTOR.size)
        if entry[1]:
            title = entry[12].split(b"\0")[0].decode("utf-8", "replace")
            yield _Object(entry[0], entry[5], entry[6], title, entry[13])


def unpacked_bytes(path: str | os.PathLike[str], partition: SifPartition) -> int:
    """Returns the bytes of an image's files once unpacked; estimated where ``unsquashfs`` is missing."""
    program = shutil.which("unsquashfs")
    if program:
        done = subprocess.run(
            [program, "-o", str(partition.offset), "-lln", os.fspath(path)],
            capture_output=True,
            text=True,
            errors="replace",
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
            check=False,
        )
        if done.returncode == 0:
            total = 0
            for line in done.stdout.splitlines():
                words = line.split(None, 3)  # mode, owner, size, the rest; a device has major,minor in place of a size
                if len(words) == 4 and words[0][0] in "-d" and words[2].isdecimal():
                    # A file system gives out blocks, and at least one for what is not empty.
                    total += -(-int(words[2]) // 4096) * 4096 if words[0][0] == "-" else 4096
            return total
    return 3 * partition.size


def unpack(path: Path, target: Path, partition: SifPartition) -> bool:
    """Unpacks an image's files below ``target``, owned by the caller, every directory writable by them.

    Returns ``False``, and leaves nothing, where ``unsquashfs`` is missing or skipped something: Apptainer, which brings
    its own, has to do it then. The program ends with the thread that started it.
    """
    program = shutil.which("unsquashfs")
    if program is None:
        return False
    argv = [*dies_with_parent(), program, "-n", "-q", "-no-xattrs", "-processors", str(len(os.sched_getaffinity(0)))]
    done = subprocess.run(
        [*argv, "-o", str(partition.offset), "-d", str(target), str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", "")},
        check=False,
    )
    if done.returncode:
        remove_tree(target)
        return False
    open_directories(str(target))
    return True
