"""Starts sandboxes on this node: scratch, staged images, bookkeeping for the janitor.

::

    SCRATCH/megaflow-<uid>/          0700; with a random ending where a stranger has taken that name
      cache/                         images and layers, shared read-only by every sandbox of the node (images/cache)
      owners/<pid>-<start>/s1/ …     one directory per sandbox of a process that lives (sandbox.py)

Scratch must be local: an overlay's upper directory cannot lie on NFS.
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
from megaflow_hpc.environments.sandbox.janitor import sweep
from megaflow_hpc.environments.sandbox.limits.watchdog import Watchdog
from megaflow_hpc.environments.sandbox.network import Way, how_to_listen
from megaflow_hpc.environments.sandbox.rootfs.access import Access, ImageAccess
from megaflow_hpc.environments.sandbox.sandbox import OUTPUT_LIMIT, ApptainerSandbox
from megaflow_hpc.environments.sandbox.scratch import default_scratch, file_system, kind_of, workplace
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.sandbox.templates import Templates
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import find_apptainer, unshare
from megaflow_hpc.host.private import private_directory
from megaflow_hpc.host.process import Identity


class ApptainerProvider:
    """The sandboxes of one process on one node. Everything it started ends with :meth:`close`, or with the process.

    Args:
        scratch: local directory for writable layers; default :func:`default_scratch`.
        cache: where images are unpacked, shared by all processes of the node; default ``SCRATCH/cache``.
        start_timeout_s: a container that is not ready by then has failed. Staging is not counted.
    """

    def __init__(
        self,
        scratch: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        *,
        start_timeout_s: float = 60.0,
        output_limit: int = OUTPUT_LIMIT,
    ) -> None:
        self.apptainer = find_apptainer()
        self.scratch = private_directory(Path(scratch).absolute() if scratch else default_scratch())
        self.cache = private_directory(Path(cache).absolute() if cache else self.scratch / "cache")
        self._start_timeout_s = start_timeout_s
        self._output_limit = output_limit
        identity = Identity.of(os.getpid())
        assert identity is not None
        self._own = private_directory(private_directory(self.scratch / "owners") / str(identity))
        self._sandboxes: set[ApptainerSandbox] = set()
        self.watchdog = Watchdog(str(self.scratch))
        self._number = 0
        self._gateway_by: Way | None = None
        self._kind = kind_of(file_system(self.scratch))
        cached = ImageCache(self.cache, self.apptainer)
        self.images = ImageAccess(cached, lambda: probe.cached(self.scratch, self.apptainer), self.scratch, self._kind)
        self._prefetcher = Prefetcher(cached, self.images.is_flat)
        self._templates = Templates(
            self._own, (self.scratch, self.cache), self.apptainer, self.scratch, start_timeout_s
        )
        self._closed = False
        sweep(self.scratch)

    async def __aenter__(self) -> ApptainerProvider:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(
        self, spec: SandboxSpec, snapshot: Snapshot | None = None, *, access: Access | None = None
    ) -> ApptainerSandbox:
        """Returns a running sandbox, to be used as an async context manager or ended with ``stop()``.

        Args:
            snapshot: files to start with, from :meth:`ApptainerSandbox.snapshot`; any number of sandboxes may.
            access: the hold on the image; default: the one that the cache gives.

        Raises:
            ConfigError: the spec itself is wrong.
            SandboxError: no container came up; names the image and Apptainer's own reason.
        """
        spec.check()
        if self._closed:
            raise SandboxError("the provider is closed")
        sandbox = await self._start(spec, snapshot, access)
        self._sandboxes.add(sandbox)
        if self._closed:
            await sandbox.stop()
            raise SandboxError("the provider was closed meanwhile")
        return sandbox

    async def _start(self, spec: SandboxSpec, snapshot: Snapshot | None, access: Access | None) -> ApptainerSandbox:
        if snapshot is not None and snapshot.image != spec.image:
            raise SandboxError(f"{snapshot.path}: a snapshot over {snapshot.image}, not over {spec.image}")
        access = access or self.images.ready(spec.image) or await self._acquire(spec.image)
        self._number += 1
        directory = self._own / f"s{os.getpid()}-{id(self) & 0xFFFFFF:x}-{self._number}"
        sandbox = ApptainerSandbox(
            spec,
            access,
            str(directory),
            self.apptainer,
            start_timeout_s=self._start_timeout_s,
            output_limit=self._output_limit,
            on_stop=self._sandboxes.discard,
            watchdog=self.watchdog,
            layer_in_memory=self._kind == "memory",
            templates=self._templates,
            interpreter=self._helper_python if spec.network == "gateway" and self._listens_by_helper() else None,
        )
        await sandbox.start(snapshot)
        return sandbox

    def _listens_by_helper(self) -> bool:
        """Whether a listener gets into private networks by a command of the sandbox (network.py)."""
        if self._gateway_by is None:
            self._gateway_by, _ = how_to_listen("" if unshare() or os.geteuid() == 0 else "there are none")
        return self._gateway_by == "helper"

    def _helper_python(self) -> Path:
        return helper_python.prepare(self.scratch)

    async def terminal(self, sandbox: ApptainerSandbox, env: Mapping[str, str]) -> Terminal:
        """Starts a shell on a terminal of its own in a sandbox; see :func:`~.commands.terminal.open_terminal`."""
        interpreter = await asyncio.to_thread(self._helper_python)
        return await open_terminal(sandbox.exec, await sandbox.control(), interpreter, env)

    def workplace(self) -> Path:
        """See :func:`workplace`."""
        return workplace(self.scratch, "w")

    async def stage(self, image: str) -> str:
        """Unpacks ``image`` into the node's cache if it is not there yet. Returns the path of its bottom tree.

        It stays until the cache needs room for other images.
        """
        access = await self._acquire(image)
        access.release()
        return access.rootfs

    async def _acquire(self, image: str) -> Access:
        acquiring = asyncio.ensure_future(asyncio.to_thread(self.images.acquire, image))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(lambda done: None if done.exception() else done.result().release())
            raise

    def prefetch(self, images: Sequence[str]) -> None:
        """Stages ``images`` in the background: those in use and those that come next, the soonest first.

        Replaces what was named before; returns at once. Errors are left to whoever starts a sandbox of the image.
        """
        if not self._closed:
            self._prefetcher.order(images)

    async def close(self) -> None:
        """Stops every sandbox that is left. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._prefetcher.close)
        await asyncio.gather(*(sandbox.stop() for sandbox in list(self._sandboxes)), return_exceptions=True)
        await self._templates.close()
        await asyncio.to_thread(self.watchdog.close)
        try:
            self._own.rmdir()
        except OSError:
            pass  # another provider of this process uses it, or a sandbox could not be removed: the janitor's
