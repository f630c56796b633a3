"""One command in a sandbox: the record or shell text that starts it, its worker, its output streams and its result."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from megaflow_hpc.environments.sandbox.spec import check_variables
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.process import environment
from megaflow_hpc.types import ExecResult

MARKER = "MEGAFLOW_COMMAND"
"""Environment variable that marks the processes of a command, so that a timeout can find them."""

MAX_RECORD_BYTES = 4096
"""Maximum size in bytes of a record that starts a command. The compiled runner reads a record from the FIFO in one
piece."""

MAX_LINE_BYTES = 2000
"""Maximum length in bytes of a shell line sent through a FIFO."""

_ONE_PROGRAM = re.compile(r"[\w.+-]*/[\w./+-]*(?: [\w./:=@%,+-]+)*", re.ASCII)
"""Matches a path followed by plain words. Such a program is started directly, without ``/bin/sh -c``."""

FIRST_WORKERS = 2
"""Number of workers started with the container. With two, one is ready while the other forks."""

_MIN_READ_DELAY_S, _MAX_READ_DELAY_S = 0.002, 0.03
"""Shortest and longest delay in seconds before the output of a running command is read. Most commands finish sooner.
The delay grows if there are more running commands than processors."""
_PROCESSORS = len(os.sched_getaffinity(0))

READ_SIZE = 65536
"""Maximum size of one read in bytes, which is the capacity of a pipe."""

MAX_LEFT_PAIRS = 32
"""Maximum number of stream pairs held by background processes in one container. A pair uses two of this process's
descriptors."""


def make_fifo(path: str) -> int:
    """Creates a FIFO and returns a descriptor for reading and writing, so that readers never see end-of-file."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class CappedBuffer:
    """Keeps the first and last ``limit // 2`` bytes of a stream. Uses at most about twice ``limit`` bytes of memory."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        """Adds the next bytes of the stream."""
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._tail_limit + READ_SIZE:
                self._trim()

    def _trim(self) -> None:
        surplus = len(self._tail) - self._tail_limit
        if surplus > 0:
            self._dropped += surplus
            del self._tail[:surplus]

    @property
    def truncated(self) -> bool:
        """True if bytes in the middle were dropped."""
        return self._dropped + len(self._tail) > self._tail_limit

    def value(self) -> bytes:
        """Returns the head and tail. If bytes were dropped, a line between them gives their number."""
        self._trim()
        if not self._dropped:
            return bytes(self._head + self._tail)
        return b"%s\n[... %d bytes left out ...]\n%s" % (self._head, self._dropped, self._tail)


class StreamPair:
    """The two FIFOs that a command writes to. They are reused once all of its processes have closed them.

    A background process keeps its command's pair open. Its output is read and discarded. A server that logs to standard
    output therefore neither blocks nor dies when its command ends.
    """

    def __init__(self, directory: str, number: int) -> None:
        self.names = (f"o{number}", f"e{number}")
        self._paths = tuple(os.path.join(directory, name) for name in self.names)
        for path in self._paths:
            os.mkfifo(path, 0o600)
        self.descriptors: list[int] = []
        self.held = [True, True]
        """For each stream, whether a process may still write to it."""
        self._used = False

    def open(self) -> None:
        """Opens the FIFOs for reading if they are closed."""
        if not self.descriptors:
            self.descriptors = [self._open(path) for path in self._paths]

    def renew(self) -> None:
        """Reopens the FIFOs that all writers have closed. Polling them would otherwise report end-of-file forever."""
        if self._used:
            for stream, old in enumerate(self.descriptors):
                if self.held[stream]:
                    self.descriptors[stream] = self._open(self._paths[stream])
                    os.close(old)
            self._used = False

    def reuse(self) -> None:
        """Prepares the FIFOs for the next command, once all processes have closed both."""
        self.held = [True, True]
        self._used = True

    def _open(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the FIFOs' reading ends."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def remove(self) -> None:
        """Removes the FIFOs. Further output of background processes is lost."""
        for path in self._paths:
            os.unlink(path)


class StreamPairs:
    """The stream pairs of one container. A command uses a pair until all of its processes have closed it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._made = 0
        self._all: dict[StreamPair, None] = {}
        self._free: list[StreamPair] = []
        self._held: dict[StreamPair, None] = {}
        """Pairs held by background processes, oldest first."""

    def prepare(self, count: int) -> None:
        """Opens ``count`` pairs of FIFOs in advance."""
        pairs = [self.take() for _ in range(count)]
        for pair in pairs:
            pair.open()
        self._free += pairs

    def take(self) -> StreamPair:
        """Returns a free pair of FIFOs, or a new pair if all are in use."""
        if self._free:
            return self._free.pop()
        pair = StreamPair(self._directory, self._made)
        self._made += 1
        self._all[pair] = None
        return pair

    def give_back(self, pair: StreamPair) -> bool:
        """Frees a pair of FIFOs for the next command. Returns ``False`` if a process in the container still has it
        open."""
        if any(pair.held):
            return False
        self._held.pop(pair, None)
        pair.reuse()
        self._free.append(pair)
        return True

    def leave(self, pair: StreamPair, remove_reader: Callable[[int], object]) -> None:
        """Records that background processes hold a pair.

        If more than :data:`MAX_LEFT_PAIRS` are held, the oldest loses its reader, and its next writer gets SIGPIPE.
        """
        self._held[pair] = None
        if len(self._held) > MAX_LEFT_PAIRS:
            oldest = next(iter(self._held))
            del self._held[oldest], self._all[oldest]
            _close(oldest, remove_reader)
            oldest.remove()

    def unused(self, pair: StreamPair) -> None:
        """Frees a pair of FIFOs that no command has used."""
        self._free.append(pair)

    def close(self, remove_reader: Callable[[int], object]) -> None:
        """Calls ``remove_reader`` for each descriptor and closes it."""
        for pair in self._all:
            _close(pair, remove_reader)
        self._all = {}


def _close(pair: StreamPair, remove_reader: Callable[[int], object]) -> None:
    for descriptor in pair.descriptors:
        remove_reader(descriptor)
    pair.close()


def read_available(descriptor: int) -> bytes | None:
    """Returns up to :data:`READ_SIZE` bytes. Returns ``None`` if no data is available yet, and ``b""`` at
    end-of-file."""
    try:
        return os.read(descriptor, READ_SIZE)
    except BlockingIOError:
        return None


class Worker:
    """A process in the container that starts commands, and the FIFO from which it reads them."""

    def __init__(self, number: int, pipe: int) -> None:
        self.number = number
        self.pipe = pipe
        self.command: RunningCommand | None = None


class RunningCommand:
    """State of a command while it runs in a container.

    Args:
        number: Number of the command in its container. It is in the environment of the command's processes.
        limit: Maximum number of bytes kept of each stream.
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
        """Returns the delay in seconds before output is first read. A read takes as long as a short command."""
        return min(_MAX_READ_DELAY_S, _MIN_READ_DELAY_S * max(1.0, cls.under_way / _PROCESSORS))

    def end(self, status: int | SandboxError) -> None:
        """Completes the future ``done`` with an exit status or an error, unless it is already complete."""
        if not self.done.done():
            if isinstance(status, int):
                self.done.set_result(status)
            else:
                self.done.set_exception(status)
                self.done.exception()

    def result(self, status: int, *, timed_out: bool, started: float) -> ExecResult:
        """Returns the command's result. ``started`` is its start time on the monotonic clock, in seconds."""
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
    """The worker processes of one container. Each runs one command at a time.

    Args:
        control: The container's control directory on the host.
        spawn: Asks the container's runner to start a worker. Receives the worker's number.
    """

    def __init__(self, control: str, spawn: Callable[[int], None]) -> None:
        self._control = control
        self._spawn = spawn
        self._all: list[Worker] = []
        self._idle: deque[Worker] = deque()

    def prepare(self) -> None:
        """Starts the workers for the first commands."""
        for _ in range(FIRST_WORKERS):
            self._idle.append(self._add())

    def _add(self) -> Worker:
        number = len(self._all)
        worker = Worker(number, make_fifo(os.path.join(self._control, f"w{number}")))
        self._all.append(worker)
        self._spawn(number)
        return worker

    def find(self, number: int) -> Worker | None:
        """Returns the worker with number ``number``, or ``None`` if it does not exist."""
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
    """Returns the number of the command that a process belongs to. Returns ``None`` for unmarked processes, such as the
    runner."""
    marker = MARKER.encode() + b"="
    for entry in environment(pid):
        number = entry[len(marker) :]
        if entry.startswith(marker) and number.isdigit() and len(number) < 10:
            return int(number)
    return None


def record(
    number: int, command: str | Sequence[str], cwd: str, env: Mapping[str, str], stdin: str, streams: tuple[str, str]
) -> bytes:
    """Encodes a command as a record for the compiled runner (runner.c)."""
    check_variables(env)
    outputs = (f"{CONTROL_DIR}/{name}" for name in streams)
    variables = (f"{name}={value}" for name, value in env.items())
    fields = (stdin, *outputs, f"PWD={cwd}", f"{MARKER}={number}", *variables, "", *one_program(command), "")
    return "\0".join(fields).encode("utf-8", "surrogateescape")


def command_text(
    number: int, command: str | Sequence[str], cwd: str, env: Mapping[str, str], stdin: str, streams: tuple[str, str]
) -> str:
    """Returns the shell text that a worker evaluates to run a command."""
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
    """Encodes text as one line for a FIFO. Returns ``None`` if it is not ASCII or too long. The caller must then pass
    it in a file.
    """
    if len(text) > MAX_LINE_BYTES or not text.isascii():
        return None
    return text.replace("\n", "'\"$_mf_n\"'").encode() + b"\n"
