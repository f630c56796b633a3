"""A sandbox: a writable layer on scratch over a read-only image, and the container that runs in it.

``kill_processes``, ``restart`` and ``reset`` replace the container, so that no process is left, not even the runner.
The first two keep the layer, and ``reset`` empties it. After ``end_processes`` the next command starts the container.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.commands.dispatcher import CommandDispatcher
from megaflow_hpc.environments.sandbox.commands.session import ShellSession
from megaflow_hpc.environments.sandbox.directory import SandboxDirectory
from megaflow_hpc.environments.sandbox.files import SandboxFiles
from megaflow_hpc.environments.sandbox.limits.watchdog import Breach, SandboxWatch, Watchdog
from megaflow_hpc.environments.sandbox.network import listen
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.environments.sandbox.rootfs.writable import LayerPaths
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.sandbox.templates import Templates
from megaflow_hpc.errors import LimitError, SandboxError
from megaflow_hpc.types import ExecResult

OUTPUT_LIMIT = 512 * 1024
"""Bytes kept of each stream of a command, half of them its head."""


class ApptainerSandbox(SandboxFiles):
    """A running sandbox; see :class:`megaflow_hpc.types.Sandbox`.

    :meth:`ApptainerProvider.start` makes it. It belongs to the event loop of that call.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        access: Access,
        directory: str,
        apptainer: str,
        *,
        start_timeout_s: float = 60.0,
        output_limit: int = OUTPUT_LIMIT,
        on_stop: Callable[[ApptainerSandbox], None] | None = None,
        watchdog: Watchdog | None = None,
        layer_in_memory: bool = False,
        interpreter: Callable[[], Path] | None = None,
        templates: Templates | None = None,
    ) -> None:
        super().__init__(spec, SandboxDirectory(directory, access, apptainer, start_timeout_s, templates))
        self._first_spec = spec
        self._output_limit = output_limit
        self._on_stop = on_stop
        self._stopped = False
        self.breaches: list[Breach] = []
        """Limits passed since the start, in order."""
        self._over: Breach | None = None
        self._watchdog = watchdog
        self._watch = SandboxWatch(spec, self._dir.layer.path, self._on_breach, layer_in_memory=layer_in_memory)
        self.consumption = self._watch.consumption
        """Returns what was used since the start, by all its containers; also once it has stopped."""
        self._helper_python = interpreter
        self._loop = asyncio.get_running_loop()
        if watchdog is not None:
            watchdog.watch(self._watch)

    async def __aenter__(self) -> ApptainerSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int | None:
        """The container's first process, as the host sees it."""
        init = self._dir.container.init if self._dir.container else None
        return init.pid if init else None

    @property
    def host_pid(self) -> int | None:
        """Process on the host that all processes of the sandbox descend from."""
        return self._dir.container.host_pid if self._dir.container else None

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self, kept: Snapshot | None = None) -> None:
        """Starts the first container; raises :class:`SandboxError` with Apptainer's last line if it does not come up.

        Args:
            kept: files to start with.
        """
        try:
            self._dir.make()
            if kept is not None:
                await asyncio.to_thread(self._dir.layer.restore, kept)
                await self._dir.start_again(self.spec, self._watch)
            else:
                await self._dir.start(self.spec, self._watch)
        except BaseException:
            await self.stop()
            raise

    def _on_breach(self, breach: Breach, number: int | None, whole: bool) -> None:
        """Runs in the watchdog's thread. The loop handles it before it sees the end of a killed process."""
        with suppress(RuntimeError):  # the loop and the sandbox have ended
            self._loop.call_soon_threadsafe(self._breached, self._dir.container, breach, number, whole)

    def _breached(self, container: Container | None, breach: Breach, number: int | None, whole: bool) -> None:
        self.breaches.append(breach)
        if breach.final:
            self._over = breach
        if container is not None and number is not None:
            container.commands.mark_breached(number, str(breach))
        elif container is not None and whole:
            container.mark_breached(str(breach))

    async def kill_processes(self) -> None:
        """Ends every process and starts a fresh container on the same writable layer; ``/dev/shm`` starts empty."""
        await self.restart()

    async def end_processes(self, change: Callable[[LayerPaths], None] | None = None) -> None:
        """Ends every process; the next command starts a fresh container on the same writable layer.

        Args:
            change: as for :meth:`restart`.
        """
        async with self._changing:
            await self._end(change)

    async def restart(
        self, spec: SandboxSpec | None = None, change: Callable[[LayerPaths], None] | None = None
    ) -> None:
        """Ends every process and starts a fresh container.

        Args:
            spec: another user, network or binds from now on; the image stays.
            change: called while no container runs, with the host's paths of the writable layer and the image. The
                host may touch the layer only then.
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
        await self._dir.drop(self._watch)  # the container is not needed any more, even if it ended by itself
        if change is not None:
            await self._dir.layer.change(change)
        self._renew()
        self._at_rest = True

    async def _start_again(self) -> Container:
        self._at_rest = False
        return await self._dir.start_again(self.spec, self._watch)

    async def reset(self) -> None:
        """Resets the sandbox to its image and spec: ends every process and empties the writable layer."""
        async with self._changing:
            self._check_not_stopped()
            self._at_rest = False
            self.spec, self.workdir = self._first_spec, self._first_spec.workdir or "/"
            await self._dir.drop(self._watch)
            await self._dir.layer.empty()
            self._renew()
            await self._dir.start(self.spec, self._watch)

    @property
    def busy(self) -> bool:
        """True if a command or a background process runs."""
        return self._dir.busy

    async def stop(self) -> None:
        """Ends every process and removes the writable layer. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._watch.detach()
        try:
            await self._dir.remove()
        finally:
            if self._watchdog is not None:
                self._watchdog.unwatch(self._watch)
            if self._on_stop is not None:
                self._on_stop(self)

    async def finish(self, target: str | os.PathLike[str]) -> None:
        """Ends every process and moves what the sandbox has changed to ``target``, on the same file system; then stops.

        The form is that of an overlay's upper directory; where there is no overlay, files mark what was deleted.
        """
        async with self._changing:
            await self._end(None)
            await self._dir.layer.take(Path(target))
        await self.stop()

    def _renew(self) -> None:
        """Counts CPU and wall time from zero: an agent's use is not the verifier's."""
        self._over = None
        self._watch.spec = self.spec
        self._watch.renew()

    async def _alive(self) -> Container:
        """Returns the container, a fresh one on the same layer if a command has killed every process of the last."""
        container = self._dir.container
        if self._over is not None:
            raise LimitError(f"the sandbox has ended: {self._over}")
        self._watch.poke()
        if container is not None and container.alive and not self._stopped:
            return container
        if container is not None:
            await container.check()
        async with self._changing:  # another command may be starting it
            container = self._container()
            if container is not None and container.alive:
                return container
            await self._dir.drop(self._watch)
            return await self._start_again()

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise SandboxError("the sandbox is stopped")

    def _container(self) -> Container | None:
        self._check_not_stopped()
        if self._dir.container is None and not self._at_rest:
            raise SandboxError("the sandbox has no container: its last start failed")
        return self._dir.container

    # --- use ----------------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
        output_limit: int | None = None,
        on_output: Callable[[bytes], bool] | None = None,
    ) -> ExecResult:
        """Runs a command and waits for its end: ``str`` by ``/bin/sh -c``, a sequence as it is.

        Args:
            timeout_s: after that every process of the command is killed; the result says 124 and ``timed_out``.
            cwd: start here; relative to the sandbox's workdir. One that does not exist gives exit code 126.
            env: added to the sandbox's environment for this command.
            user_input: the command's standard input; ``/dev/null`` without it.
            output_limit: bytes kept of each stream, half of them its head.
            on_output: see :meth:`.CommandDispatcher.run`.

        Raises:
            SandboxError: the sandbox is stopped, no container comes up, or it was ended from outside (preemption, a
                killed job). What a command does is never an exception: one that kills every process of the sandbox
                gives 137, and the next finds a fresh container.
        """
        container = await self._alive()
        data = user_input.encode("utf-8", "surrogateescape") if isinstance(user_input, str) else user_input
        return await container.commands.run(
            command,
            cwd=os.path.join(self.workdir, cwd) if cwd else self.workdir,
            env=env,
            user_input=data,
            timeout_s=timeout_s,
            limit=self._output_limit if output_limit is None else output_limit,
            on_output=on_output,
        )

    async def listen(self, port: int = 0) -> socket.socket:
        """Returns a socket that listens on 127.0.0.1:``port`` in the sandbox (0: a free port). The caller closes it.

        For network ``gateway``, where the sandbox reaches nothing else. The socket is valid until the next
        ``kill_processes`` or ``reset``, which create a new network namespace.
        """
        if self.spec.network != "gateway":
            raise SandboxError(f"network {self.spec.network!r} has no listener; only 'gateway' has")
        return await listen(await self._alive(), self.exec, self._helper_python, port)

    async def control(self) -> str:
        return (await self._alive()).control

    def session(self, *, output_limit: int | None = None) -> ShellSession:
        """Returns a shell that keeps its state: ``async with sandbox.session() as shell: await shell.run(...)``.

        bash where the image has it, else its ``/bin/sh``.
        """

        async def commands() -> CommandDispatcher:
            return (await self._alive()).commands

        return ShellSession(commands, self.workdir, self._output_limit if output_limit is None else output_limit)
