"""Archives that a sandbox hands out, a task brings or a registry sends: unpacked, whatever is in them."""

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
from megaflow_hpc.environments.images.image_config import working_directory
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import RefusedMember
from megaflow_hpc.host.unpack import Budget, unpack_tar
from tests.security.fuzz.target import Broken, Feed, Target
from tests.support.archives import END, archive, hardlink, member, raw, symlink

ROOM = 1 << 22
"""Bytes on disk that an archive may become beside those it holds; of sparse members nothing is held."""


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
    """A GNU sparse member, of 1 GB by its header."""
    head = member("sparse", type=tarfile.GNUTYPE_SPARSE, size=512)[0]
    held = raw(head, map=(386, b"%011o\0%011o\0" % (0, 512)), real=(483, b"%011o\0" % (1 << 30)))
    return held + b"x" * 512 + END


def seeds() -> list[bytes]:
    """Archives in every form that Python writes, and those that are hostile by themselves."""
    return [*map(_tar, (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)), _sparse(), bytes(1024)]


def with_checksums(data: bytes) -> bytes:
    """The archive with each header's checksum made right, as far as its blocks can be followed."""
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


def _on_disk(folder: Path) -> int:
    total = 0
    for place, directories, files in os.walk(folder):
        for name in (*directories, *files):
            total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


@contextlib.contextmanager
def _unpacked(folder: Path) -> Iterator[Feed]:
    (folder / "secret").write_text("untouched")

    def feed(data: bytes) -> None:
        target = folder / "in" / "target"
        try:
            with contextlib.suppress(RefusedMember):
                unpack_tar(io.BytesIO(with_checksums(data)), target, Budget(ROOM // 2, 200))
        finally:
            size = _on_disk(folder / "in")
            escaped = sorted(os.listdir(folder)), sorted(os.listdir(folder / "in")), (folder / "secret").read_text()
            leaving = [path for path in _links(target) if not _inside(path, target)]
            remove_tree(folder / "in")
        if escaped != (["in", "secret"], ["target"], "untouched"):
            raise Broken("wrote beside the target", escaped)
        if leaving:
            raise Broken("a link that leads out", leaving)
        if size > 64 * len(data) + ROOM:
            raise Broken("too much on disk", f"{size} bytes of {len(data)}")

    yield feed


def _links(target: Path) -> Iterator[str]:
    for place, directories, files in os.walk(target):
        yield from (path for name in (*directories, *files) if os.path.islink(path := os.path.join(place, name)))


def _inside(path: str, target: Path) -> bool:
    try:
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(target))
    except OSError:
        return True


@contextlib.contextmanager
def _added(folder: Path) -> Iterator[Feed]:
    """``ADD`` of an archive in a build context."""
    (folder / "context").mkdir()
    (folder / "secret").write_text("untouched")

    def feed(data: bytes) -> None:
        (folder / "context" / "a.tar").write_bytes(data)
        try:
            lay_out(Context(folder / "context"), ["a.tar"], folder / "in", extract=True)
        finally:
            size = _on_disk(folder / "in") if (folder / "in").exists() else 0
            remove_tree(folder / "in")
        if sorted(os.listdir(folder)) != ["context", "secret"] or (folder / "secret").read_text() != "untouched":
            raise Broken("wrote beside the target")
        if size > 64 * len(data) + ROOM:
            raise Broken("too much on disk", f"{size} bytes of {len(data)}")

    yield feed


def _sif() -> bytes:
    """A SIF of one document and one file system, of which only the first block is there."""
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


@contextlib.contextmanager
def _image(folder: Path) -> Iterator[Feed]:
    file = folder / "image.sif"

    def feed(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(SandboxError):
            sif.system_partition(file)
        working_directory(file)

    yield feed


def targets() -> list[Target]:
    """Archives of a sandbox, of a build context, and image files."""
    packed = [seeds()[1], gzip.compress(seeds()[2], mtime=0), gzip.compress(bytes(1 << 20), mtime=0)]
    words = (
        b"../",
        b"././@LongLink",
        b"22 path=../../x\n",
        b"30 GNU.sparse.realsize=9999999\n",
        b"SCHILY.xattr.",
        b"\0" * 12,
        b"7" * 11,
    )
    return [
        Target("unpack", _unpacked, seeds, words=words),
        Target("add", _added, lambda: packed, words=words),
        Target("sif", _image, lambda: [_sif()], words=(b"[" * 2000, b"SIF_MAGIC\0")),
    ]
