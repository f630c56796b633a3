"""A sandbox: a writable layer on scratch over a read-only image, and the container that runs in it.

``kill_processes``, ``restart`` and ``reset`` replace the container (some 50 ms): nothing is left that could watch, and
the runner itself is new. The first two keep the layer, ``reset`` empties it. ``end_processes`` leaves the start to the
next command, which may never come. The files are bundle.py's.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from megaflow_hpc.environments.sandbox.bundle import Bundle
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.commands.dispatcher import CommandDispatcher
from megaflow_hpc.environments.sandbox.commands.session import ShellSession
from megaflow_hpc.environments.sandbox.files import SandboxFiles
from megaflow_hpc.environments.sandbox.limits.watch import Breach, Watch
from megaflow_hpc.environments.sandbox.limits.watchdog import Watchdog
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
    """A running sandbox; see :class:`megaflow_hpc.types.Sandbox`. Made by :meth:`ApptainerProvider.start`, bound to its
    event loop."""

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
        spare: Callable[[SandboxSpec], Awaitable[ApptainerSandbox | None]] | None = None,
        kit: Callable[[], Path] | None = None,
        templates: Templates | None = None,
    ) -> None:
        super().__init__(spec, Bundle(directory, access, apptainer, start_timeout_s, templates))
        self._first_spec = spec
        self._output_limit = output_limit
        self._on_stop = on_stop
        self._stopped = False
        self.breaches: list[Breach] = []
        """Limits passed since the start, in order."""
        self._over: Breach | None = None
        self._watchdog = watchdog
        self._watch = Watch(spec, self._bundle.layer.path, self._on_breach, layer_in_memory=layer_in_memory)
        self.consumption = self._watch.consumption
        """Returns what was used since the start, by all its containers; also once it has stopped."""
        self._spare = spare
        self._kit = kit
        self._leaving: set[asyncio.Task[None]] = set()
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
        init = self._bundle.container.init if self._bundle.container else None
        return init.pid if init else None

    @property
    def host_pid(self) -> int | None:
        """Apptainer's own process on the host; all of the sandbox's are below it."""
        return self._bundle.container.host_pid if self._bundle.container else None

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self, kept: Snapshot | None = None) -> None:
        """Starts the first container; raises :class:`SandboxError` with Apptainer's last line if it does not come up.

        Args:
            kept: files to start with.
        """
        try:
            self._bundle.make()
            if kept is not None:
                await asyncio.to_thread(self._bundle.layer.restore, kept)
                await self._bundle.start_again(self.spec, self._watch)
            else:
                await self._bundle.start(self.spec, self._watch)
        except BaseException:
            await self.stop()
            raise

    def _on_breach(self, breach: Breach, number: int | None, whole: bool) -> None:
        """In the watchdog's thread; what it says is heard before the end of what it kills."""
        with suppress(RuntimeError):  # the loop has ended, and the sandbox with it
            self._loop.call_soon_threadsafe(self._breached, self._bundle.container, breach, number, whole)

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
            spec: what the container is from now on: another user, network, binds; the image stays.
            change: called in between, while nothing runs, with the host's paths of the writable layer and the image.
                Only then may the host touch the layer.
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
        await self._bundle.drop(self._watch)  # the container is not needed any more, even if it ended by itself
        if change is not None:
            await self._bundle.layer.change(change)
        self._renew()
        self._at_rest = True

    async def _start_again(self) -> Container:
        self._at_rest = False
        return await self._bundle.start_again(self.spec, self._watch)

    async def reset(self) -> None:
        """Resets the sandbox to its image and spec: ends every process and empties the writable layer.

        With mode ``persistent``, a warm container takes over, and the old one is removed in the background.
        """
        async with self._changing:
            self._check_not_stopped()
            self._at_rest = False
            self.spec, self.workdir = self._first_spec, self._first_spec.workdir or "/"
            if self._spare is not None and (spare := await self._spare(self.spec)) is not None:
                self._become(spare)
                return
            await self._bundle.drop(self._watch)
            await self._bundle.layer.empty()
            self._renew()
            await self._bundle.start(self.spec, self._watch)

    def _become(self, spare: ApptainerSandbox) -> None:
        """Takes over everything of a sandbox that nobody has used."""
        spare._stopped = True
        if spare._watchdog is not None:
            spare._watchdog.unwatch(spare._watch)
        self._watch.detach()
        leaving = self._loop.create_task(_discard(self._bundle))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        self._bundle = spare._bundle
        self._bundle.measured_by(self._watch, self.spec)
        self._renew()
        if self._bundle.container is not None and self._bundle.container.init is not None:
            self._watch.attach(self._bundle.container.init)

    @property
    def busy(self) -> bool:
        """Whether a command is under way, or a process runs that one has left in the background."""
        return self._bundle.busy

    async def settled(self) -> None:
        """Returns when all processes of an idle sandbox are there; :class:`SandboxError` if they never are."""
        try:
            container = await self._alive()
            await asyncio.wait_for(container.commands.workers.settled.wait(), self._bundle.start_timeout_s)
        except TimeoutError:
            raise SandboxError(f"{self.spec.image}: the sandbox's shells did not come up") from None

    def used(self) -> str:
        """Returns why this is not as it was when it started, in words; empty if it can be proved to be."""
        return "it is stopped" if self._stopped else self._bundle.used(self.spec)

    async def stop(self) -> None:
        """Ends every process and removes the writable layer. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._watch.detach()
        try:
            await self._bundle.remove()
            if self._leaving:
                await asyncio.gather(*self._leaving)
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
            await self._bundle.layer.take(Path(target))
        await self.stop()

    def _renew(self) -> None:
        """What is counted in time begins anew: an agent's use is not the verifier's."""
        self._over = None
        self._watch.spec = self.spec
        self._watch.renew()

    async def _alive(self) -> Container:
        """The container; a fresh one on the same layer if a command has killed every process of the last."""
        container = self._bundle.container
        if self._over is not None:
            raise LimitError(f"the sandbox cannot go on: {self._over}")
        self._watch.poke()
        if container is not None and container.alive and not self._stopped:
            return container
        if container is not None:
            await container.check()
        async with self._changing:  # another command may have found the same, and be at it
            container = self._container()
            if container is not None and container.alive:
                return container
            await self._bundle.drop(self._watch)
            return await self._start_again()

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise SandboxError("the sandbox is stopped")

    def _container(self) -> Container | None:
        self._check_not_stopped()
        if self._bundle.container is None and not self._at_rest:
            raise SandboxError("the sandbox has no container: its last start failed")
        return self._bundle.container

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
        return await listen(await self._alive(), self.exec, self._kit, port)

    async def control(self) -> str:
        return (await self._alive()).control

    def session(self, *, output_limit: int | None = None) -> ShellSession:
        """Returns a shell that keeps its state: ``async with sandbox.session() as shell: await shell.run(...)``.

        bash where the image has it, else its ``/bin/sh``.
        """

        async def commands() -> CommandDispatcher:
            return (await self._alive()).commands

        return ShellSession(commands, self.workdir, self._output_limit if output_limit is None else output_limit)


async def _discard(bundle: Bundle) -> None:
    with suppress(OSError):  # what is left is the janitor's
        await bundle.remove()
