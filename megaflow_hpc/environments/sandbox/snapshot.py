"""Snapshots: copies of a sandbox's writable layer, from which new sandboxes can start.

::

    DIRECTORY/
      upper/          the sandbox's changes: its files and whiteouts

A whiteout is a character device 0/0, which Linux lets any user create. An opaque directory has an extended attribute
``user.overlay``. ``cp -a`` copies both. If possible it runs as uid 0 of a user namespace, so that it can read the
owner's files regardless of their modes. It shares blocks if the file system supports reflinks. In a sandbox without an
overlay, whiteouts are ``.wh.NAME`` files (copies.py). They become devices if an overlay uses the snapshot.

GNU tar packs a layer into one file for storage. It supports devices, symlinks, sparse files and extended attributes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.files import remove_tree

COPY_S = 600.0
_CHUNK = 1 << 20
_TAR = ("--xattrs", "--xattrs-include=*", "--numeric-owner")


@dataclass(frozen=True)
class Snapshot:
    """A stored layer. ``path`` is on the host and exists until :meth:`remove` is called."""

    path: str
    image: str
    marks: str = ""
    """Name prefix of files that are whiteouts. Empty if whiteouts are devices."""
    offset: int = -1
    """Byte offset of the packed layer in the file ``path``. -1 if ``path`` is a directory."""

    def remove(self) -> None:
        """Removes the snapshot's directory."""
        remove_tree(self.path)


def take(upper: Path, target: Path, image: str, marks: str = "") -> Snapshot:
    """Copies a layer that no process writes to. ``target`` appears atomically.

    Raises:
        SandboxError: ``target`` already exists, or the copy failed.
    """
    if os.path.lexists(target):
        raise SandboxError(f"{target}: exists already; name a new directory for a snapshot")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise SandboxError(f"{target}: no snapshot could be created there ({error})") from error
    try:
        if upper.is_dir():
            copy(upper, partial / "upper")
        else:
            (partial / "upper").mkdir()
        os.rename(partial, target)
    except OSError as error:
        raise SandboxError(f"{target}: no snapshot could be created there ({error})") from error
    finally:
        if partial.exists():
            remove_tree(partial)
    return Snapshot(str(target), image, marks)


def restore(snapshot: Snapshot, layer: Path, whiteouts: bool = True) -> None:
    """Copies a snapshot into the layer of a sandbox that has not started.

    Args:
        whiteouts: Convert whiteouts that are files to devices, which an overlay needs.
    """
    if snapshot.offset < 0:
        copy(Path(snapshot.path, "upper"), layer / "upper")
    else:
        _unpack(snapshot, layer / "upper")
    if whiteouts and snapshot.marks:
        _make_whiteouts(layer / "upper", snapshot.marks)


def pack(snapshot: Snapshot, write: Callable[[bytes], object], limit: int) -> None:
    """Packs the layer of a snapshot into an archive of at most ``limit`` bytes and passes it to ``write`` in chunks.

    Raises:
        SandboxError: The archive exceeds ``limit``, or the layer cannot be packed.
    """
    upper = Path(snapshot.path, "upper")
    words = _as_root(["tar", "--create", "--file=-", f"--directory={upper}", "--format=posix", "--sparse", *_TAR, "."])
    with tempfile.TemporaryFile() as errors, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors) as packing:
        assert packing.stdout is not None
        try:
            written = 0
            while chunk := packing.stdout.read(_CHUNK):
                written += len(chunk)
                if written > limit:
                    raise SandboxError(f"{upper}: the packed layer has more than {limit} bytes")
                write(chunk)
        except BaseException:
            packing.kill()
            raise
        if packing.wait():
            errors.seek(0)
            raise SandboxError(f"{upper}: cannot be packed: {errors.read(500).decode('utf-8', 'replace').strip()}")


def _unpack(snapshot: Snapshot, upper: Path) -> None:
    upper.mkdir()
    options = ["--same-permissions", "--no-same-owner", "--delay-directory-restore"]
    with open(snapshot.path, "rb", buffering=0) as file:
        file.seek(snapshot.offset)
        argv = ["tar", "--extract", "--file=-", f"--directory={upper}", *options, *_TAR]
        _run(argv, f"{snapshot.path}: the layer cannot be unpacked", file.fileno())


def _make_whiteouts(upper: Path, marks: str) -> None:
    program = """
import os, stat, sys
waiting, mark = [os.fsencode(sys.argv[1])], os.fsencode(sys.argv[2])
while waiting:
    directory = waiting.pop()
    try:
        entries = list(os.scandir(directory))
    except OSError:  # the path is too long; copies.py makes no marks there
        continue
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            waiting.append(entry.path)
        elif entry.name.startswith(mark) and entry.is_file(follow_symlinks=False):
            name = entry.name[len(mark):]
            if name not in (b"", b".", b"..") and not os.path.lexists(os.path.join(directory, name)):
                os.unlink(entry.path)
                os.mknod(os.path.join(directory, name), stat.S_IFCHR, 0)
"""
    _run([sys.executable, "-I", "-S", "-c", program, str(upper), marks], f"{upper}: deletions cannot be marked")


def copy(source: Path, target: Path) -> None:
    """Copies a tree with ``cp -a``, regardless of the files' modes. Raises :class:`SandboxError` on failure."""
    program = shutil.which("cp")
    if program is None:
        raise SandboxError("cp: not on PATH, but snapshots need it; install coreutils")
    _run([program, "-a", "--reflink=auto", "--", str(source), str(target)], f"{source}: cannot be copied to {target}")


def _run(argv: Sequence[str], failed: str, stdin: int = subprocess.DEVNULL) -> None:
    """Runs a program as uid 0 of a user namespace, if possible."""
    words = _as_root(argv)
    try:
        done = subprocess.run(words, stdin=stdin, capture_output=True, text=True, timeout=COPY_S, check=False)
    except subprocess.TimeoutExpired:
        raise SandboxError(f"{failed}: not finished within {COPY_S:g} s") from None
    except OSError as error:
        raise SandboxError(f"{failed}: {error}") from error
    if done.returncode:
        raise SandboxError(f"{failed}: {done.stderr.strip()[-500:]}")


def _as_root(argv: Sequence[str]) -> list[str]:
    return [*(unshare() if os.geteuid() else ()), *argv]
