"""Unpacks a layer blob to a directory in the format of an overlay's upper directory.

A separate program (:func:`main`) unpacks large blobs and blobs whose files keep their owners. To preserve owners, it
runs as uid 0 in a user namespace that maps their ids. Archives are untrusted. :mod:`megaflow_hpc.host.tar` describes
how their paths are handled. Devices and sockets are skipped.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.layers.blob import (
    MAX_ENTRIES,
    MAX_LAYER_BYTES,
    LayerFacts,
    LayerStream,
)
from megaflow_hpc.environments.images.layers.merging import DELETED, OPAQUE_ATTRIBUTES, OPAQUE_MARK
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host import child
from megaflow_hpc.host.apptainer import clean_environment, last_line
from megaflow_hpc.host.tar import Budget, Member, Parts, RefusedMember, TarReader, TreeWriter, plain

_WHITEOUT, _OPAQUE = DELETED.encode(), OPAQUE_MARK.encode()
SMALL = 1 << 18
"""Blobs up to this size in bytes are unpacked in process, because that is faster than starting a program."""


def unpack(
    blob: str | os.PathLike[str],
    facts: LayerFacts,
    target: Path,
    namespace: Sequence[str] = (),
    *,
    marks: bool = False,
) -> None:
    """Unpacks a blob to the new directory ``target`` and verifies its digest.

    Args:
        namespace: An argv prefix that enters a user namespace in which files get the layer's owners. Without it, the
            caller owns all files.
        marks: Keep the blob's whiteouts as files, instead of converting them to overlay whiteouts.

    Raises:
        SandboxError: The blob is not a layer, or its digest differs.
    """
    if not namespace and facts.bytes <= SMALL:
        _unpack(os.fspath(blob), facts.digest, target, owners=False, marks=marks)
        return
    command = [*namespace, *child.argv_of(sys.modules[__name__]), os.fspath(blob), facts.digest, os.fspath(target)]
    done = subprocess.run(
        [*command, "owners" if namespace else "", "marks" if marks else ""],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=clean_environment(),
        cwd="/",
        check=False,
    )
    if done.returncode:
        raise SandboxError(last_line(done.stderr) or f"{blob}: cannot be unpacked")


def _unpack(blob: str, digest: str, target: Path, *, owners: bool, marks: bool) -> None:
    with open(blob, "rb", buffering=0) as file:
        stream = LayerStream.of_file(file)
        try:
            with LayerWriter(target, owners=owners, marks=marks) as layer:
                reader = stream.members()
                for member in reader:
                    layer.add(member, reader)
        except RefusedMember as error:
            raise SandboxError(f"{blob}: not a layer of an image: {error}") from error
        actual, _ = stream.finish()
    if actual != digest:
        raise SandboxError(
            f"{blob}: its content has the digest {actual}, not the one in its name: it was damaged or replaced; remove "
            "it, and build or pull its image again"
        )


class LayerWriter(TreeWriter):
    """Writes archive members below a directory, with their modes and times.

    Args:
        owners: Set the owners recorded in the archive. Otherwise the caller owns all files.
        marks: Keep whiteouts as empty files.
    """

    def __init__(self, root: str | os.PathLike[str], *, owners: bool, marks: bool = False) -> None:
        super().__init__(root, Budget(MAX_LAYER_BYTES, MAX_ENTRIES))
        self._owners = owners
        self._marks = marks
        self._directories: dict[Parts, Member] = {}
        self._written: set[Parts] = set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Sets the attributes of directories, unless an error occurred, and closes the descriptors."""
        if kind is None:
            for parts, member in sorted(self._directories.items(), reverse=True):
                descriptor = self._open(parts)
                if self._owners and parts:  # The caller must still be able to move the top directory.
                    _give(descriptor, member)
                # Without owners, the caller must be able to remove the tree. Sandboxes see root as the owner anyway.
                os.chmod(descriptor, member.mode | (0 if self._owners else stat.S_IRWXU))
                os.utime(descriptor, (member.mtime, member.mtime))
        super().__exit__(kind, error, trace)

    def add(self, member: Member, reader: TarReader) -> None:
        """Writes one archive member."""
        parts = plain(member.name)
        if member.kind == "directory":
            self.directory(parts)
            self._directories[parts] = member
            return
        if not parts:
            raise RefusedMember("a member without a name")
        name = parts[-1]
        if self._marks and name.startswith(_WHITEOUT):
            self._make(parts, lambda parent: os.mknod(name, stat.S_IFREG | 0o600, dir_fd=parent))
        elif name == _OPAQUE:
            descriptor = self._open(parts[:-1])
            if parts[:-1]:  # An opaque root hides nothing.
                _make_opaque(descriptor)
        elif name.startswith(_WHITEOUT):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in (b"", b".", b".."):
                raise RefusedMember(f"{name!r} hides nothing")
            self._make((*parts[:-1], hidden), lambda parent: os.mknod(hidden, stat.S_IFCHR, 0, dir_fd=parent))
        elif member.kind == "file":
            self.file(parts, reader.content(), member.mode & 0o777)
            self._finish(parts, member)
        elif member.kind == "hardlink":
            self._hard_link(parts, plain(member.target))
        elif member.kind == "symlink":
            self._make(parts, lambda parent: os.symlink(member.target, name, dir_fd=parent))
            self._finish(parts, member)
        elif member.kind == "fifo":
            self._make(parts, lambda parent: os.mkfifo(name, member.mode & 0o777, dir_fd=parent))
            self._finish(parts, member)

    def _make(self, parts: Parts, make: Callable[[int], None]) -> None:
        self.budget.spend(0, 1)
        parent = self._open(parts[:-1])
        try:
            make(parent)
        except FileExistsError:
            try:
                os.unlink(parts[-1], dir_fd=parent)
            except IsADirectoryError:
                raise RefusedMember(f"{parts[-1][:200]!r} where there is a directory") from None
            make(parent)
        self._written.add(parts)

    def _hard_link(self, parts: Parts, source: Parts) -> None:
        if source not in self._written or source == parts:
            raise RefusedMember(f"a link to {b'/'.join(source)[:200]!r}, which did not come before it")
        origin = os.dup(self._open(source[:-1]))

        def link(parent: int) -> None:
            os.link(source[-1], parts[-1], src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)

        try:
            self._make(parts, link)
        finally:
            os.close(origin)

    def _finish(self, parts: Parts, member: Member) -> None:
        name, parent = parts[-1], self._open(parts[:-1])
        self._written.add(parts)
        if self._owners:
            _give(name, member, dir_fd=parent, follow_symlinks=False)
        if member.kind != "symlink":
            os.chmod(name, member.mode, dir_fd=parent)  # after chown, which clears setuid
        os.utime(name, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)


def _give(file: bytes | int, member: Member, **where: Any) -> None:
    try:
        os.chown(file, member.uid, member.gid, **where)
    except OSError as error:
        # The namespace does not map these ids. The file then belongs to root in the sandbox.
        if error.errno != errno.EINVAL:
            raise


def _make_opaque(descriptor: int) -> None:
    os.setxattr(descriptor, OPAQUE_ATTRIBUTES[0], b"y")
    with suppress(OSError):
        os.setxattr(descriptor, OPAQUE_ATTRIBUTES[1], b"y")


def main() -> None:
    """Command-line entry point. Arguments: ``BLOB DIGEST TARGET owners|"" marks|""``."""
    blob, digest, target, owners, marks = sys.argv[1:]
    os.umask(0o022)
    try:
        _unpack(blob, digest, Path(target), owners=bool(owners), marks=bool(marks))
    except (OSError, SandboxError) as error:
        sys.exit(str(error))
