"""A sandbox's directory on scratch, and its containers, one at a time.

::

    DIRECTORY/
      layer/                    the writable layer (writable.py)
      control-N/                the N-th container's control directory (container.py)
      owner                     identity of the container's process on the host, for the janitor
      tmp/                      Apptainer's own TMPDIR
"""

from __future__ import annotations

import asyncio
import os

from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.limits.disk import BLOCK
from megaflow_hpc.environments.sandbox.limits.watchdog import SandboxWatch
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.environments.sandbox.rootfs import upperdir
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.environments.sandbox.rootfs.writable import WritableLayer
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.sandbox.templates import Templates
from megaflow_hpc.errors import LostError, SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, descendants, exiting

_RUNNER = ("/bin/sh", f"{CONTROL_DIR}/runner.sh", CONTROL_DIR)
_FIRST = (*_RUNNER, "first")
"""The runner where no variable of the runtime's is to be left behind."""


class NotCloned(SandboxError):
    """A clone did not start; Apptainer may still start the container."""


class SandboxDirectory:
    """The directory of one sandbox, with one image and at most one container.

    Args:
        access: the hold on the image; :meth:`remove` releases it.
        start_timeout_s: a container that is not ready by then has failed.
        templates: clones containers; ``None`` leaves every start to Apptainer.
    """

    def __init__(
        self,
        directory: str,
        access: Access,
        apptainer: str,
        start_timeout_s: float,
        templates: Templates | None = None,
    ) -> None:
        self.directory = directory
        self.access = access
        self.layer = WritableLayer(os.path.join(directory, "layer"), access)
        self.container: Container | None = None
        self.start_timeout_s = start_timeout_s
        self._apptainer = apptainer
        self._templates = templates
        self._containers = 0
        self._laid_out: dict[str, int] = {}
        """Directory of the host bound into the sandbox → bytes that the host wrote there before the start."""

    def make(self) -> None:
        """Makes the directory; raises :class:`SandboxError` if scratch refuses it."""
        try:
            for name in ("", "tmp", "layer"):
                os.mkdir(os.path.join(self.directory, name), 0o700)
        except OSError as error:
            raise SandboxError(
                f"{error.filename}: cannot be made ({error.strerror}); see that scratch is not full"
            ) from error

    async def start(self, spec: SandboxSpec, watch: SandboxWatch) -> Container:
        """Starts a container on the layer as it is. Apptainer starts it if it cannot be cloned.

        Raises:
            SandboxError: with Apptainer's last line if it does not come up.
        """
        if self._templates is not None:
            pristine = self._is_new
            try:
                return await self._start(spec, watch, self._templates)
            except NotCloned as error:
                self._templates.refuse(self.access, error, layer=not pristine)
        return await self._start(spec, watch, None)

    @property
    def _is_new(self) -> bool:
        """True if no container has run on the layer and it holds no snapshot."""
        return not os.path.lexists(os.path.join(self.layer.path, "upper"))

    async def _start(self, spec: SandboxSpec, watch: SandboxWatch, templates: Templates | None) -> Container:
        control = os.path.join(self.directory, f"control-{self._containers}")
        self._containers += 1

        def started(identity: Identity) -> None:
            with open(os.path.join(self.directory, "owner"), "w") as file:
                file.write(f"{identity}\n")
            watch.adopt(identity)

        container = Container(control, on_started=started)
        cloned = environment = None
        try:
            await self.layer.ready()
            if new := [own for own in self._own_binds(spec) if own not in self._laid_out]:
                self._laid_out |= await asyncio.to_thread(lambda: {own: _size(own) for own in new})
            self.measured_by(watch, spec)
            container.prepare(spec.env, spec.as_root, spec.workdir, self.access.settings)
            pristine = self._is_new
            line = self.access.command_line(
                self._apptainer,
                spec,
                layer=self.layer.path,
                control=control,
                command=_RUNNER,
            )
            if templates is not None:
                if pristine:
                    environment = templates.expect_environment(self.access, spec, line.mounted)
                if environment is None:
                    cloned = await templates.find(self.access, spec, line.mounted, control, _FIRST)
            temporary = os.path.join(self.directory, "tmp")
            await container.start(
                line.argv, temporary=temporary, timeout_s=self.start_timeout_s, prefix=line.prefix, cloned=cloned
            )
            self.container = container
            if templates is not None and environment is not None:
                templates.read_environment(self.access, environment, container.init)
            if container.init is not None:
                watch.attach(container.init)
            container.commands.prepare()
        except SandboxError as error:
            kind = NotCloned if cloned is not None else SandboxError
            raise kind(f"{spec.image}: {error}") from error
        except OSError as error:
            raise SandboxError(
                f"{spec.image}: the files of a sandbox cannot be made ({error}): see that scratch at {self.directory} "
                "is not full, and that this process may open more files (ulimit -n)"
            ) from error
        finally:
            if templates is not None and environment is not None and not environment.done():
                templates.read_environment(self.access, environment, None)
        return container

    def _own_binds(self, spec: SandboxSpec) -> list[str]:
        """Returns directories in this one that the sandbox may write, besides its layer (a verifier's logs)."""
        parts = [bind.split(":") for bind in spec.binds]
        return [part[0] for part in parts if part[0].startswith(f"{self.directory}/") and part[2:] != ["ro"]]

    def measured_by(self, watch: SandboxWatch, spec: SandboxSpec) -> None:
        """Tells the watch which directories ``disk_mb`` bounds, and how many bytes the sandbox did not write."""
        own = self._own_binds(spec)
        watch.directories = [self.layer.path, *own]
        watch.occupied = self.layer.occupied + sum(self._laid_out.get(directory, 0) for directory in own)

    async def start_again(self, spec: SandboxSpec, watch: SandboxWatch) -> Container:
        """Starts a container. If it does not start on the current layer, restores the image's files and tries again.

        Raises:
            LostError: the second start failed too.
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
        """Ends the container with all its processes; the layer stays."""
        container, self.container = self.container, None
        if container is not None:
            watch.detach()
            await container.kill()
            remove_tree(container.control, ignore_errors=True)

    async def remove(self) -> None:
        """Ends the container and removes everything."""
        container, self.container = self.container, None
        try:
            if container is not None:
                await container.kill()
            await asyncio.to_thread(remove_tree, self.directory)
        finally:
            self.access.release()

    @property
    def busy(self) -> bool:
        """Whether a process that is not the runner's runs in the container."""
        init = self.container.init if self.container and self.container.alive else None
        return init is not None and any(not is_runner(pid) and not exiting(pid) for pid in descendants(init.pid))


def _size(directory: str) -> int:
    """Returns the bytes of a directory that only the host has written; a file counts as one block at least."""
    total = 0
    for home, directories, files in os.walk(directory):
        total += sum(max(BLOCK, os.lstat(os.path.join(home, name)).st_blocks * 512) for name in (*directories, *files))
    return total
