"""One running container and the commands in it: the host's side of ``runner.sh``.

::

    CONTROL/            0700 on the host, bound read-only at /.megaflow: nothing inside can write, link or remove here
      runner.sh  env    what PID 1 runs, and what it exports
      w0 w1 …           FIFOs: command numbers for worker 0, 1, …
      c17               command 17 as a shell fragment, removed when it is done
      i17               its standard input, if it has any
      o0 e0 o1 e1 …     FIFOs: pairs of output streams, each lent to one command at a time

A command costs one small file, two opens, one write and one line back. Its standard output and error are read here as
they come, so what a command prints is bounded in memory, and nothing of it touches a disk.

The container ends with its owner: the kernel kills it with the thread that started it, and its runner kills everything
when its command pipe closes. Where Apptainer is setuid only the second holds.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from megaflow_hpc.environments.apptainer import CONTROL_DIR, clean_environment, last_line
from megaflow_hpc.environments.fragments import MARKER, command_text, environment_text
from megaflow_hpc.environments.processes import dies_with_parent, kill_marked, namespace_init
from megaflow_hpc.environments.spec import check_variables
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

_STDERR_KEPT = 16384
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


ENDED_FROM_WITHIN = 86
"""Exit status of runner.sh when a command has killed every process but PID 1."""


class Container:
    """Started once, used until :meth:`kill`. Belongs to the event loop that started it."""

    def __init__(self, control: str, *, on_started: Callable[[Identity], None] | None = None) -> None:
        self.control = control
        self.init: Identity | None = None
        """The container's PID 1, as the host sees it."""
        self._on_started = on_started
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._commands: dict[int, _Command] = {}
        self._idle_workers: list[int] = []
        self._worker_pipes: list[int] = []
        self._free_pairs: list[StreamPair] = []
        self._pairs: list[StreamPair] = []
        self._slots = asyncio.Semaphore(MAX_WORKERS)
        self._answer = b""
        self._stderr = bytearray()
        self._ready: asyncio.Future[None] | None = None
        self._ended = asyncio.Event()
        self._killing = False
        self._judgement: asyncio.Task[None] | None = None
        self.lost = ""
        """How the container ended, where nothing inside it did that: preemption, a kill of the job, the OOM killer."""

    @property
    def alive(self) -> bool:
        """``False`` once every process is gone; a command can do that (``kill -9 -1``)."""
        return self._process is not None and not self._ended.is_set()

    # --- life ---------------------------------------------------------------------------------------------------

    def prepare(self, env: Mapping[str, str], as_root: bool) -> None:
        """Writes what PID 1 reads."""
        check_variables(env)
        os.mkdir(self.control, 0o700)
        runner = resources.files("megaflow_hpc.environments").joinpath("runner.sh").read_bytes()
        self._write("runner.sh", runner)
        self._write("env", environment_text(env, as_root).encode("utf-8", "surrogateescape"))

    async def start(self, argv: Sequence[str], *, temporary: str, timeout_s: float) -> None:
        """Runs ``argv``, whose last words must be the runner, until it says that it is ready."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._add_worker()
        try:
            self._process = subprocess.Popen(
                [*dies_with_parent(), *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean_environment(temporary),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"{argv[0]}: cannot be run ({error})") from error
        if (identity := Identity.of(self._process.pid)) and self._on_started:
            self._on_started(identity)
        assert self._process.stdout
        assert self._process.stderr
        for pipe, reader in ((self._process.stdout, self._read_answers), (self._process.stderr, self._read_stderr)):
            os.set_blocking(pipe.fileno(), False)
            loop.add_reader(pipe.fileno(), reader, pipe.fileno())
        self._spawn(0)
        try:
            await asyncio.wait_for(self._ready, timeout_s)
        except TimeoutError:
            await self.kill()
            raise SandboxError(f"the container was not ready after {timeout_s:g} s: {self.last_words()}") from None
        except BaseException:
            await self.kill()
            raise
        init = namespace_init(self._process.pid)
        self.init = Identity.of(init) if init else None

    def last_words(self) -> str:
        text = self._stderr.decode("utf-8", "replace")
        if "/bin/sh" in text and "no such file" in text.lower():
            return f"the image has no /bin/sh, which every command needs ({last_line(text)})"
        return last_line(text)

    async def kill(self) -> None:
        """Ends every process of the container at once; returns when they are gone. Idempotent."""
        process = self._process
        if process is None or self._killing:
            return
        self._killing = True
        if self.init is None:
            found = namespace_init(process.pid)
            self.init = Identity.of(found) if found else None
        if self.init is not None:
            self.init.kill()
        else:
            process.kill()
        try:
            await asyncio.wait_for(asyncio.shield(self._ended.wait()), KILL_GRACE_S)
        except TimeoutError:
            process.kill()
            self._end()
        await self._reap(process)
        self._release()

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """Apptainer's own process follows its container within a few milliseconds."""
        deadline = time.monotonic() + KILL_GRACE_S
        pause = 0.0005
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)

    def _end(self) -> None:
        """The status pipe closed: PID 1 is gone, and with it every process."""
        loop = asyncio.get_running_loop()
        process = self._process
        assert process is not None
        assert process.stdout is not None
        loop.remove_reader(process.stdout.fileno())
        self._ended.set()
        if process.stderr is not None:
            while self._read_stderr(process.stderr.fileno()):
                pass
            loop.remove_reader(process.stderr.fileno())
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxError(f"the container did not start: {self.last_words()}"))
        if self._killing:
            self._fail_commands("the sandbox was stopped or reset while a command ran")
        else:
            self._judgement = loop.create_task(self._judge(process))

    async def _judge(self, process: subprocess.Popen[bytes]) -> None:
        """Who ended the container? From within only all processes but PID 1 can be killed, and then it says so."""
        await self._reap(process)
        if process.returncode == ENDED_FROM_WITHIN:
            for command in list(self._commands.values()):
                command.buffers[1].feed(b"[every process of the sandbox was killed]\n")
                self._finish(command, 137)
            return
        code = process.returncode
        self.lost = f"the container was ended from outside ({f'signal {-code}' if code < 0 else f'status {code}'})"
        self._fail_commands(self.lost)

    def _fail_commands(self, why: str) -> None:
        for command in list(self._commands.values()):
            self._withdraw(command)
            if not command.done.done():
                command.done.set_exception(SandboxError(why))
                command.done.exception()

    async def check(self) -> None:
        """Raises :class:`SandboxError` if the container was ended from outside."""
        if self._judgement is not None:
            await self._judgement
        if self.lost:
            raise SandboxError(self.lost)

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        process = self._process
        assert process is not None
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        for pair in self._pairs:
            for descriptor in pair.descriptors:
                if descriptor >= 0:
                    loop.remove_reader(descriptor)
            pair.close()
        for descriptor in self._worker_pipes:
            os.close(descriptor)
        self._worker_pipes = []

    # --- what the runner says -----------------------------------------------------------------------------------

    def _read_answers(self, descriptor: int) -> None:
        data = read_available(descriptor)
        if data is None:
            return
        if not data:
            self._end()
            return
        *lines, self._answer = (self._answer + data).split(b"\n")
        self._answer = self._answer[-256:]
        for line in lines:
            if line == b"ready" and self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
                continue
            words = line.split()
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
                command = self._commands.get(int(words[0]))
                if command is not None:
                    self._finish(command, int(words[1]))

    def _read_stderr(self, descriptor: int) -> bool:
        data = read_available(descriptor)
        if data:
            self._stderr += data
            del self._stderr[:-_STDERR_KEPT]
            return True
        if data == b"":
            asyncio.get_running_loop().remove_reader(descriptor)
        return False

    # --- commands -----------------------------------------------------------------------------------------------

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
        if not self.alive:
            raise SandboxError(f"the sandbox's container has ended: {self.last_words()}")
        started = time.monotonic()
        async with self._slots:
            if not self.alive:
                raise SandboxError(f"the sandbox's container has ended: {self.last_words()}")
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
        )

    def _launch(
        self, command: str | Sequence[str], cwd: str, env: Mapping[str, str], user_input: bytes | None, limit: int
    ) -> _Command:
        self._number += 1
        pair = self._free_pairs.pop() if self._free_pairs else self._add_pair()
        worker = self._idle_workers.pop() if self._idle_workers else self._add_worker(spawn=True)
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
            self._write(f"i{number}", user_input)
        if isinstance(command, str) and len(os.fsencode(command)) > _LONGEST_ARGUMENT:
            running.files.append(f"s{number}")
            self._write(f"s{number}", command.encode("utf-8", "surrogateescape"))
            command = ["/bin/sh", f"{CONTROL_DIR}/s{number}"]
        text = command_text(number, command, cwd, env, stdin, running.pair.names)
        self._write(f"c{number}", text.encode("utf-8", "surrogateescape"))

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

    def _add_worker(self, spawn: bool = False) -> int:
        number = len(self._worker_pipes)
        path = os.path.join(self.control, f"w{number}")
        os.mkfifo(path, 0o600)
        self._worker_pipes.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        if spawn:
            self._spawn(number)
        else:
            self._idle_workers.append(number)
        return number

    def _spawn(self, number: int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), b"%d\n" % number)
        except BrokenPipeError:
            pass  # its end is seen, with its cause, on the status pipe

    def _write(self, name: str, data: bytes) -> None:
        descriptor = os.open(
            os.path.join(self.control, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)
