"""One command of a sandbox: the record or shell text that starts it, its worker and its result."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from megaflow_hpc.environments.sandbox.commands.streams import CappedBuffer, StreamPair
from megaflow_hpc.environments.sandbox.spec import check_variables
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.process import environment
from megaflow_hpc.types import ExecResult

MARKER = "MEGAFLOW_COMMAND"
"""Environment variable that marks the processes of a command, so that a timeout can find them."""

MAX_RECORD_BYTES = 4096
"""Maximum size of a record in bytes: the compiled runner reads it from the FIFO in one piece."""

MAX_LINE_BYTES = 2000
"""Maximum length in bytes of a shell line sent through a FIFO."""

_ONE_PROGRAM = re.compile(r"[\w.+-]*/[\w./+-]*(?: [\w./:=@%,+-]+)*", re.ASCII)
"""Matches a path followed by plain words. Such a program is started directly, without ``/bin/sh -c``."""

FIRST_WORKERS = 2
"""Number of workers started with the container. A second one is ready while the first forks."""

_MIN_READ_DELAY_S, _MAX_READ_DELAY_S = 0.002, 0.03
"""Delay in seconds before the output of a running command is read. It grows when more commands than processors run.
Most commands of an agent finish sooner."""
_PROCESSORS = len(os.sched_getaffinity(0))


def make_fifo(path: str) -> int:
    """Creates a FIFO and returns it opened for reading and writing, so that its reader never sees end-of-file."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class Worker:
    """A worker of the runner and the FIFO it reads from."""

    def __init__(self, number: int, pipe: int) -> None:
        self.number = number
        self.pipe = pipe
        self.command: RunningCommand | None = None


class RunningCommand:
    """A running command.

    Args:
        number: Command number in the container; its processes have it in their environment.
        limit: Number of bytes kept of each stream.
    """

    under_way: ClassVar[int] = 0
    """Number of commands currently running in all containers."""

    def __init__(self, number: int, worker: Worker, pair: StreamPair, limit: int) -> None:
        self.number = number
        self.worker = worker
        self.pair = pair
        self.buffers = (CappedBuffer(limit), CappedBuffer(limit))
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.files: list[str] = []
        self.breach = ""
        self.on_output: Callable[[bytes], object] | None = None
        self.read_timer: asyncio.TimerHandle | None = None
        self.killing: asyncio.Task[None] | None = None

    @classmethod
    def read_delay_s(cls) -> float:
        """Returns the delay in seconds before output is first read. A read costs as much as a short command."""
        return min(_MAX_READ_DELAY_S, _MIN_READ_DELAY_S * max(1.0, cls.under_way / _PROCESSORS))

    def end(self, status: int | SandboxError) -> None:
        """Resolves ``done`` unless it is already resolved."""
        if not self.done.done():
            if isinstance(status, int):
                self.done.set_result(status)
            else:
                self.done.set_exception(status)
                self.done.exception()

    def result(self, status: int, *, timed_out: bool, started: float) -> ExecResult:
        """Returns the result. ``started`` is a time of the monotonic clock in seconds."""
        out, err = self.buffers
        return ExecResult(
            exit_code=124 if timed_out else status,
            stdout_bytes=out.value(),
            stderr_bytes=err.value(),
            truncated=out.truncated or err.truncated,
            timed_out=timed_out,
            duration_s=time.monotonic() - started,
            breach=self.breach,
        )


class CommandWorkers:
    """The workers of one container's runner.

    Args:
        control: Control directory on the host.
        spawn: Asks the runner to start worker number K.
    """

    def __init__(self, control: str, spawn: Callable[[int], None]) -> None:
        self._control = control
        self._spawn = spawn
        self._all: list[Worker] = []
        self._idle: deque[Worker] = deque()

    def prepare(self) -> None:
        """Creates the FIFOs of the first workers, which the runner starts when it starts itself."""
        for _ in range(FIRST_WORKERS):
            self._idle.append(self._add())

    def _add(self) -> Worker:
        number = len(self._all)
        worker = Worker(number, make_fifo(os.path.join(self._control, f"w{number}")))
        self._all.append(worker)
        self._spawn(number)
        return worker

    def find(self, number: int) -> Worker | None:
        """Returns a worker by number, or ``None`` if it does not exist."""
        return self._all[number] if number < len(self._all) else None

    def take(self) -> Worker:
        """Returns an idle worker, or a new one if all are busy."""
        return self._idle.popleft() if self._idle else self._add()

    def give_back(self, worker: Worker) -> None:
        """Marks a worker as idle."""
        self._idle.append(worker)

    def lost(self, worker: Worker) -> None:
        """Removes a worker that exited while idle."""
        self._idle = deque(idle for idle in self._idle if idle is not worker)

    def close(self) -> None:
        """Closes the FIFOs of all workers."""
        for worker in self._all:
            os.close(worker.pipe)
        self._all = []


def command_of(pid: int) -> int | None:
    """Returns the command number of a process, or ``None`` for the runner and for unmarked processes."""
    marker = MARKER.encode() + b"="
    for entry in environment(pid):
        number = entry[len(marker) :]
        if entry.startswith(marker) and number.isdigit() and len(number) < 10:
            return int(number)
    return None


def record(
    number: int, command: str | Sequence[str], cwd: str, env: Mapping[str, str], stdin: str, streams: tuple[str, str]
) -> bytes:
    """Returns the record of one command for the compiled runner (runner.c)."""
    check_variables(env)
    outputs = (f"{CONTROL_DIR}/{name}" for name in streams)
    variables = (f"{name}={value}" for name, value in env.items())
    fields = (stdin, *outputs, f"PWD={cwd}", f"{MARKER}={number}", *variables, "", *one_program(command), "")
    return "\0".join(fields).encode("utf-8", "surrogateescape")


def command_text(
    number: int, command: str | Sequence[str], cwd: str, env: Mapping[str, str], stdin: str, streams: tuple[str, str]
) -> str:
    """Returns the shell text of one command, which the waiting child evaluates."""
    words = one_program(command)
    check_variables(env)
    exports = "".join(f" {name}={shlex.quote(value)}" for name, value in env.items())
    return (
        f"exec <{stdin} >{CONTROL_DIR}/{streams[0]} 2>{CONTROL_DIR}/{streams[1]}; cd {shlex.quote(cwd)} || exit 126; "
        f"export {MARKER}={number}{exports}; exec $_mf_s {' '.join(map(shlex.quote, words))}"
    )


def one_program(command: str | Sequence[str]) -> list[str]:
    """Returns the argv of a command. A string runs through ``/bin/sh -c`` unless it consists only of plain words."""
    if isinstance(command, str):
        words = command.split(" ") if _ONE_PROGRAM.fullmatch(command) else ["/bin/sh", "-c", command]
    else:
        words = list(command)
    if not words or any("\0" in word for word in words):
        raise SandboxError(f"command {command!r}: expected at least one word and no zero byte")
    return words


def one_line(text: str) -> bytes | None:
    """Returns the text as one line for a FIFO, or ``None`` if it is too long and must be sourced from a file."""
    if len(text) > MAX_LINE_BYTES or not text.isascii():
        return None
    return text.replace("\n", "'\"$_mf_n\"'").encode() + b"\n"


def session_line(command: str, streams: tuple[str, str]) -> str:
    """Returns the line that runs one command in a session's shell."""
    return f"eval {shlex.quote(command)} </dev/null >{CONTROL_DIR}/{streams[0]} 2>{CONTROL_DIR}/{streams[1]} 8<&- 9>&-"
