"""Sends commands to a container's workers, reads the commands' output and kills commands after a timeout.

A command costs one write to the FIFO of an idle worker, and one line of reply. Its output goes to two FIFOs whose
reading ends are already open. Output is read when the command ends, or earlier if the command runs for a while.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from megaflow_hpc.environments.sandbox.commands.command import (
    FIRST_WORKERS,
    MARKER,
    MAX_RECORD_BYTES,
    CommandWorkers,
    RunningCommand,
    StreamPairs,
    command_text,
    one_line,
    read_available,
    record,
)
from megaflow_hpc.environments.sandbox.processes import kill_marked
from megaflow_hpc.errors import LostError, SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.process import Identity
from megaflow_hpc.types import ExecResult

MAX_WORKERS = 64
"""Maximum number of concurrent commands in one sandbox. Further commands wait. A worker is one process or two small
shells."""

KILL_GRACE_S = 10.0
"""Timeout in seconds for a killed command to end. One of its processes may be in uninterruptible sleep."""

_LOST_WORKER_S = 1.0
"""A worker counts as lost if its killed command has had no process for this many seconds but has not ended."""

_LEFT_OVER_READS = 32
"""Maximum number of reads (64 KiB each) per stream after a command ends. A background process may print forever."""

_MAX_ARGUMENT_BYTES = 100_000
"""Maximum size in bytes of one argument. The kernel accepts at most 128 KiB."""


class CommandDispatcher:
    """Sends commands to the worker processes of one container, and collects the commands' output.

    Args:
        control: The container's control directory on the host.
        spawn: Asks the container's runner to start a worker. Receives the worker's number.
        why_ended: Returns why the container has ended, or ``None`` while it runs.
        give_up: Kills the container if a command cannot be killed. Receives the reason.
    """

    def __init__(
        self,
        control: str,
        spawn: Callable[[int], None],
        why_ended: Callable[[], str | None],
        give_up: Callable[[str], None],
    ) -> None:
        self.control = control
        self.init: Identity | None = None
        """The container's PID 1 on the host, once known."""
        self.by_program = False
        """True if the compiled runner starts commands. It reads records, while the shell runner reads lines."""
        self._why_ended = why_ended
        self._give_up = give_up
        self._number = 0
        self._commands: dict[int, RunningCommand] = {}
        self.workers = CommandWorkers(control, spawn)
        self._pairs = StreamPairs(control)
        self._slots = asyncio.Semaphore(MAX_WORKERS)

    def prepare(self) -> None:
        """Starts the workers and opens the streams for the first commands. Call it once limits are set on the
        runner."""
        self.workers.prepare()
        self._pairs.prepare(FIRST_WORKERS)

    def answered(self, worker: int, status: int | None) -> bool:
        """Finishes the command of a worker that has reported a status. Returns whether the worker had a command.

        Args:
            status: Exit status, or ``None`` if the worker could not start the command and has exited.
        """
        answering = self.workers.find(worker)
        command = answering.command if answering else None
        if command is None:
            if answering and status is None:
                self.workers.lost(answering)
            return False
        if status is None:
            command.buffers[1].feed(b"[no process could be started: the sandbox is at its limit]\n")
            self.finish(command, 2, worker_exited=True)
        else:
            self.finish(command, status)
        return True

    def everyone_killed(self, breach: str = "") -> None:
        """Finishes all commands with a result, after a command killed every process or the sandbox exceeded a limit."""
        for command in list(self._commands.values()):
            if breach:
                self.mark_breached(command.number, breach)
            else:
                command.buffers[1].feed(b"[every process of the sandbox was killed]\n")
            self.finish(command, 137)

    def mark_breached(self, number: int, breach: str) -> None:
        """Records the exceeded limit for which a command is killed, so that its result names the limit."""
        command = self._commands.get(number)
        if command is not None and not command.breach:
            command.breach = breach
            command.buffers[1].feed(f"[killed: {breach}]\n".encode())

    def fail(self, why: str) -> None:
        """Makes all running commands raise :class:`LostError`, because the container has ended."""
        for command in list(self._commands.values()):
            self._withdraw(command)
            if command.read_timer is not None:
                command.read_timer.cancel()
            command.end(LostError(why))

    def close(self) -> None:
        """Closes all descriptors."""
        self._pairs.close(asyncio.get_running_loop().remove_reader)
        self.workers.close()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str] | None,
        user_input: bytes | None,
        timeout_s: float | None,
        limit: int,
        on_output: Callable[[bytes], bool] | None = None,
    ) -> ExecResult:
        """Runs one command until it ends. See :meth:`megaflow_hpc.types.Sandbox.exec`.

        Args:
            limit: Maximum number of bytes kept of each stream.
            on_output: Receives standard output as it arrives, which the result then omits. Returning ``False`` kills
                the command.
        """
        self._check_alive()
        started = time.monotonic()
        async with self._slots:
            self._check_alive()
            running = self.launch(command, cwd, env or {}, user_input, limit)
            if on_output is not None:
                # A background process may still print after the command has ended.
                running.on_output = lambda data: on_output(data) or running.done.done() or self.kill(running)
            timer = None
            if timeout_s is not None:
                left = max(0.0, timeout_s - (time.monotonic() - started))
                timer = asyncio.get_running_loop().call_later(left, self.kill, running)
            try:
                status = await asyncio.shield(running.done)
                if running.killing is not None:
                    await asyncio.shield(running.killing)
            except asyncio.CancelledError:
                await asyncio.shield(self.kill(running))
                raise
            finally:
                if timer is not None:
                    timer.cancel()
        return running.result(status, timed_out=running.killing is not None, started=started)

    def launch(
        self,
        command: str | Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        user_input: bytes | None,
        limit: int,
    ) -> RunningCommand:
        """Sends a command to a worker. The returned command's ``done`` resolves when it ends."""
        self._check_alive()
        self._number += 1
        pair = worker = running = None
        try:
            pair = self._pairs.take()
            worker = self.workers.take()
            running = RunningCommand(self._number, worker, pair, limit)
            line = self._line(running, command, cwd, env, user_input)
            pair.open()
            os.write(worker.pipe, line)
        except BaseException as error:
            if running is not None:
                self._remove_files(running)
            if pair is not None:
                self._pairs.unused(pair)
            if worker is not None:
                self.workers.give_back(worker)
            if isinstance(error, OSError):
                raise SandboxError(
                    f"{self.control}: a command cannot be sent to its worker ({error}); is scratch full?"
                ) from error
            raise
        worker.command = self._commands[running.number] = running
        RunningCommand.under_way += 1
        running.read_timer = asyncio.get_running_loop().call_later(running.read_delay_s(), self._read_along, running)
        return running

    def _line(
        self,
        running: RunningCommand,
        command: str | Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        user_input: bytes | None,
    ) -> bytes:
        """Returns the line or record to send to the worker. Long commands are written to a file, and the path is sent
        instead."""
        stdin = self._file(running, "i", user_input) if user_input else "/dev/null"
        if isinstance(command, str) and len(os.fsencode(command)) > _MAX_ARGUMENT_BYTES:
            command = ["/bin/sh", self._file(running, "s", command.encode("utf-8", "surrogateescape"))]
        if self.by_program:
            data = record(running.number, command, cwd, env, stdin, running.pair.names)
            return data if len(data) <= MAX_RECORD_BYTES else self._file(running, "c", data).encode() + b"\0"
        text = command_text(running.number, command, cwd, env, stdin, running.pair.names)
        line = one_line(text)
        if line is None:
            line = b". %s\n" % self._file(running, "c", text.encode("utf-8", "surrogateescape")).encode()
        return line

    def _file(self, running: RunningCommand, kind: str, data: bytes) -> str:
        """Writes a file to the control directory and returns its path inside the container. The file is removed when
        the command ends."""
        name = f"{kind}{running.number}"
        running.files.append(name)
        with open(os.path.join(self.control, name), "xb") as file:
            file.write(data)
        return f"{CONTROL_DIR}/{name}"

    def _read_along(self, command: RunningCommand) -> None:
        """Starts reading output while the command runs."""
        command.read_timer = None
        loop = asyncio.get_running_loop()
        try:
            command.pair.renew()
        except OSError:  # this process has no free descriptor; try again later
            command.read_timer = loop.call_later(10 * command.read_delay_s(), self._read_along, command)
            return
        open_streams = [stream for stream in (0, 1) if command.pair.held[stream]]
        for stream in open_streams:
            loop.add_reader(command.pair.descriptors[stream], self._read_output, command, stream)
        if command.number not in self._commands:  # a background process may have closed it before it was reopened
            self._read_rest(command, *open_streams)

    def _read_rest(self, command: RunningCommand, *streams: int) -> None:
        for stream in streams:
            reads = 1
            while self._read_output(command, stream) and reads < _LEFT_OVER_READS:
                reads += 1

    def _read_output(self, command: RunningCommand, stream: int) -> bool:
        """Reads a stream once, and frees it if all processes have closed it. Returns whether more output may be
        available."""
        if not command.pair.held[stream]:
            return False
        descriptor = command.pair.descriptors[stream]
        data = read_available(descriptor)
        if data is None:
            return False
        if data:
            if stream == 0 and command.on_output is not None:
                command.on_output(data)
            elif command.number in self._commands:
                command.buffers[stream].feed(data)
            return True
        if command.read_timer is None:
            asyncio.get_running_loop().remove_reader(descriptor)
        command.pair.held[stream] = False
        if command.number not in self._commands:
            self._pairs.give_back(command.pair)
        return False

    def finish(self, command: RunningCommand, status: int, worker_exited: bool = False) -> None:
        """Completes a command with its exit status and frees its worker and streams."""
        self._read_rest(command, 0, 1)
        timer = command.read_timer
        if timer is not None:
            timer.cancel()
        self._withdraw(command)
        if not worker_exited:
            self.workers.give_back(command.worker)
        if not self._pairs.give_back(command.pair):  # a background process still has them open
            self._pairs.leave(command.pair, asyncio.get_running_loop().remove_reader)
            if timer is not None:
                self._read_along(command)
        command.end(status)

    def _withdraw(self, command: RunningCommand) -> None:
        RunningCommand.under_way -= 1
        command.worker.command = None
        del self._commands[command.number]
        self._remove_files(command)

    def _remove_files(self, command: RunningCommand) -> None:
        for name in command.files:
            with suppress(OSError):
                os.unlink(os.path.join(self.control, name))

    def kill(self, command: RunningCommand) -> asyncio.Task[None]:
        """Starts killing all processes of a command. The returned task completes when the command has ended."""
        if command.killing is None:
            command.killing = asyncio.get_running_loop().create_task(self._kill_command(command))
        return command.killing

    async def _kill_command(self, command: RunningCommand) -> None:
        """Kills processes with the command's marker repeatedly until the command ends. New processes may not have the
        marker yet."""
        if self.init is None:
            return
        marker = b"%s=%d" % (MARKER.encode(), command.number)
        started = last_kill = time.monotonic()
        while True:
            ended = command.done.done()
            now = time.monotonic()
            if await asyncio.to_thread(kill_marked, self.init.pid, marker):
                last_kill = now
            if ended:
                return
            await asyncio.wait((command.done,), timeout=0.02)
            if now - last_kill > _LOST_WORKER_S or now - started > KILL_GRACE_S:
                break
        if not command.done.done():
            self._give_up("a command could not be killed, so the whole sandbox was")
            await asyncio.wait((command.done,), timeout=KILL_GRACE_S)

    def _check_alive(self) -> None:
        if (why := self._why_ended()) is not None:
            raise LostError(f"the sandbox's container has ended: {why}")
