"""Manages a sandbox's directory on scratch, and its successive containers.

::

    DIRECTORY/
      layer/                    the writable layer (writable.py)
      control-N/                the N-th container's control directory (container.py)
      hosts                     /etc/hosts of a sandbox with services
      owner                     identity of the container's process on the host, for the janitor
      tmp/                      TMPDIR for Apptainer itself
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.limits.disk import BLOCK
from megaflow_hpc.environments.sandbox.limits.watchdog import SandboxWatch
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.environments.sandbox.rootfs import upperdir
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.rootfs.writable import WritableLayer
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.sandbox.templates import Templates
from megaflow_hpc.errors import LostError, SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, descendants, exiting

_RUNNER = ("/bin/sh", f"{CONTROL_DIR}/runner.sh", CONTROL_DIR)
_CLONED_RUNNER = (*_RUNNER, "first")
"""Command that starts a clone's runner. A clone has no Apptainer variables for the runner to remove."""


class NotCloned(SandboxError):
    """Raised if a clone did not start. Apptainer may still be able to start the container."""


class SandboxDirectory:
    """The directory of one sandbox, with one image and at most one container.

    Args:
        rootfs: Root file system of the image. :meth:`remove` releases it.
    """

    def __init__(self, directory: str, rootfs: Rootfs, apptainer: str, templates: Templates) -> None:
        self.directory = directory
        self.layer = WritableLayer(os.path.join(directory, "layer"), rootfs)
        self.container: Container | None = None
        self._rootfs = rootfs
        self._apptainer = apptainer
        self._templates = templates
        self._containers = 0
        self._host_bytes: dict[str, int] = {}
        """Maps each host directory that the sandbox sees to the bytes that the host wrote there before the start."""

    def make(self) -> None:
        """Creates the directory. Raises :class:`SandboxError` if that fails, for example because scratch is full."""
        try:
            for name in ("", "tmp", "layer"):
                os.mkdir(os.path.join(self.directory, name), 0o700)
        except OSError as error:
            raise SandboxError(
                f"{error.filename}: cannot be created ({error.strerror}); check that scratch is not full"
            ) from error

    async def start(self, spec: SandboxSpec, watch: SandboxWatch) -> Container:
        """Starts a container on the current writable layer: as a clone of the template if possible, otherwise through
        Apptainer.

        Raises:
            SandboxError: The container did not start. The message includes Apptainer's last line.
        """
        was_new = self._is_new
        try:
            return await self._start(spec, watch, may_clone=True)
        except NotCloned as error:
            if was_new:  # otherwise an agent's changes in the layer may be the cause
                self._templates.refuse(self._rootfs, error)
        return await self._start(spec, watch, may_clone=False)

    @property
    def _is_new(self) -> bool:
        """True if no container has run on the writable layer and no snapshot was restored into it."""
        return not os.path.lexists(os.path.join(self.layer.path, "upper"))

    async def _start(self, spec: SandboxSpec, watch: SandboxWatch, *, may_clone: bool) -> Container:
        control = os.path.join(self.directory, f"control-{self._containers}")
        self._containers += 1

        def started(identity: Identity) -> None:
            with open(os.path.join(self.directory, "owner"), "w") as file:
                file.write(f"{identity}\n")

        container = Container(control, started)
        clone = environment = None
        try:
            spec = self._with_hosts(spec)
            await self.layer.ready()
            await self._measure_binds(spec, watch)
            container.prepare(spec.env, spec.as_root, spec.workdir, self._rootfs.settings)
            was_new = self._is_new
            line = self._rootfs.command_line(
                self._apptainer, spec, layer=self.layer.path, control=control, command=_RUNNER
            )
            if may_clone and was_new:
                environment = self._templates.expect_environment(self._rootfs, spec, line.mounted)
            if may_clone and environment is None:
                clone = await self._templates.find(self._rootfs, spec, line.mounted, control, _CLONED_RUNNER)
            temporary = os.path.join(self.directory, "tmp")
            await container.start(line.argv, temporary=temporary, prefix=line.prefix, clone=clone)
            self.container = container
            if environment is not None:
                self._templates.read_environment(self._rootfs, environment, container.init)
            if container.init is not None:
                watch.attach(container.init)
            container.commands.prepare()
        except SandboxError as error:
            kind = NotCloned if clone is not None else SandboxError
            raise kind(f"{spec.image}: {error}") from error
        except OSError as error:
            raise SandboxError(
                f"{spec.image}: the files of a sandbox cannot be created ({error}): check that scratch at "
                f"{self.directory} is not full, and that this process may open more files (ulimit -n)"
            ) from error
        finally:
            if environment is not None and not environment.done():
                self._templates.read_environment(self._rootfs, environment, None)
        return container

    def _with_hosts(self, spec: SandboxSpec) -> SandboxSpec:
        """Returns the spec with an ``/etc/hosts`` that contains the names of its services."""
        if spec.services is None:
            return spec
        names = {"localhost": "127.0.0.1", **spec.services.hosts}
        lines = [f"{address} {name}\n" for name, address in names.items()]
        file = os.path.join(self.directory, "hosts")
        with open(file, "w", encoding="ascii") as text:
            text.write("".join(lines) + "::1 localhost ip6-localhost ip6-loopback\n")
        os.chmod(file, 0o644)
        return replace(spec, binds=(*spec.binds, f"{file}:/etc/hosts:ro"))

    async def _measure_binds(self, spec: SandboxSpec, watch: SandboxWatch) -> None:
        """Tells the watchdog which directories count towards ``disk_mb``.

        These are the layer and any writable binds from the sandbox's directory, such as a verifier's logs. Bytes that
        the sandbox did not write do not count.
        """
        writable = [bind.source for bind in spec.parsed_binds() if not bind.read_only]
        bound = [source for source in writable if source.startswith(f"{self.directory}/")]
        for path in bound:
            if path not in self._host_bytes:
                self._host_bytes[path] = await asyncio.to_thread(_size, path)
        watch.disk.directories = [self.layer.path, *bound]
        watch.disk.occupied = self.layer.occupied + sum(self._host_bytes[path] for path in bound)

    async def start_again(self, spec: SandboxSpec, watch: SandboxWatch) -> Container:
        """Starts a container. If it fails to start on the current writable layer, restores the image's files and tries
        again.

        Raises:
            LostError: The second attempt failed too.
        """
        try:
            return await self.start(spec, watch)
        except SandboxError:
            await self.drop(watch)
            try:
                await self.layer.change(lambda paths: upperdir.mend(paths.upper, paths.image, spec.workdir))
                return await self.start(spec, watch)
            except (SandboxError, OSError) as error:
                raise LostError(str(error)) from error

    async def drop(self, watch: SandboxWatch) -> None:
        """Kills the container and all its processes, and keeps the writable layer."""
        container, self.container = self.container, None
        if container is not None:
            watch.detach()
            await container.kill()
            remove_tree(container.control, ignore_errors=True)

    async def remove(self) -> None:
        """Kills the container and removes all files."""
        container, self.container = self.container, None
        try:
            if container is not None:
                await container.kill()
            await asyncio.to_thread(remove_tree, self.directory)
        finally:
            self._rootfs.release()

    @property
    def busy(self) -> bool:
        """True if any process other than the runner is running in the container."""
        init = self.container.init if self.container and self.container.alive else None
        return init is not None and any(not is_runner(pid) and not exiting(pid) for pid in descendants(init.pid))


def _size(directory: str) -> int:
    """Returns the disk usage in bytes of a directory that only the host has written to. A file counts as at least one
    block."""
    total = 0
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            total += max(BLOCK, os.lstat(os.path.join(parent, name)).st_blocks * 512)
    return total
