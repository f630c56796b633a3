"""Fuzz the unpacking of archives from sandboxes and build contexts, and the readers of image files."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.dockerfile.context import Context, lay_out
from megaflow_hpc.environments.images.image_file import working_directory
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import Budget, RefusedMember, unpack_tar
from tests.fuzz.contract import Target, reader, scratch
from tests.support.archives import END, archive, hardlink, member, raw, symlink

ROOM_BYTES = 1 << 22
"""Limits the disk space of an unpacked archive beyond its own size. A sparse member holds no data."""


def _tar(form: int) -> bytes:
    members = [
        member("./", type=tarfile.DIRTYPE, mode=0o755),
        member("./dir", type=tarfile.DIRTYPE, mode=0o4755),
        member("./dir/file", b"content\n" * 10),
        symlink("./dir/link", "../dir/file"),
        hardlink("./hard", "./dir/file"),
        symlink("./out", "/etc/passwd"),
        symlink("./up", "../.."),
        member("./deep/" + "n" * 90 + "/" + "m" * 90 + "/é", b"x"),
        member("./pipe", type=tarfile.FIFOTYPE),
        symlink("./again", "again"),
    ]
    return archive(members, form)


def _sparse() -> bytes:
    """Make a GNU sparse member. Its header claims 1 GB."""
    head = member("sparse", type=tarfile.GNUTYPE_SPARSE, size=512)[0]
    held = raw(head, map=(386, b"%011o\0%011o\0" % (0, 512)), real=(483, b"%011o\0" % (1 << 30)))
    return held + b"x" * 512 + END


def seeds() -> list[bytes]:
    """Make archives in every form that Python writes, and two that are hostile already."""
    return [*map(_tar, (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)), _sparse(), bytes(1024)]


def with_checksums(data: bytes) -> bytes:
    """Correct the checksum of each header, as far as the blocks can be followed."""
    changed = bytearray(data)
    position = 0
    while position + 512 <= len(changed) and any(changed[position : position + 512]):
        head = changed[position : position + 512]
        head[148:156] = b"        "
        changed[position + 148 : position + 156] = b"%06o\0 " % sum(head)
        try:
            size = int(bytes(head[124:136]).strip(b"\0 ") or b"0", 8)
        except ValueError:
            break
        position += 512 + -(-size // 512) * 512
    return bytes(changed)


def _bytes_on_disk(folder: Path) -> int:
    total = 0
    for place, directories, files in os.walk(folder):
        for name in (*directories, *files):
            total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


@reader
def unpack(data: bytes) -> None:
    """Unpack an archive of a sandbox into one directory."""
    with scratch() as folder:
        (folder / "secret").write_text("untouched")
        target = folder / "in" / "target"
        with contextlib.suppress(RefusedMember):
            unpack_tar(io.BytesIO(with_checksums(data)), target, Budget(ROOM_BYTES // 2, 200))
        assert sorted(os.listdir(folder)) == ["in", "secret"]
        assert os.listdir(folder / "in") == ["target"]
        assert (folder / "secret").read_text() == "untouched"
        assert [path for path in _links(target) if not _inside(path, target)] == [], "links lead out"
        assert _bytes_on_disk(folder / "in") <= 64 * len(data) + ROOM_BYTES
        remove_tree(folder / "in")  # whatever its modes


def _links(target: Path) -> Iterator[str]:
    for place, directories, files in os.walk(target):
        yield from (path for name in (*directories, *files) if os.path.islink(path := os.path.join(place, name)))


def _inside(path: str, target: Path) -> bool:
    try:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(target))
    except OSError:
        return True


@reader
def add(data: bytes) -> None:
    """Unpack an archive of a build context by ``ADD``."""
    with scratch() as folder:
        (folder / "context").mkdir()
        (folder / "context" / "a.tar").write_bytes(data)
        (folder / "secret").write_text("untouched")
        unpacked = folder / "in"
        try:
            lay_out(Context(folder / "context"), ["a.tar"], unpacked, extract=True)
        finally:
            size = _bytes_on_disk(unpacked) if unpacked.exists() else 0
            remove_tree(unpacked)
        assert sorted(os.listdir(folder)) == ["context", "secret"]
        assert (folder / "secret").read_text() == "untouched"
        assert size <= 64 * len(data) + ROOM_BYTES


def _sif() -> bytes:
    """Make a SIF of one document and one file system, which is cut after its first block."""
    document = b'{"architecture": "amd64", "config": {"Env": ["A=b"], "WorkingDir": "/x", "User": "0"}}'
    header = struct.Struct("<32s10s3s3s16s8q")
    row = struct.Struct("<iBIIIqqqqqqq128s384s")
    rows = [(0x4006, len(document), b"oci-config", b""), (0x4004, 4096, b"rootfs", struct.pack("<ii", 1, 2))]
    start = header.size + 2 * row.size
    table = b""
    for number, (kind, size, name, extra) in enumerate(rows):
        table += row.pack(kind, 1, number + 1, 1, 0, start, size, size, 0, 0, 0, 0, name, extra)
        start += size
    head = header.pack(
        b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC", b"01", b"02", b"u" * 16, 0, 0, 0, 2, 128, 0, 0, 0
    )
    superblock = struct.pack("<IIIIIHHHHHHQQ", 0x73717368, 77, 0, 131072, 0, 1, 17, 0, 1, 4, 0, 0, 4096)
    return head + table + document + superblock.ljust(4096, b"\0")


@reader
def image(data: bytes) -> None:
    """Read the partitions and the configuration of a SIF."""
    with scratch() as folder:
        file = folder / "image.sif"
        file.write_bytes(data)
        with contextlib.suppress(SandboxError):
            sif.system_partition(file)
        working_directory(file)


def _packed() -> list[bytes]:
    plain = seeds()
    return [plain[1], gzip.compress(plain[2], mtime=0), gzip.compress(bytes(1 << 20), mtime=0)]


_WORDS = (
    b"../", b"././@LongLink", b"22 path=../../x\n", b"30 GNU.sparse.realsize=9999999\n", b"SCHILY.xattr.", b"\0" * 12,
    b"7" * 11,
)  # fmt: skip
TARGETS = {
    "unpack": Target(unpack, seeds, words=_WORDS),
    "add": Target(add, _packed, words=_WORDS),
    "sif": Target(image, lambda: [_sif()], words=(b"[" * 2000, b"SIF_MAGIC\0")),
}
