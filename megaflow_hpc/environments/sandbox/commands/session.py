"""A shell that keeps its working directory, variables and functions between commands.

The shell is one long-running command of its sandbox. It reads one line per command from a FIFO and evaluates the line,
with empty standard input and the output streams of that command. It reports the exit status on its own standard output.
If a command exits the shell, the command's result is the shell's status, and the next command gets a new shell.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

from megaflow_hpc.environments.sandbox.commands.command import RunningCommand, Worker, command_of
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.commands.dispatcher import CommandDispatcher
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.host.process import descendants, kill_each, parent
from megaflow_hpc.types import ExecResult

_MAX_STATUS_BYTES = 16
"""Maximum length of a status line in bytes. Commands in the shell can write arbitrary data to its standard output."""
GRACE_S = 1.0
"""Timeout in seconds for a command to end after its processes were killed. Then the shell itself is killed."""


class ShellSession:
    """A shell in a sandbox, as returned by :meth:`ApptainerSandbox.session`. Use it as an async context manager.

    Args:
        container: Returns the sandbox's container, starting it if necessary.
    """

    def __init__(self, container: Callable[[], Awaitable[Container]], workdir: str, limit: int) -> None:
        self._container = container
        self._workdir = workdir
        self._limit = limit
        self._commands: CommandDispatcher | None = None
        self._shell: RunningCommand | None = None
        self._worker: Worker | None = None
        self._partial_line = b""
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> ShellSession:
        async with self._lock:
            await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def run(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """Runs a command in the shell and waits until it ends. Commands run one at a time.

        After ``timeout_s`` all processes that the shell started are killed. If the shell itself does not respond, it is
        killed too and loses its state.

        Raises:
            SandboxError: The sandbox is stopped or was lost.
        """
        async with self._lock:
            if self._shell is None or self._shell.done.done():
                await self._open()
            assert self._commands is not None
            assert self._worker is not None
            assert self._shell is not None
            began = time.monotonic()
            running = self._commands.launch(command, self._workdir, {}, None, self._limit, self._worker)
            timed_out = False
            waiting = {running.done, self._shell.done}
            try:
                done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    timed_out = True
                    await self._interrupt(running)
            except asyncio.CancelledError:
                await asyncio.shield(self._interrupt(running))
                raise
            if not running.done.done():
                ended = await asyncio.shield(self._shell.done)
                self._commands.finish(running, ended)
            status = await running.done
            if self._shell.done.done():
                await self._close()
        return running.result(status, timed_out=timed_out, started=began)

    async def _open(self) -> None:
        await self._close()
        commands = (await self._container()).commands
        worker, inside = commands.session_worker()
        script = session_text(inside)
        command = f"if command -v bash >/dev/null; then exec bash -c {shlex.quote(script)}; fi\n{script}"
        self._partial_line = b""
        self._commands, self._worker = commands, worker
        self._shell = commands.launch(command, self._workdir, {}, None, self._limit, on_output=self._answered)

    def _answered(self, data: bytes) -> None:
        *lines, partial = (self._partial_line + data).split(b"\n")
        self._partial_line = partial[-_MAX_STATUS_BYTES:]
        for line in lines:
            running = self._worker.command if self._worker else None
            if running is not None and line.isdigit() and len(line) < _MAX_STATUS_BYTES and self._commands is not None:
                self._commands.finish(running, int(line))

    async def _interrupt(self, running: RunningCommand) -> None:
        """Kills the processes that the shell has started, then the shell itself if the command still runs."""
        assert self._commands is not None
        assert self._shell is not None
        init = self._commands.init
        deadline = time.monotonic() + GRACE_S
        while init is not None and not running.done.done() and time.monotonic() < deadline:
            await asyncio.to_thread(_kill_below, init.pid, self._shell.number)
            await asyncio.wait((running.done, self._shell.done), timeout=0.05)
        if not running.done.done() and not self._shell.done.done():
            await self._commands.kill(self._shell)

    async def _close(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None and self._commands is not None:
            if not shell.done.done():
                await self._commands.kill(shell)
            elif not shell.done.cancelled():
                shell.done.exception()
        if self._worker is not None:
            os.close(self._worker.pipe)
            self._worker = None


def _kill_below(init: int, number: int) -> None:
    """Kills all processes of command ``number`` except the first."""
    for pid in descendants(init):
        if command_of(pid) == number and is_runner(parent(pid)):
            kill_each(list(descendants(pid)))


def session_text(lines: str) -> str:
    """Returns the script of a session's shell. It evaluates each line from the FIFO ``lines`` and prints its exit
    status."""
    # A line's redirections end with the line. Programs that it starts do not inherit descriptors 8 and 9.
    return (
        f"exec 8<{lines} 9>&1 >/dev/null 2>&1; _mf_n='\n'\n"
        'while IFS= read -r _mf_line <&8; do eval "$_mf_line"; echo "$?" >&9; done'
    )
