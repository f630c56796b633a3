"""The commands under way in one container: how they are handed over, read, timed and ended.

A command costs one small file, two opens, one write and one line back. Its standard output and error are read here as
they come, so what a command prints is bounded in memory, and nothing of it touches a disk.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence

from megaflow_hpc.environments.apptainer import CONTROL_DIR
from megaflow_hpc.environments.fragments import MARKER, command_text
from megaflow_hpc.environments.processes import kill_marked
from megaflow_hpc.environments.streams import CappedBuffer, StreamPair, read_available
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.process import Identity
from megaflow_hpc.types import ExecResult

MAX_WORKERS = 64
"""Commands at once in one sandbox; more wait. Each worker is a small shell that stays."""

KILL_GRACE_S = 10.0
"""From the kill of a command to its end. A process in uninterruptible sleep may need it."""

_LEFT_OVER_READS = 32
"""Reads per stream (64 KiB each) after a command's end: a process it left behind may print for ever."""

_LONGEST_ARGUMENT = 100_000
"""The kernel takes at most 128 KiB in one argument."""


class _Command:
    """A command under way."""

    def __init__(self, number: int, worker: int, pair: StreamPair, limit: int) -> None:
        self.number = number
        self.worker = worker
        self.pair = pair
        self.buffers = (CappedBuffer(limit), CappedBuffer(limit))
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.files = [f"c{number}"]
        self.breach = ""


def write_new(path: str, data: bytes) -> None:
    """Writes a file that must not be there yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


class Commands:
    """Hands commands to the workers of one container's runner.

    Args:
        control: the control directory on the host.
        spawn: asks the runner for worker number K.
        why_ended: ``None`` while the container lives, else its last words.
    """

    def __init__(self, control: str, spawn: Callable[[int], None], why_ended: Callable[[], str | None]) -> None:
        self.control = control
        self.init: Identity | None = None
        """The container's PID 1, as the host sees it; set once it is known."""
        self._spawn = spawn
        self._why_ended = why_ended
        self._number = 0
        self._commands: dict[int, _Command] = {}
        self._idle_workers: list[int] = []
        self._worker_pipes: list[int] = []
        self._free_pairs: list[StreamPair] = []
        self._pairs: list[StreamPair] = []
        self._slots = asyncio.Semaphore(MAX_WORKERS)

    def add_worker(self, spawn: bool = False) -> int:
        """Makes a worker's FIFO; ``spawn``: also asks for the worker, to be used at once."""
        number = len(self._worker_pipes)
        path = os.path.join(self.control, f"w{number}")
        os.mkfifo(path, 0o600)
        self._worker_pipes.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        if spawn:
            self._spawn(number)
        else:
            self._idle_workers.append(number)
        return number

    def answered(self, number: int, status: int) -> None:
        """The runner says that a command has ended."""
        command = self._commands.get(number)
        if command is not None:
            self._finish(command, status)

    def everyone_killed(self, breach: str = "") -> None:
        """A command has killed every process but PID 1, or a limit was passed: each command's end, and a result."""
        for command in list(self._commands.values()):
            if breach:
                self.pays(command.number, breach)
            else:
                command.buffers[1].feed(b"[every process of the sandbox was killed]\n")
            self._finish(command, 137)

    def pays(self, number: int, breach: str) -> None:
        """A command is about to be killed because the sandbox passed a limit; its result will say so."""
        command = self._commands.get(number)
        if command is not None and not command.breach:
            command.breach = breach
            command.buffers[1].feed(f"[killed: {breach}]\n".encode())

    def fail(self, why: str) -> None:
        """The container is gone: what ran raises :class:`SandboxError`."""
        for command in list(self._commands.values()):
            self._withdraw(command)
            if not command.done.done():
                command.done.set_exception(SandboxError(why))
                command.done.exception()

    def close(self) -> None:
        """Gives every descriptor back."""
        loop = asyncio.get_running_loop()
        for pair in self._pairs:
            for descriptor in pair.descriptors:
                if descriptor >= 0:
                    loop.remove_reader(descriptor)
            pair.close()
        for descriptor in self._worker_pipes:
            os.close(descriptor)
        self._worker_pipes = []

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str] | None,
        user_input: bytes | None,
        timeout_s: float | None,
        limit: int,
    ) -> ExecResult:
        """Runs one command to its end; see :meth:`megaflow_hpc.types.Sandbox.exec`. ``limit``: bytes kept a stream."""
        self._check_alive()
        started = time.monotonic()
        async with self._slots:
            self._check_alive()
            running = self._launch(command, cwd, env or {}, user_input, limit)
            timed_out = False
            try:
                if timeout_s is None:
                    status = await asyncio.shield(running.done)
                else:
                    await asyncio.wait((running.done,), timeout=max(0.0, timeout_s - (time.monotonic() - started)))
                    if not running.done.done():
                        timed_out = True
                        await self._kill_command(running)
                    status = await asyncio.shield(running.done)
            except asyncio.CancelledError:
                if not running.done.done():
                    await asyncio.shield(self._kill_command(running))
                raise
        out, err = running.buffers
        return ExecResult(
            exit_code=124 if timed_out else status,
            stdout_bytes=out.value(),
            stderr_bytes=err.value(),
            truncated=out.truncated or err.truncated,
            timed_out=timed_out,
            duration_s=time.monotonic() - started,
            breach=running.breach,
        )

    def _launch(
        self, command: str | Sequence[str], cwd: str, env: Mapping[str, str], user_input: bytes | None, limit: int
    ) -> _Command:
        self._number += 1
        pair = self._free_pairs.pop() if self._free_pairs else self._add_pair()
        worker = self._idle_workers.pop() if self._idle_workers else self.add_worker(spawn=True)
        running = _Command(self._number, worker, pair, limit)
        try:
            self._write_files(running, command, cwd, env, user_input)
            pair.open()
        except BaseException as error:
            self._remove_files(running)
            pair.close()
            self._free_pairs.append(pair)
            self._idle_workers.append(worker)
            if isinstance(error, OSError):
                raise SandboxError(
                    f"{self.control}: a command cannot be handed over ({error}); is scratch full?"
                ) from error
            raise
        loop = asyncio.get_running_loop()
        for stream, descriptor in enumerate(pair.descriptors):
            loop.add_reader(descriptor, self._read_output, running, stream)
        self._commands[running.number] = running
        os.write(self._worker_pipes[worker], b"%d\n" % running.number)
        return running

    def _write_files(
        self,
        running: _Command,
        command: str | Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        user_input: bytes | None,
    ) -> None:
        number = running.number
        stdin = "/dev/null"
        if user_input:
            stdin = f"{CONTROL_DIR}/i{number}"
            running.files.append(f"i{number}")
            write_new(os.path.join(self.control, f"i{number}"), user_input)
        if isinstance(command, str) and len(os.fsencode(command)) > _LONGEST_ARGUMENT:
            running.files.append(f"s{number}")
            write_new(os.path.join(self.control, f"s{number}"), command.encode("utf-8", "surrogateescape"))
            command = ["/bin/sh", f"{CONTROL_DIR}/s{number}"]
        text = command_text(number, command, cwd, env, stdin, running.pair.names)
        write_new(os.path.join(self.control, f"c{number}"), text.encode("utf-8", "surrogateescape"))

    def _read_output(self, command: _Command, stream: int) -> bool:
        """One read; ``True`` if there may be more. A closed end gives its reader up."""
        descriptor = command.pair.descriptors[stream]
        if descriptor < 0:
            return False
        data = read_available(descriptor)
        if data is None:
            return False
        if data:
            if command.number in self._commands:
                command.buffers[stream].feed(data)
            return True
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        command.pair.descriptors[stream] = -1
        if command.number not in self._commands:
            self._give_back(command.pair)
        return False

    def _finish(self, command: _Command, status: int) -> None:
        for stream in (0, 1):
            for _ in range(_LEFT_OVER_READS):
                if not self._read_output(command, stream):
                    break
        self._withdraw(command)
        self._idle_workers.append(command.worker)
        self._give_back(command.pair)
        if not command.done.done():
            command.done.set_result(status)

    def _withdraw(self, command: _Command) -> None:
        del self._commands[command.number]
        self._remove_files(command)

    def _remove_files(self, command: _Command) -> None:
        for name in command.files:
            try:
                os.unlink(os.path.join(self.control, name))
            except OSError:
                pass

    def _give_back(self, pair: StreamPair) -> None:
        if all(descriptor < 0 for descriptor in pair.descriptors):
            pair.descriptors = []
            self._free_pairs.append(pair)

    async def _kill_command(self, command: _Command) -> None:
        init = self.init
        if init is not None:
            marker = b"%s=%d" % (MARKER.encode(), command.number)
            await asyncio.to_thread(kill_marked, init.pid, marker)
        await asyncio.wait((command.done,), timeout=KILL_GRACE_S)
        if not command.done.done():  # not even SIGKILL ends it: the container goes
            if init is not None:
                init.kill()
            await asyncio.wait((command.done,), timeout=KILL_GRACE_S)

    # --- small parts --------------------------------------------------------------------------------------------

    def _add_pair(self) -> StreamPair:
        pair = StreamPair(self.control, len(self._pairs))
        self._pairs.append(pair)
        return pair

    def _check_alive(self) -> None:
        if (why := self._why_ended()) is not None:
            raise SandboxError(f"the sandbox's container has ended: {why}")
