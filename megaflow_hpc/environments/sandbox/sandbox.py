"""A sandbox: a writable layer on scratch over a read-only image, and the container that runs in it.

``kill_processes``, ``restart`` and ``reset`` replace the container (some 50 ms): nothing is left that could watch, and
the runner itself is new. The first two keep the layer, ``reset`` empties it. ``end_processes`` leaves the start to the
next command, which may never come. The files are bundle.py's.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from megaflow_hpc.environments.sandbox import transfer
from megaflow_hpc.environments.sandbox.absence import nothing_at
from megaflow_hpc.environments.sandbox.bundle import Bundle
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.commands.dispatcher import CommandDispatcher
from megaflow_hpc.environments.sandbox.limits.watchdog import MB, Breach, Watch, Watchdog
from megaflow_hpc.environments.sandbox.network import listen_by_helper, listen_inside
from megaflow_hpc.environments.sandbox.processes import continue_all, stop_all
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.environments.sandbox.rootfs.writable import LayerPaths
from megaflow_hpc.environments.sandbox.session import ShellSession
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.environments.sandbox.templates import Templates
from megaflow_hpc.errors import LimitError, SandboxError
from megaflow_hpc.host.unpack import Budget
from megaflow_hpc.types import ExecResult

OUTPUT_LIMIT = 512 * 1024
"""Bytes kept of each stream of a command, half of them its head."""

READ_LIMIT = 1 << 20
"""Bytes that :meth:`ApptainerSandbox.read` returns at most."""

LIKE_A_LOST_IMAGE = (124, 126, 127, 128 + signal.SIGBUS, 128 + signal.SIGKILL)
"""Exit codes of commands whose program, directory or pages went away; of others too, so the image is looked at then."""


class ApptainerSandbox:
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
        self.spec = spec
        self._first_spec = spec
        self.workdir = spec.workdir or "/"
        self._bundle = Bundle(directory, access, apptainer, start_timeout_s, templates)
        self._output_limit = output_limit
        self._on_stop = on_stop
        self._uploads = 0
        self._stopped = False
        self._at_rest = False
        """Whether there is no container, and the next command starts one."""
        self._changing = asyncio.Lock()
        self.breaches: list[Breach] = []
        """Limits passed since the start, in order."""
        self._over: Breach | None = None
        self._watchdog = watchdog
        self._watch = Watch(spec, self._bundle.layer.path, self._on_breach, layer_in_memory=layer_in_memory)
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
    def directory(self) -> str:
        """The sandbox's directory on scratch."""
        return self._bundle.directory

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
        if (container := self._container()) is not None:
            await container.check()
        await self._bundle.drop(self._watch)
        if change is not None:
            await self._bundle.layer.change(change)
        self._renew()
        self._at_rest = True

    async def _start_again(self) -> Container:
        self._at_rest = False
        return await self._bundle.start_again(self.spec, self._watch)

    async def reset(self) -> None:
        """Takes the sandbox back to the image and the spec as they were: every process gone, the writable layer
        emptied.

        With mode ``persistent`` a container that stands by takes over, and the old one goes in the background.
        """
        async with self._changing:
            self._container()
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

    def _container(self) -> Container | None:
        """The container; ``None`` while the sandbox is at rest."""
        if self._stopped:
            raise SandboxError("the sandbox is stopped")
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
        result = await container.commands.run(
            command,
            cwd=os.path.join(self.workdir, cwd) if cwd else self.workdir,
            env=env,
            user_input=data,
            timeout_s=timeout_s,
            limit=self._output_limit if output_limit is None else output_limit,
            on_output=on_output,
        )
        if result.exit_code in LIKE_A_LOST_IMAGE:
            self._bundle.access.check()
        return result

    async def listen(self, port: int = 0) -> socket.socket:
        """Returns a listening socket on 127.0.0.1:``port`` (0: a free one) as seen inside; the caller serves and closes
        it.

        For network ``gateway``: what the caller serves is all that can be reached. Until the next
        ``kill_processes`` or ``reset``, which bring a new network namespace.
        """
        if self.spec.network != "gateway":
            raise SandboxError(f"network {self.spec.network!r} has no listener; only 'gateway' has")
        container = await self._alive()
        if self._kit is not None:
            return await listen_by_helper(self.exec, container.control, await asyncio.to_thread(self._kit), port)
        if self.pid is None:
            raise SandboxError("the container's first process cannot be found below /proc; use network 'host'")
        return await listen_inside(self.pid, port)

    async def read(self, path: str, limit: int = READ_LIMIT) -> bytes | None:
        """Returns the first ``limit`` bytes of a file; ``None`` if there is no regular file.

        Of a sandbox at rest (:meth:`end_processes`) the host reads what the sandbox has written by itself, without a
        container and without any program of the sandbox's; else the sandbox's own ``head`` does.

        Args:
            path: relative to the sandbox's workdir.

        Raises:
            SandboxError: the sandbox is lost.
        """
        place = os.path.join(self.workdir, path)
        if self._at_rest and not self._covered(place):
            known, content = await asyncio.to_thread(self._bundle.layer.read, place, limit)
            if known:
                return content
        script = f"if [ -f {shlex.quote(place)} ]; then exec head -c {limit} <{shlex.quote(place)}; else exit 1; fi"
        done = await self.exec(script, cwd="/", output_limit=2 * limit)
        return done.stdout_bytes if done.exit_code == 0 else None

    async def lacks(self, path: str) -> bool:
        """Whether there is certainly nothing at ``path``, or an empty directory, of a sandbox at rest
        (:meth:`end_processes`); it stays at rest. ``False`` where only a command could tell.

        Args:
            path: relative to the sandbox's workdir.
        """
        place = os.path.normpath(os.path.join(self.workdir, path))
        found: list[bool] = []
        if self._at_rest and not self._covered(place):
            await self.end_processes(lambda paths: found.append(nothing_at(paths, place)))
        return found == [True]

    def _covered(self, path: str) -> bool:
        """Whether a bind of the spec lies over ``path``."""
        places = (bind.split(":")[1] if ":" in bind else bind for bind in self.spec.binds)
        return any(f"{os.path.normpath(path)}/".startswith(f"{os.path.normpath(place)}/") for place in places)

    async def upload(self, source: str, target: str) -> None:
        """Copies a file or a directory's contents of the host to ``target``, whose parents are made.

        As ``docker cp``: a directory's contents go *into* ``target``; a file becomes ``target``, or goes into it if
        ``target`` is a directory or ends with ``/``. Symbolic links are copied as links.
        """
        container = await self._alive()
        self._uploads += 1
        await transfer.upload(self, source, target, container.control, f"u{self._uploads}")

    async def download(self, source: str, target: str, budget: Budget | None = None) -> None:
        """Copies a file, or a directory's contents, out of the sandbox.

        Only regular files, directories and symbolic links that stay inside ``target`` come out (host/unpack.py says
        which). Directories need ``tar`` in the image. What stands at a place where a file goes is replaced, a link too.

        Args:
            budget: what may be written, counted down; default :meth:`download_budget`.

        Raises:
            SandboxError: there is nothing at ``source``, it is larger than ``budget``, or what the sandbox's programs
                sent is not to be unpacked. Part of it may stand at ``target`` then.
        """

        async def fetch(command: str, on_output: Callable[[bytes], bool]) -> ExecResult:
            return await self.exec(command, output_limit=transfer.WORDS_LIMIT, on_output=on_output)

        await transfer.download(fetch, source, target, self.directory, budget or self.download_budget())

    def download_budget(self) -> Budget:
        """Returns what a download may bring to the host: as much as the sandbox may write, and never more than
        :data:`.transfer.DOWNLOAD_LIMIT` bytes and :data:`.transfer.DOWNLOAD_FILES` files."""
        allowed = transfer.DOWNLOAD_LIMIT if self.spec.disk_mb is None else self.spec.disk_mb * MB
        return Budget(min(allowed, transfer.DOWNLOAD_LIMIT), transfer.DOWNLOAD_FILES)

    async def control(self) -> str:
        """Returns the control directory of its container, on the host."""
        return (await self._alive()).control

    def session(self, *, output_limit: int | None = None) -> ShellSession:
        """Returns a shell that keeps its state: ``async with sandbox.session() as shell: await shell.run(...)``.

        bash where the image has it, else its ``/bin/sh``.
        """

        async def commands() -> CommandDispatcher:
            return (await self._alive()).commands

        return ShellSession(commands, self.workdir, self._output_limit if output_limit is None else output_limit)

    async def snapshot(self, target: str | os.PathLike[str]) -> Snapshot:
        """Copies the writable layer to ``target``, a new directory on the host; processes stand still meanwhile.

        :meth:`ApptainerProvider.start` takes the result. Neither processes nor ``/dev/shm`` are part of it.

        Raises:
            SandboxError: there is something at ``target``, or the copy failed.
        """
        async with self._changing:
            container = self._container()
            init = container.init if container else None
            stopped = await asyncio.to_thread(stop_all, init.pid) if init and init.alive() else []
            try:
                return await self._bundle.layer.snapshot(Path(target), self.spec.image)
            finally:
                continue_all(stopped)


async def _discard(bundle: Bundle) -> None:
    with suppress(OSError):  # what is left is the janitor's
        await bundle.remove()
