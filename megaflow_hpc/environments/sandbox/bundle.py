"""A sandbox's directory on scratch, and the containers that are started from it one after the other.

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
from megaflow_hpc.environments.sandbox.limits.watch import Watch
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.environments.sandbox.rootfs import upperdir
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.environments.sandbox.rootfs.writable import WritableLayer
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.sandbox.templates import Templates, way
from megaflow_hpc.errors import LostError, SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, descendants, exiting

_RUNNER = ("/bin/sh", f"{CONTROL_DIR}/runner.sh", CONTROL_DIR)
_FIRST = (*_RUNNER, "first")
"""The runner where no variable of the runtime's is to be left behind."""


class NotCloned(SandboxError):
    """A clone did not come up; Apptainer may start the container all the same."""


class Bundle:
    """One directory, one image, at most one container at a time.

    Args:
        access: the hold on the image; given back by :meth:`remove`.
        start_timeout_s: a container that is not ready by then has failed.
        templates: what containers may be cloned of.
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
        """Directory of our own bound into the sandbox → bytes that we laid out there before."""

    def make(self) -> None:
        """Makes the directory; raises :class:`SandboxError` if scratch does not take it."""
        try:
            for name in ("", "tmp", "layer"):
                os.mkdir(os.path.join(self.directory, name), 0o700)
        except OSError as error:
            raise SandboxError(
                f"{error.filename}: cannot be made ({error.strerror}); see that scratch is not full"
            ) from error

    async def start(self, spec: SandboxSpec, watch: Watch) -> Container:
        """Starts a container on the layer as it is, by Apptainer where it cannot be cloned.

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
        """Whether no container has been started on the layer, and no snapshot was laid into it."""
        return not os.path.lexists(os.path.join(self.layer.path, "upper"))

    async def _start(self, spec: SandboxSpec, watch: Watch, templates: Templates | None) -> Container:
        control = os.path.join(self.directory, f"control-{self._containers}")
        self._containers += 1

        def started(identity: Identity) -> None:
            with open(os.path.join(self.directory, "owner"), "w") as file:
                file.write(f"{identity}\n")
            watch.adopt(identity)

        container = Container(control, on_started=started)
        cloned = lesson = None
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
                lesson = templates.lesson(self.access, spec, line.mounted) if pristine else None
                if lesson is None:
                    cloned = await templates.find(self.access, spec, line.mounted, control, _FIRST)
            temporary = os.path.join(self.directory, "tmp")
            await container.start(
                line.argv, temporary=temporary, timeout_s=self.start_timeout_s, prefix=line.prefix, cloned=cloned
            )
            self.container = container
            if templates is not None and lesson is not None:
                templates.learn(self.access, lesson, container.init)
                if way() == "clone":
                    await self.drop(watch)
                    return await self._start(spec, watch, templates)
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
            if templates is not None and lesson is not None and not lesson.done():
                templates.learn(self.access, lesson, None)
        return container

    def _own_binds(self, spec: SandboxSpec) -> list[str]:
        """Directories of this bundle that a sandbox may write beside its layer (a verifier's logs)."""
        parts = [bind.split(":") for bind in spec.binds]
        return [part[0] for part in parts if part[0].startswith(f"{self.directory}/") and part[2:] != ["ro"]]

    def measured_by(self, watch: Watch, spec: SandboxSpec) -> None:
        """Tells the watch which directories ``disk_mb`` bounds, and what of them is not the sandbox's work."""
        own = self._own_binds(spec)
        watch.directories = [self.layer.path, *own]
        watch.occupied = self.layer.occupied + sum(self._laid_out.get(directory, 0) for directory in own)

    async def start_again(self, spec: SandboxSpec, watch: Watch) -> Container:
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

    async def drop(self, watch: Watch) -> None:
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

    def used(self, spec: SandboxSpec) -> str:
        """Returns why this is not as it was when it started, in words; empty if it can be proved to be."""
        container = self.container
        if container is None or not container.alive or container.init is None:
            return "its container has ended"
        if container.commands.count:
            return "a command has run in it"
        if self.busy:
            return "a process runs in it"
        return self.layer.holds(spec.binds, spec.workdir or "/")


def _size(directory: str) -> int:
    """Bytes of a directory that only we have written, a file as a block at least."""
    total = 0
    for home, directories, files in os.walk(directory):
        total += sum(max(BLOCK, os.lstat(os.path.join(home, name)).st_blocks * 512) for name in (*directories, *files))
    return total
