"""A sandbox: a writable layer on scratch over a read-only image, and the container that runs in it.

``kill_processes``, ``restart`` and ``reset`` replace the container, so no process survives, not even the runner. The
first two keep the layer, and ``reset`` empties it. After ``end_processes``, the next command starts a new container.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from megaflow_hpc.environments.sandbox import files
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.directory import SandboxDirectory
from megaflow_hpc.environments.sandbox.limits.watchdog import MB, Breach, SandboxWatch, Watchdog
from megaflow_hpc.environments.sandbox.network import InsideSockets, listen_on_host
from megaflow_hpc.environments.sandbox.processes import continue_all, stop_all
from megaflow_hpc.environments.sandbox.rootfs.writable import LayerPaths, has_nothing_at
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import LimitError, SandboxError
from megaflow_hpc.host.tar import Budget
from megaflow_hpc.types import ExecResult

OUTPUT_LIMIT = 512 * 1024
"""Maximum number of bytes kept of each output stream of a command: the first half and the last half."""

READ_LIMIT = 1 << 20
"""Default maximum number of bytes that :meth:`ApptainerSandbox.read` returns."""


class ApptainerSandbox:
    """A running sandbox. Implements :class:`megaflow_hpc.types.Sandbox`.

    :meth:`ApptainerProvider.start` creates it. It belongs to the event loop of that call.

    Args:
        on_stop: Called once the sandbox has stopped.
        layer_in_memory: True if the writable layer counts as memory.
        interpreter: Prepares the Python of a helper that binds listening sockets. If ``None``, a process outside the
            sandbox binds them.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        directory: SandboxDirectory,
        watchdog: Watchdog,
        *,
        on_stop: Callable[[ApptainerSandbox], None],
        layer_in_memory: bool,
        interpreter: Callable[[], Path] | None,
    ) -> None:
        self.spec = spec
        self.workdir = spec.workdir or "/"
        self._first_spec = spec
        self._dir = directory
        self._on_stop = on_stop
        self._stopped = False
        self._at_rest = False
        """True if no container is running because :meth:`end_processes` ended it. The next command starts a new one."""
        self._changing = asyncio.Lock()
        self._uploads = 0
        self.breaches: list[Breach] = []
        """Limits that the sandbox has exceeded since the start, in order."""
        self._final_breach: Breach | None = None
        self._watchdog = watchdog
        self._watch = SandboxWatch(spec, directory.layer.path, self._on_breach, layer_in_memory=layer_in_memory)
        self.consumption = self._watch.consumption
        """Returns the resources that all containers of the sandbox have used since the start. Also works after
        :meth:`stop`."""
        self._interpreter = interpreter
        self._leave_services: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        watchdog.watch(self._watch)

    async def __aenter__(self) -> ApptainerSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def directory(self) -> str:
        """The sandbox's directory on scratch."""
        return self._dir.directory

    @property
    def pid(self) -> int | None:
        """Host PID of the container's first process. ``None`` if no container is running."""
        init = self._dir.container.init if self._dir.container else None
        return init.pid if init else None

    @property
    def busy(self) -> bool:
        """True if a command or background process is running."""
        return self._dir.busy

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self, kept: Snapshot | None = None) -> None:
        """Starts the first container. Raises :class:`SandboxError` with Apptainer's last line if it does not start.

        Args:
            kept: Snapshot whose files the sandbox starts with.
        """
        try:
            self._dir.make()
            if kept is not None:
                await asyncio.to_thread(self._dir.layer.restore, kept)
                await self._dir.start_again(self.spec, self._watch)
            else:
                await self._dir.start(self.spec, self._watch)
            await self._reach_services()
        except BaseException:
            await self.stop()
            raise

    async def _reach_services(self) -> None:
        """Makes the spec's services reachable in the container that has just started."""
        services, container = self.spec.services, self._dir.container
        if services is None or container is None:
            return
        try:
            if self.spec.network == "host":
                listeners = listen_on_host(services.addresses)
            else:
                listeners = await self._inside(container).listen(services.addresses)
        except BaseException:
            await self._dir.drop(self._watch)  # a command must not be able to take the services' addresses
            raise
        self._leave_services = services.serve(dict(zip(services.addresses, listeners, strict=True)))

    async def _drop(self) -> None:
        """Kills the container. The layer is kept."""
        self._leave_services()
        await self._dir.drop(self._watch)

    def _on_breach(self, breach: Breach, number: int | None, ends_container: bool) -> None:
        """Passes a breach from the watchdog's thread to the event loop, before the loop notices that a process was
        killed."""
        with suppress(RuntimeError):  # the loop and the sandbox have ended
            self._loop.call_soon_threadsafe(self._breached, self._dir.container, breach, number, ends_container)

    def _breached(self, container: Container | None, breach: Breach, number: int | None, ends_container: bool) -> None:
        self.breaches.append(breach)
        if breach.final:
            self._final_breach = breach
        if container is not None and number is not None:
            container.commands.mark_breached(number, str(breach))
        elif container is not None and ends_container:
            container.mark_breached(str(breach))

    async def kill_processes(self) -> None:
        """Kills all processes and starts a fresh container on the same writable layer. ``/dev/shm`` starts empty."""
        await self.restart()

    async def end_processes(self, change: Callable[[LayerPaths], None] | None = None) -> None:
        """Kills all processes. The next command starts a fresh container on the same writable layer.

        Args:
            change: Same as for :meth:`restart`.
        """
        async with self._changing:
            await self._end(change)

    async def restart(
        self, spec: SandboxSpec | None = None, change: Callable[[LayerPaths], None] | None = None
    ) -> None:
        """Kills all processes and starts a fresh container.

        Args:
            spec: New user, network or binds. The image stays the same. ``None`` keeps the current spec.
            change: Called while no container is running, with the host paths of the writable layer and the image. The
                host may change the layer only then.
        """
        async with self._changing:
            await self._end(change)
            if spec is not None:
                self.spec = replace(spec, image=self.spec.image)
                self.workdir = self.spec.workdir or "/"
            self._renew()
            await self._start_again()

    async def _end(self, change: Callable[[LayerPaths], None] | None) -> None:
        self._check_not_stopped()
        await self._drop()
        if change is not None:
            await self._dir.layer.change(change)
        self._renew()
        self._at_rest = True

    async def _start_again(self) -> Container:
        self._at_rest = False
        container = await self._dir.start_again(self.spec, self._watch)
        await self._reach_services()
        return container

    async def reset(self) -> None:
        """Resets the sandbox to its image and spec: kills all processes and empties the writable layer."""
        async with self._changing:
            self._check_not_stopped()
            self._at_rest = False
            self.spec, self.workdir = self._first_spec, self._first_spec.workdir or "/"
            await self._drop()
            await self._dir.layer.empty()
            self._renew()
            await self._dir.start(self.spec, self._watch)
            await self._reach_services()

    async def stop(self) -> None:
        """Kills all processes and removes the writable layer. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._leave_services()
        self._watch.detach()
        try:
            await self._dir.remove()
        finally:
            self._watchdog.unwatch(self._watch)
            self._on_stop(self)

    async def finish(self, target: str | os.PathLike[str]) -> None:
        """Stops the sandbox and moves its changes to ``target`` on the same file system.

        ``target`` gets the form of an overlay's upper directory. If sandboxes are copies of their images, whiteouts in
        it are ``.wh.NAME`` files.
        """
        async with self._changing:
            await self._end(None)
            await self._dir.layer.take(Path(target))
        await self.stop()

    def _renew(self) -> None:
        """Restarts CPU and wall time from zero, so that the agent's usage is not charged to the verifier."""
        self._final_breach = None
        self._watch.spec = self.spec
        self._watch.renew()

    async def _running(self) -> Container:
        """Returns the container. Starts a new one on the same layer if a command killed all processes."""
        container = self._dir.container
        if self._final_breach is not None:
            raise LimitError(f"the sandbox has ended: {self._final_breach}")
        self._watch.poke()
        if container is not None and container.alive and not self._stopped:
            return container
        if container is not None:
            await container.check()
        async with self._changing:  # another command may be starting it
            container = self._current()
            if container is not None and container.alive:
                return container
            await self._drop()
            return await self._start_again()

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise SandboxError("the sandbox is stopped")

    def _current(self) -> Container | None:
        """Returns the container, or ``None`` while the sandbox is at rest."""
        self._check_not_stopped()
        if self._dir.container is None and not self._at_rest:
            raise SandboxError("the sandbox has no container: its last start failed")
        return self._dir.container

    # --- commands -----------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
        output_limit: int = OUTPUT_LIMIT,
        on_output: Callable[[bytes], bool] | None = None,
    ) -> ExecResult:
        """Runs a command and waits until it ends.

        A string is run with ``/bin/sh -c``. A sequence is executed directly.

        Args:
            timeout_s: Seconds after which all processes of the command are killed. The result then has exit code 124
                and ``timed_out`` set.
            cwd: Directory to start in, relative to the sandbox's workdir. If it does not exist, the exit code is 126.
            env: Environment variables added for this command.
            user_input: Standard input of the command. Default: ``/dev/null``.
            output_limit: Maximum number of bytes to keep from each stream: half from the start, half from the end.
            on_output: See :meth:`.CommandDispatcher.run`.

        Raises:
            SandboxError: The sandbox is stopped, its container does not start, or it was ended from outside
                (preemption, a killed job). A command itself never causes an exception. If it kills all processes of the
                sandbox, its exit code is 137, and the next command gets a fresh container.
        """
        return await self._exec_in(
            await self._running(),
            command,
            timeout_s=timeout_s,
            cwd=cwd,
            env=env,
            user_input=user_input,
            output_limit=output_limit,
            on_output=on_output,
        )

    async def _exec_in(
        self,
        container: Container,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
        output_limit: int = OUTPUT_LIMIT,
        on_output: Callable[[bytes], bool] | None = None,
    ) -> ExecResult:
        data = user_input.encode("utf-8", "surrogateescape") if isinstance(user_input, str) else user_input
        return await container.commands.run(
            command,
            cwd=os.path.join(self.workdir, cwd) if cwd else self.workdir,
            env=env,
            user_input=data,
            timeout_s=timeout_s,
            limit=output_limit,
            on_output=on_output,
        )

    async def listen(self, port: int = 0) -> socket.socket:
        """Returns a socket that listens on 127.0.0.1:``port`` in the sandbox (0: any free port).

        The caller must close the socket. It is valid until the next ``kill_processes`` or ``reset``, both of which
        create a new network namespace. Requires network ``gateway``, which gives the sandbox no other connection.
        """
        if self.spec.network != "gateway":
            raise SandboxError(f"network {self.spec.network!r} supports no listener; use 'gateway'")
        (listener,) = await self._inside(await self._running()).listen([("127.0.0.1", port)])
        return listener

    async def unconnected(self, count: int) -> list[socket.socket]:
        """Returns non-blocking TCP sockets that can be connected to programs that listen in the sandbox.

        Not available with network ``host``. The sockets are valid as long as the sockets from :meth:`listen`.
        """
        return await self._inside(await self._running()).unconnected(count)

    def _inside(self, container: Container) -> InsideSockets:
        return InsideSockets(container, partial(self._exec_in, container), self._interpreter)

    async def control(self) -> str:
        """Returns the host path of the current container's control directory."""
        return (await self._running()).control

    # --- files --------------------------------------------------------------------------------------------------

    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes | None:
        """Returns the first ``limit`` bytes of a file, or ``None`` if there is no regular file.

        If the sandbox is at rest (:meth:`end_processes`), the host reads from the writable layer without running a
        program in the sandbox. If that is not possible, the sandbox's ``head`` reads the file.

        Args:
            path: Path relative to the sandbox's workdir.

        Raises:
            SandboxError: The sandbox was lost.
        """
        full_path = os.path.join(self.workdir, path)
        if self._at_rest and not self._is_bound(full_path):
            is_certain, content = await asyncio.to_thread(self._dir.layer.read, full_path, limit)
            if is_certain:
                return content
        quoted = shlex.quote(full_path)
        script = f"if [ -f {quoted} ]; then exec head -c {limit} <{quoted}; else exit 1; fi"
        done = await self.exec(script, cwd="/", output_limit=2 * limit)
        return done.stdout_bytes if done.exit_code == 0 else None

    async def lacks(self, path: str) -> bool:
        """Returns ``True`` only if ``path`` is known to be missing or an empty directory in a sandbox at rest.

        The sandbox stays at rest (:meth:`end_processes`). Returns ``False`` if only a command could tell.

        Args:
            path: Path relative to the sandbox's workdir.
        """
        full_path = os.path.normpath(os.path.join(self.workdir, path))
        if not self._at_rest or self._is_bound(full_path):
            return False
        answers: list[bool] = []
        await self.end_processes(lambda paths: answers.append(has_nothing_at(paths, full_path)))
        return answers == [True]

    def _is_bound(self, path: str) -> bool:
        """Returns whether a bind of the spec covers ``path``."""
        targets = [os.path.normpath(bind.target) for bind in self.spec.parsed_binds()]
        return any(f"{os.path.normpath(path)}/".startswith(f"{target}/") for target in targets)

    async def upload(self, source: str, target: str) -> None:
        """Copies a file or a directory's contents from the host to ``target``, creating parent directories.

        Works like ``docker cp``: a directory's contents go *into* ``target``. A file becomes ``target``, or goes into
        it if ``target`` is a directory or ends with ``/``. Symlinks are copied as symlinks.

        Raises:
            SandboxError: ``source`` does not exist, or the sandbox was lost.
            SetupError: The copy inside the sandbox failed.
        """
        self._uploads += 1
        await files.upload(self.exec, source, target, await self.control(), f"u{self._uploads}")

    async def download(self, source: str, target: str, budget: Budget | None = None) -> None:
        """Copies a file or a directory's contents out of the sandbox.

        Copies only regular files, directories and symlinks that stay inside ``target`` (see host/tar.py for the rules).
        Directories need ``tar`` in the image. Existing files and symlinks at ``target`` are replaced.

        Args:
            budget: Bytes and files that may still be written. The download subtracts from it. Default:
                :meth:`download_budget`.

        Raises:
            SetupError: ``source`` does not exist or exceeds ``budget``, or the sandbox's programs sent an invalid
                stream. Some files may have been written to ``target``.
            SandboxError: The sandbox was lost, or ``target`` cannot be written.
        """
        await files.download(self.exec, source, target, self.directory, budget or self.download_budget())

    def download_budget(self) -> Budget:
        """Returns the budget of one download: ``disk_mb``, but at most 256 MiB, in 100,000 files."""
        allowed = files.MAX_DOWNLOAD_BYTES if self.spec.disk_mb is None else self.spec.disk_mb * MB
        return Budget(min(allowed, files.MAX_DOWNLOAD_BYTES), files.MAX_DOWNLOAD_FILES)

    async def snapshot(self, target: str | os.PathLike[str]) -> Snapshot:
        """Copies the writable layer to ``target``, a new directory on the host. Pauses all processes during the copy.

        Pass the result to :meth:`ApptainerProvider.start`. It includes neither processes nor ``/dev/shm``.

        Raises:
            SandboxError: ``target`` already exists, or the copy failed.
        """
        async with self._changing:
            container = self._current()
            init = container.init if container else None
            stopped = await asyncio.to_thread(stop_all, init.pid) if init and init.alive() else []
            try:
                return await self._dir.layer.snapshot(Path(target), self.spec.image)
            finally:
                continue_all(stopped)
