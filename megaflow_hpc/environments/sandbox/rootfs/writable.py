"""The writable layer of one sandbox: its files on scratch, and how they meet the image's.

::

    LAYER/upper  LAYER/work   with an overlay: what the sandbox changed, and the kernel's workroom
    LAYER/root                without one: a copy of the image that is written to (copies.py)

Between two containers the host may change a layer. It does so on ``upper``, whatever kind of layer it is: a copy is
taken apart for that and laid out anew.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.environments.images.layers.merging import DELETED
from megaflow_hpc.environments.images.layers.view import LayerView
from megaflow_hpc.environments.sandbox import snapshot
from megaflow_hpc.environments.sandbox.rootfs import copies
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host import child
from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.files import remove_tree

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class LayerPaths:
    """Where a sandbox's files are on the host."""

    upper: Path
    """The overlay's upper directory: what the sandbox changed."""
    image: LayerView
    """The image below it."""


class WritableLayer:
    """A layer at ``path``, over the image that ``access`` holds."""

    def __init__(self, path: str, access: Access) -> None:
        self.path = path
        self._access = access
        self.occupied = 0
        """Bytes below ``path`` that are a copy of the image and not the sandbox's work."""

    def make(self) -> None:
        """Makes the layer's directory, unless it exists."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)

    async def ready(self) -> None:
        """Returns when a container may start on the layer; raises :class:`SandboxError` if the image cannot be
        copied."""
        if self._access.copies and not os.path.isdir(os.path.join(self.path, "root")):
            self.occupied = int(await self._take("lay_out") or 0)

    async def change(self, work: Callable[[LayerPaths], None]) -> None:
        """Lets the host change what the sandbox has written, while nothing runs."""
        if self._access.copies and os.path.isdir(os.path.join(self.path, "root")):
            await self._take("gather")
        await asyncio.to_thread(work, LayerPaths(Path(self.path, "upper"), self._access.image))

    async def take(self, target: Path) -> None:
        """Moves what the sandbox changed to ``target``, in the form of an overlay's upper directory, after the last
        container."""
        if self._access.copies:
            await self._take("gather")
        await asyncio.to_thread(os.rename, os.path.join(self.path, "upper"), target)

    def read(self, path: str, limit: int) -> tuple[bool, bytes | None]:
        """Reads a file as a container would see it, while nothing runs.

        Returns:
            Whether it can be told without one, and then the file's first ``limit`` bytes, or ``None`` if there is no
            regular file. It cannot where a link is in the way, or where the image has something at ``path``.
        """
        parts = [part for part in path.split("/") if part not in ("", ".")]
        top = os.path.join(self.path, "root" if self._access.copies else "upper")
        if not parts or ".." in parts or not os.path.isdir(top):
            return False, None
        place = os.open(top, _DIRECTORY)
        try:
            for part in parts[:-1]:
                below = os.open(part, _DIRECTORY, dir_fd=place)
                os.close(place)
                place = below
            file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        except FileNotFoundError:
            return self._access.copies or not leads(self._access.image, parts), None
        except OSError:  # a link, or what its maker may read and we may not
            return False, None
        finally:
            os.close(place)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return True, None
            with open(file, "rb", closefd=False) as content:
                return True, content.read(limit)
        finally:
            os.close(file)

    async def empty(self) -> None:
        """Empties the layer: it is as new."""
        old = f"{self.path}.old"
        os.rename(self.path, old)
        os.mkdir(self.path, 0o700)
        await asyncio.to_thread(remove_tree, old)

    # --- snapshots ----------------------------------------------------------------------------------------------

    def restore(self, kept: Snapshot) -> None:
        """Lays a snapshot into the layer; only before the first container."""
        self.make()
        snapshot.lay(kept, Path(self.path), whiteouts=not self._access.copies)

    async def snapshot(self, target: Path, image: str) -> Snapshot:
        """Copies the layer while nobody writes to it.

        Raises:
            SandboxError: there is something at ``target``, or the copy failed.
        """
        if not self._access.copies:
            return await asyncio.to_thread(snapshot.take, Path(self.path, "upper"), target, image)
        twin = WritableLayer(f"{self.path}.kept", self._access)
        twin.make()
        try:
            await asyncio.to_thread(snapshot.copy, Path(self.path, "root"), Path(twin.path, "root"))
            await twin._take("gather")
            return await asyncio.to_thread(snapshot.take, Path(twin.path, "upper"), target, image, DELETED)
        finally:
            await asyncio.to_thread(remove_tree, twin.path)

    async def _take(self, verb: str) -> str:
        """Runs :mod:`.copies`, whose reading and writing would hold up everything else in this process."""
        image = self._access.rootfs
        enter = self._access.namespace
        inside = (unshare() if os.geteuid() else ()) if enter is None else enter
        status, said, errors = await child.run([*inside, *child.argv_of(copies), verb, image, self.path])
        if status:
            why = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"status {status}"]
            raise SandboxError(
                f"{image}: cannot be copied for a sandbox at {self.path}: {why[0]}; every sandbox takes as much room "
                "on scratch as its image here (megaflow-hpc doctor)"
            )
        return said.decode().strip()


def leads(image: LayerView, parts: Sequence[str]) -> bool:
    """Whether a path leads, or a link in it may lead, to something in an image."""
    for depth in range(1, len(parts) + 1):
        found = image.entry("/".join(parts[:depth]))
        if found is None:
            return False
        if found.is_link:
            return True
    return True
