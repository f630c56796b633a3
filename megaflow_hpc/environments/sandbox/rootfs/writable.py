"""The writable layer of one sandbox, on scratch.

::

    LAYER/upper  LAYER/work   with an overlay: the sandbox's changes, and the kernel's working directory
    LAYER/root                without an overlay: a copy of the image that the sandbox writes to (copies.py)

Between two containers, the host may change a layer. It always edits ``upper``. If the sandbox is a copy, its changes
are moved to ``upper`` first, and the next container gets a new copy.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megaflow_hpc.environments.images.layers.merging import DELETED
from megaflow_hpc.environments.images.layers.view import LayerView
from megaflow_hpc.environments.sandbox import snapshot
from megaflow_hpc.environments.sandbox.rootfs import copies
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host import child
from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.files import remove_tree

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class LayerPaths:
    """Paths of a sandbox's files on the host."""

    upper: Path
    """The overlay's upper directory, which holds the sandbox's changes."""
    image: LayerView


class WritableLayer:
    """A sandbox's writable layer over its image.

    Args:
        path: Directory of the layer.
        rootfs: Root file system that contains the image.
    """

    def __init__(self, path: str, rootfs: Rootfs) -> None:
        self.path = path
        self._rootfs = rootfs
        self.occupied = 0
        """Bytes below ``path`` used by the copy of the image."""

    def make(self) -> None:
        """Creates the layer's directory if it is missing."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)

    async def ready(self) -> None:
        """Prepares the layer for a container. Raises :class:`SandboxError` if the image cannot be copied."""
        if self._rootfs.copies and not os.path.isdir(os.path.join(self.path, "root")):
            self.occupied = int(await self._run_copies("lay_out") or 0)

    async def change(self, work: Callable[[LayerPaths], None]) -> None:
        """Calls ``work`` to edit the sandbox's changes on the host. No container may be running."""
        if self._rootfs.copies and os.path.isdir(os.path.join(self.path, "root")):
            await self._run_copies("gather")
        await asyncio.to_thread(work, LayerPaths(Path(self.path, "upper"), self._rootfs.image))

    async def take(self, target: Path) -> None:
        """Moves the sandbox's changes to ``target``, in the form of an overlay's upper directory. No container may
        start afterwards."""
        if self._rootfs.copies:
            await self._run_copies("gather")
        await asyncio.to_thread(os.rename, os.path.join(self.path, "upper"), target)

    def read(self, path: str, limit: int) -> tuple[bool, bytes | None]:
        """Reads a file as a container would see it. No container may be running.

        Returns:
            A flag and the file's first ``limit`` bytes (``None`` if there is no regular file). The flag is ``False`` if
            the host cannot tell, because the path contains a symlink or may exist in the image.
        """
        parts = [part for part in path.split("/") if part not in ("", ".")]
        top = os.path.join(self.path, "root" if self._rootfs.copies else "upper")
        if not parts or ".." in parts or not os.path.isdir(top):
            return False, None
        try:
            directory = _open_below(top, parts[:-1])
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = os.open(parts[-1], flags, dir_fd=directory)
            finally:
                os.close(directory)
        except FileNotFoundError:
            return self._rootfs.copies or not _may_exist(self._rootfs.image, parts), None
        except OSError:  # a symlink, or a file that this user may not read
            return False, None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return True, None
            with open(file, "rb", closefd=False) as content:
                return True, content.read(limit)
        finally:
            os.close(file)

    async def empty(self) -> None:
        """Removes all files of the layer."""
        old = f"{self.path}.old"
        os.rename(self.path, old)
        os.mkdir(self.path, 0o700)
        await asyncio.to_thread(remove_tree, old)

    # --- snapshots ----------------------------------------------------------------------------------------------

    def restore(self, kept: Snapshot) -> None:
        """Copies a snapshot into the layer, before any container has started."""
        self.make()
        snapshot.restore(kept, Path(self.path), whiteouts=not self._rootfs.copies)

    async def snapshot(self, target: Path, image: str) -> Snapshot:
        """Copies the layer while no process writes to it.

        Raises:
            SandboxError: ``target`` already exists, or the copy failed.
        """
        if not self._rootfs.copies:
            return await asyncio.to_thread(snapshot.take, Path(self.path, "upper"), target, image)
        twin = WritableLayer(f"{self.path}.kept", self._rootfs)
        twin.make()
        try:
            await asyncio.to_thread(snapshot.copy, Path(self.path, "root"), Path(twin.path, "root"))
            await twin._run_copies("gather")
            return await asyncio.to_thread(snapshot.take, Path(twin.path, "upper"), target, image, DELETED)
        finally:
            await asyncio.to_thread(remove_tree, twin.path)

    async def _run_copies(self, verb: str) -> str:
        """Runs :mod:`.copies` in a separate process and returns its output."""
        image = self._rootfs.base
        enter = self._rootfs.namespace
        if enter is None:
            enter = unshare() if os.geteuid() else ()
        status, output, errors = await child.run([*enter, *child.argv_of(copies), verb, image, self.path])
        if status:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            reason = lines[-1] if lines else f"status {status}"
            raise SandboxError(
                f"{image}: cannot be copied for a sandbox at {self.path}: {reason}; every "
                "sandbox takes as much room on scratch as its image here (megaflow-hpc doctor)"
            )
        return output.decode().strip()


def has_nothing_at(paths: LayerPaths, path: str) -> bool:
    """Returns whether the absolute ``path`` is missing, or is an empty directory that only the layer has.

    Returns ``False`` if the path contains a symlink or a whiteout, or if it may exist in the image. No process may be
    running in the sandbox. Symlinks of the layer are not followed.
    """
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts or _may_exist(paths.image, parts):
        return False
    try:
        directory = _open_below(str(paths.upper), parts)
    except FileNotFoundError:
        return os.path.isdir(paths.upper)
    except OSError:
        return False
    try:
        return not os.listdir(directory)
    except OSError:
        return False
    finally:
        os.close(directory)


def _open_below(top: str, parts: Sequence[str]) -> int:
    """Opens a directory below ``top`` without following symlinks."""
    directory = os.open(top, _DIRECTORY)
    for part in parts:
        try:
            below = os.open(part, _DIRECTORY, dir_fd=directory)
        finally:
            os.close(directory)
        directory = below
    return directory


def _may_exist(image: LayerView, parts: Sequence[str]) -> bool:
    """Returns whether a path may exist in an image. A path with a symlink may exist, because its target is not
    checked."""
    for depth in range(1, len(parts) + 1):
        entry = image.entry("/".join(parts[:depth]))
        if entry is None:
            return False
        if entry.is_link:
            return True
    return True
