"""Archives that ``ADD`` unpacks: known by their content, bounded in what comes out of them.

The host's ``tar`` writes the files: it refuses names that lead out of the target and makes links that do last. It is
fed what was unpacked here, so that a bomb ends where the bound is, and its entries are counted as it names them.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import subprocess
import tarfile
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO

from megaflow_hpc.environments.images.dockerfile.bounds import DockerfileBounds
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.tar import RefusedMember, TarReader
from megaflow_hpc.host.unpack import plain

Known = dict[tuple[int, int], tuple[int, int, int]]
"""Device and inode of a file → its mode, uid and gid, as an archive has them."""

_CHUNK = 1 << 18
_BLOCK = tarfile.BLOCKSIZE
_TAR = 'ulimit -v 2000000; exec tar -x -v --no-same-owner -f - -C "$1"'  # a header may ask for any amount of memory
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)


def is_archive(path: Path) -> bool:
    """Whether ``ADD`` unpacks it: a tar archive, plain or compressed, known by its first block."""
    with open(path, "rb") as file:
        if file.read(4) == b"\x28\xb5\x2f\xfd":
            raise ConfigError(
                f"{path.name}: archives compressed with zstd are not unpacked here; use gzip, or COPY and RUN tar"
            )
    try:
        with _plain(path) as content:
            block = content.read(_BLOCK)
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, *_BROKEN):
        return False
    return True


def unpack(archive: Path, target: Path, bounds: DockerfileBounds) -> Known:
    """Unpacks an archive into a directory, the files owned by the caller; returns what it says of them.

    Raises:
        ConfigError: it cannot be unpacked, or holds more than ``bounds`` leaves.
    """
    failed: list[Exception] = []
    with subprocess.Popen(
        ["/bin/sh", "-c", _TAR, "sh", str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as tar:
        assert tar.stdin
        assert tar.stdout
        assert tar.stderr
        feeding = threading.Thread(target=_feed, args=(archive, tar, bounds, failed))
        feeding.start()
        said: list[bytes] = []
        listening = threading.Thread(target=lambda stream: said.append(_tail(stream)), args=(tar.stderr,))
        listening.start()
        try:
            while chunk := tar.stdout.read(_CHUNK):
                for _ in range(chunk.count(b"\n")):
                    bounds.count()
        except ConfigError as error:
            failed.append(error)
            tar.kill()
        feeding.join()
        listening.join()
    if failed:
        raise ConfigError(f"{archive.name}: {failed[0]}") from None
    if tar.returncode:
        lines = said[0].decode("utf-8", "replace").strip().splitlines() or ["tar said nothing"]
        raise ConfigError(f"{archive.name}: cannot be unpacked ({lines[0]}); ADD takes whole tar archives")
    return _known(archive, target)


def _known(archive: Path, target: Path) -> Known:
    """What the headers say of files that were unpacked: they are looked up only by what they are, not by a path."""
    top = os.lstat(target)
    found: Known = {(top.st_dev, top.st_ino): (0o755, 0, 0)}
    try:
        with _plain(archive) as content:
            for member in TarReader(content):  # type: ignore[arg-type]
                with suppress(OSError):
                    status = os.lstat(os.path.join(os.fsencode(target), *plain(member.name)))
                    found[status.st_dev, status.st_ino] = (member.mode & 0o7777, member.uid, member.gid)
    except RefusedMember as error:
        raise ConfigError(f"{archive.name}: {error}; write it without that, or RUN tar") from None
    return found


def _feed(archive: Path, tar: subprocess.Popen[bytes], bounds: DockerfileBounds, failed: list[Exception]) -> None:
    assert tar.stdin
    try:
        with tar.stdin, _plain(archive) as content:
            while chunk := content.read(_CHUNK):
                bounds.take(len(chunk))
                tar.stdin.write(chunk)
    except BrokenPipeError:
        pass  # it has read to the archive's end, or says why it cannot
    except (ConfigError, *_BROKEN) as error:
        failed.append(error)
        tar.kill()


def _tail(stream: IO[bytes]) -> bytes:
    """The beginning of what tar complains of; the rest is read, so that it goes on."""
    first = stream.read(4096)
    while stream.read(_CHUNK):
        pass
    return first


def _plain(path: Path) -> IO[bytes]:
    """What is in a file, whatever it is compressed with."""
    with open(path, "rb") as file:
        magic = file.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if magic.startswith(b"BZh"):
        return bz2.open(path, "rb")
    if magic.startswith((b"\xfd7zXZ", b"\x5d\x00\x00")):
        return lzma.open(path, "rb")
    return open(path, "rb")
