"""Starts sandboxes on this node from images in the node's cache. The janitor finds their directories by this layout:

::

    SCRATCH/megaflow-<uid>/          0700; with a random suffix if another user has taken that name
      cache/                         images and layers, shared read-only by all sandboxes of the node (images/cache)
      owners/<pid>-<start>/s1/ …     one directory per sandbox of a living process (directory.py)

Scratch must be local, because an overlay's upper directory cannot be on NFS.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from megaflow_hpc.environments.images.cache.cache import ImageCache, Prefetcher
from megaflow_hpc.environments.sandbox import helper_python, probe
from megaflow_hpc.environments.sandbox.commands.terminal import Terminal, open_terminal
from megaflow_hpc.environments.sandbox.directory import SandboxDirectory
from megaflow_hpc.environments.sandbox.limits.watchdog import Watchdog
from megaflow_hpc.environments.sandbox.network import how_to_listen
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs, RootfsFactory
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.scratch import default_scratch, file_system, kind_of, sweep
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.sandbox.templates import Templates
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import find_apptainer, unshare
from megaflow_hpc.host.private import private_directory
from megaflow_hpc.host.process import Identity


class ApptainerProvider:
    """Starts the sandboxes of one process on one node. All sandboxes end with :meth:`close`, or with this process.

    Args:
        scratch: Local directory for writable layers. Default: :func:`default_scratch`.
        cache: Directory of unpacked images, shared by all processes of the node. Default: ``SCRATCH/cache``.
    """

    def __init__(
        self,
        scratch: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self.apptainer = find_apptainer()
        self.scratch = private_directory(Path(scratch).absolute() if scratch else default_scratch())
        self.cache = private_directory(Path(cache).absolute() if cache else self.scratch / "cache")
        identity = Identity.of(os.getpid())
        assert identity is not None
        self._own = private_directory(private_directory(self.scratch / "owners") / str(identity))
        self._sandboxes: set[ApptainerSandbox] = set()
        self.watchdog = Watchdog(str(self.scratch))
        self._number = 0
        self._storage = kind_of(file_system(self.scratch))
        cache_of_node = ImageCache(self.cache, self.apptainer)
        self.images = RootfsFactory(
            cache_of_node, lambda: probe.cached(self.scratch, self.apptainer).overlay, self.scratch, self._storage
        )
        self._prefetcher = Prefetcher(cache_of_node, self.images.is_flat)
        self._templates = Templates(self._own, (self.scratch, self.cache), self.apptainer, self.scratch)
        self._closed = False
        sweep(self.scratch)

    async def __aenter__(self) -> ApptainerProvider:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(
        self, spec: SandboxSpec, snapshot: Snapshot | None = None, *, rootfs: Rootfs | None = None
    ) -> ApptainerSandbox:
        """Starts a sandbox. Use the result as an async context manager, or call its ``stop()``.

        Args:
            snapshot: Files to start with, from :meth:`ApptainerSandbox.snapshot`. Several sandboxes may share one.
            rootfs: The image's root file system. Default: taken from the node's cache.

        Raises:
            ConfigError: The spec is invalid.
            SandboxError: The container did not start.
        """
        spec.check()
        if self._closed:
            raise SandboxError("the provider is closed")
        sandbox = await self._start(spec, snapshot, rootfs)
        self._sandboxes.add(sandbox)
        if self._closed:
            await sandbox.stop()
            raise SandboxError("the provider was closed while the sandbox started")
        return sandbox

    async def _start(self, spec: SandboxSpec, snapshot: Snapshot | None, rootfs: Rootfs | None) -> ApptainerSandbox:
        if snapshot is not None and snapshot.image != spec.image:
            raise SandboxError(f"{snapshot.path}: a snapshot of a sandbox over {snapshot.image}, not over {spec.image}")
        rootfs = rootfs or self.images.ready(spec.image) or await self._acquire(spec.image)
        self._number += 1
        path = self._own / f"s{os.getpid()}-{id(self) & 0xFFFFFF:x}-{self._number}"
        directory = SandboxDirectory(str(path), rootfs, self.apptainer, self._templates)
        has_listener = spec.network == "gateway" or (spec.network == "none" and spec.services is not None)
        sandbox = ApptainerSandbox(
            spec,
            directory,
            self.watchdog,
            on_stop=self._sandboxes.discard,
            layer_in_memory=self._storage == "memory",
            interpreter=self._helper_python if has_listener and self._listens_by_helper() else None,
        )
        await sandbox.start(snapshot)
        return sandbox

    def _listens_by_helper(self) -> bool:
        """Returns whether a command of the sandbox must bind listening sockets (network.py)."""
        way, _ = how_to_listen("" if unshare() or os.geteuid() == 0 else "no user namespaces")
        return way == "helper"

    def _helper_python(self) -> Path:
        return helper_python.prepare(self.scratch)

    async def terminal(self, sandbox: ApptainerSandbox, env: Mapping[str, str]) -> Terminal:
        """Starts a shell on a pseudo-terminal in a sandbox. See :func:`~.commands.terminal.open_terminal`."""
        interpreter = await asyncio.to_thread(self._helper_python)
        return await open_terminal(sandbox.exec, await sandbox.control(), interpreter, env)

    async def stage(self, image: str) -> str:
        """Unpacks ``image`` into the node's cache if it is missing. Returns the directory of its lowest layer."""
        rootfs = await self._acquire(image)
        rootfs.release()
        return rootfs.base

    async def _acquire(self, image: str) -> Rootfs:
        acquiring = asyncio.ensure_future(asyncio.to_thread(self.images.acquire, image))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(lambda done: None if done.exception() else done.result().release())
            raise

    def prefetch(self, images: Sequence[str]) -> None:
        """Unpacks ``images`` in the background, in this order. Replaces earlier requests and returns immediately.

        If an image cannot be unpacked, starting a sandbox from it reports the error.
        """
        if not self._closed:
            self._prefetcher.order(images)

    async def close(self) -> None:
        """Stops all running sandboxes and refuses new ones. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._prefetcher.close)
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes)), return_exceptions=True)
        await self._templates.close()
        await asyncio.to_thread(self.watchdog.close)
        try:
            self._own.rmdir()
        except OSError:
            pass  # another provider of this process uses it, or the janitor must remove a sandbox
