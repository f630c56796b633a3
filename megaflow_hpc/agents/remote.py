"""Runs Python agents in their own processes: ``Zygote`` is the runner's side, ``RemoteSandbox`` is the agent's side.

The agent's process forwards each sandbox operation to the runner over a socket. It calls its model directly at the
gateway's address. Each frame on the socket holds one map. Errors are sent by class name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from megaflow_hpc import errors
from megaflow_hpc.agents.registry import AgentSpec, forked, record_of
from megaflow_hpc.errors import MegaflowError, SandboxError, UserCodeError
from megaflow_hpc.host import wire
from megaflow_hpc.texts import in_one_line
from megaflow_hpc.types import AgentResult, ExecResult, ModelEndpoint, Sandbox, Task

ASK_S = 20.0
"""Interval in seconds between pings of a process that runs a single agent."""
_OPERATIONS = frozenset({"exec", "upload", "download", "kill_processes"})


def frame(message: dict[str, Any]) -> bytes:
    """Packs and frames one message. Raises TypeError, ValueError or OverflowError if it cannot be packed."""
    return wire.frame(wire.pack(message, strict=True))


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Reads the next message. Returns ``None`` on end-of-file or if the message is invalid."""
    parcel = await wire.read_parcel(reader)
    try:
        message = None if parcel is None else wire.unpack(parcel)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def encode_error(error: BaseException) -> dict[str, str]:
    """Encodes an exception for :func:`decode_error` in the other process."""
    if isinstance(error, MegaflowError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": UserCodeError.__name__, "text": repr(error)}


def decode_error(message: dict[str, Any]) -> MegaflowError:
    """Decodes an exception. Classes that this package does not define become
    :class:`~megaflow_hpc.errors.UserCodeError`."""
    kind = getattr(errors, str(message["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, MegaflowError)):
        kind = UserCodeError
    return kind(str(message["text"]))


class RemoteSandbox:
    """A :class:`~megaflow_hpc.types.Sandbox` proxy in the agent's process. The runner executes its operations.

    Args:
        job: Number of the agent's job in this process.
    """

    def __init__(self, writer: asyncio.StreamWriter, job: int) -> None:
        self._writer, self._job = writer, job
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._calls = 0

    def deliver(self, answer: dict[str, Any]) -> None:
        """Delivers a response from the runner to the pending call."""
        future = self._waiting.pop(answer["id"], None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
    ) -> ExecResult:
        arguments = command if isinstance(command, str) else list(command)
        options = {"timeout_s": timeout_s, "cwd": cwd, "env": dict(env) if env else None, "user_input": user_input}
        return ExecResult(**(await self._ask("exec", [arguments], options)))

    async def upload(self, source: str, target: str) -> None:
        await self._ask("upload", [os.path.abspath(source), target])

    async def download(self, source: str, target: str) -> None:
        await self._ask("download", [source, os.path.abspath(target)])

    async def kill_processes(self) -> None:
        await self._ask("kill_processes", [])

    async def listen(self, port: int = 0) -> socket.socket:
        """Always raises :class:`~megaflow_hpc.errors.SandboxError`, because sockets cannot be passed to this
        process."""
        raise SandboxError("listen: an agent in its own process cannot listen in the sandbox")

    async def stop(self) -> None:
        """Always raises :class:`~megaflow_hpc.errors.SandboxError`, because only the runner may stop the sandbox."""
        raise SandboxError("stop: the sandbox is stopped when the rollout ends")

    async def _ask(self, operation: str, arguments: list[Any], options: dict[str, Any] | None = None) -> Any:
        self._calls += 1
        number = self._calls
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"job": self._job, "id": number, "do": operation, "arguments": arguments, "options": options or {}}
        self._writer.write(frame(message))
        await self._writer.drain()
        answer = await future
        if "error" in answer:
            raise decode_error(answer)
        return answer["value"]


class ProcessLostError(UserCodeError):
    """An agent's process ended before the agent returned a result."""


@dataclass
class AgentJob:
    """A request to run one agent in an agent process."""

    agent: AgentSpec
    task: Task
    sandbox: Sandbox
    """The runner's sandbox, which executes the agent's operations."""
    model: ModelEndpoint | None = None
    state: Mapping[str, Any] | None = None
    """State of a suspended rollout from which to resume."""
    label: str = "agent"
    """Prefix for each line that the agent prints."""
    timed: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context manager to enter around each sandbox operation."""
    result: asyncio.Future[AgentResult] = field(init=False)

    def message(self, number: int) -> dict[str, Any]:
        """Returns the message that starts the agent."""
        agent = record_of(self.agent)
        model = dict(vars(self.model)) if self.model else None
        task = self.task.to_dict()
        return {"job": number, "agent": agent, "task": task, "model": model, "state": self.state, "label": self.label}


class AgentProcess:
    """One process forked from the zygote. It runs one agent, or several at once. Created by :meth:`Zygote.fork`."""

    def __init__(
        self,
        number: int,
        control: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ended: asyncio.Future[int],
        prints: Prints,
    ) -> None:
        self._number, self._control, self._writer = number, control, writer
        self._ended, self._prints = ended, prints
        self._jobs: dict[int, AgentJob] = {}
        self._work: set[asyncio.Task[None]] = set()
        self.taken = 0
        """Number of jobs started so far."""
        self.ready = False
        """True if the process has responded since it was sent its latest job, so that no agent blocks it."""
        self.pid = 0
        """Process id. 0 until the process has responded."""
        self.lost = False
        """True if the process has ended or is being killed."""
        self.changed: Callable[[AgentProcess], None] = lambda _: None
        """Called when the process becomes ready, completes a job, or ends."""
        self._listening = asyncio.create_task(self._listen(reader))
        # Close the connection, because a program that an agent left behind may hold it open.
        ended.add_done_callback(lambda _: ended.get_loop().call_later(DRAIN_S, writer.close))

    @property
    def running(self) -> int:
        """Number of jobs whose agents have not ended, including cancelled ones."""
        return len(self._jobs)

    def cancelled(self) -> frozenset[int]:
        """Returns the jobs whose agents were cancelled and have not ended."""
        return frozenset(number for number, job in self._jobs.items() if job.result.done())

    def agents(self) -> set[str]:
        """Returns the names of the agents in this process."""
        return {job.agent.name for job in self._jobs.values()}

    async def run(self, job: AgentJob) -> AgentResult:
        """Runs one agent to completion. Cancelling the call cancels the agent.

        Raises:
            MegaflowError: Raised by the agent.
            UserCodeError: The agent raised another exception.
            ProcessLostError: The process crashed, or was killed.
        """
        if self.lost:
            raise ProcessLostError(f"agent {job.agent.name}: its process has ended")
        self.taken += 1
        number = self.taken
        job.result = asyncio.get_running_loop().create_future()
        self._jobs[number] = job
        self._prints.refill()
        self.send(job.message(number))
        try:
            return await job.result
        except asyncio.CancelledError:
            self.send({"cancel": number})
            raise

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. The process is not ready until it responds."""
        self.ready = False
        if not self.lost:
            self._writer.write(frame(message))

    async def keep_asking(self) -> None:
        """Pings the process at intervals. Each response extends a limited process's CPU time. Runs until cancelled."""
        while True:
            await asyncio.sleep(ASK_S)
            if self.ready:
                self.send({"ping": True})

    def kill(self) -> None:
        """Kills the process and all programs that its agents started."""
        self.lost = True
        if not self._ended.done():
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"kill": self._number}).encode())
        self._prints.end()
        for step in self._work:
            step.cancel()
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Handles messages from the process until it ends, then fails its unfinished jobs."""
        while (message := await read_message(reader)) is not None:
            if "ready" in message:
                self.ready, self.pid = True, message["ready"]
            elif (job := self._jobs.get(message["job"])) is None:
                continue
            elif "do" in message:
                step = asyncio.create_task(_carry_out(job.sandbox, message, self._writer, job.timed))
                self._work.add(step)
                step.add_done_callback(self._work.discard)
                continue
            else:
                del self._jobs[message["job"]]
                _complete(job, message)
            self.changed(self)
        why = "its process was killed"
        if not self.lost:
            self.lost, why = True, "its process does not end"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    why = _describe_exit(await asyncio.shield(self._ended))
        for job in self._jobs.values():
            if not job.result.done():
                job.result.set_exception(ProcessLostError(f"agent {job.agent.name}: {why}"))
        self._jobs.clear()
        self.kill()
        self.changed(self)


def _complete(job: AgentJob, message: dict[str, Any]) -> None:
    """Sets the result of a job from its last message, unless the job was cancelled in the meantime."""
    if job.result.done():
        return
    try:
        if "result" in message:
            job.result.set_result(AgentResult(**message["result"]))
        else:
            job.result.set_exception(decode_error(message))
    except (TypeError, KeyError) as error:  # the agent added an attribute to its result
        job.result.set_exception(UserCodeError(f"agent {job.agent.name}: its result is invalid: {error!r}"))


class Zygote:
    """The zygote process, started with the first agent, and the processes forked from it. Use it from a single event
    loop.

    Args:
        names: Agents to import once in the zygote.
        kept, beside: Directories with a campaign's own modules; see :mod:`~megaflow_hpc.agents.code`.
    """

    def __init__(self, names: Sequence[str], kept: str = "", beside: str = "") -> None:
        self._places = (kept, beside)
        self._names = [name for name in names if forked(name)]
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ended: dict[int, asyncio.Future[int]] = {}
        self._count = 0

    async def run(self, job: AgentJob, limited: bool = False) -> AgentResult:
        """Runs one agent to completion in its own process. Cancelling the call kills that process.

        Raises:
            MegaflowError: The agent raised this error.
            UserCodeError: The agent raised another exception, or its process crashed.
        """
        process = await self.fork(job.label, limited)
        job = replace(job, label="")
        asking = asyncio.create_task(process.keep_asking())
        try:
            return await process.run(job)
        finally:
            asking.cancel()
            process.kill()

    async def fork(self, label: str, limited: bool = False) -> AgentProcess:
        """Forks a process for agents.

        Args:
            label: Prefix for each line that it prints.
            limited: Limit its memory and CPU time (:mod:`~megaflow_hpc.agents.zygote`).

        Raises:
            UserCodeError: The zygote has ended.
        """
        control = self._started()
        ours, theirs = socket.socketpair()
        self._count += 1
        number = self._count
        prints, printed = await Prints.open(label)
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        ended.add_done_callback(lambda _: self._ended.pop(number, None))
        packet = json.dumps({"run": number, "limited": limited}).encode()
        try:
            socket.send_fds(control, [packet], [theirs.fileno(), printed])
        except OSError as error:
            ours.close()
            ended.cancel()
            raise UserCodeError(f"the agents' parent process is gone ({error})") from None
        finally:
            theirs.close()
            os.close(printed)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        return AgentProcess(number, control, reader, writer, ended, prints)

    def close(self) -> None:
        """Kills the zygote and all its agents."""
        if self._control is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._control = None
        self._fail()

    def _started(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megaflow_hpc.agents.zygote", str(theirs.fileno()), *self._places, *self._names],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._on_packet, ours)
        return ours

    def _fail(self) -> None:
        """Treats all forked processes as killed, because they end with the zygote."""
        for future in list(self._ended.values()):
            if not future.done():
                future.set_result(signal.SIGKILL)

    def _on_packet(self, control: socket.socket) -> None:
        data = control.recv(4096, socket.MSG_DONTWAIT)
        if not data:  # the zygote and all its agents are gone
            asyncio.get_running_loop().remove_reader(control)
            self._fail()
            return
        message = json.loads(data)
        if (waiting := self._ended.get(message["ended"])) is not None and not waiting.done():
            waiting.set_result(message["status"])


async def _carry_out(
    sandbox: Sandbox,
    message: dict[str, Any],
    writer: asyncio.StreamWriter,
    timed: Callable[[], AbstractContextManager[None]],
) -> None:
    """Executes one sandbox operation for the agent and sends the response."""
    operation = message.get("do")
    answer: dict[str, Any]
    try:
        if operation not in _OPERATIONS:
            raise UserCodeError(f"{operation!r} is not an operation of a sandbox")
        with timed():
            value = await getattr(sandbox, operation)(*message["arguments"], **message["options"])
        answer = {"value": dict(vars(value)) if isinstance(value, ExecResult) else None}
    except MegaflowError as error:
        answer = encode_error(error)
    except (TypeError, ValueError, OSError) as error:
        answer = {"error": "UserCodeError", "text": repr(error)}
    with contextlib.suppress(ConnectionError, RuntimeError):
        writer.write(frame({"job": message["job"], "id": message["id"], **answer}))
        await writer.drain()


def _describe_exit(status: int) -> str:
    """Describes the wait status of a process that exited without a result."""
    if os.WIFSIGNALED(status):
        return f"its process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"its process ended with exit code {os.WEXITSTATUS(status)} before it returned a result"


MAX_SHOWN_BYTES = 64 * 1024
"""Maximum number of bytes of output to print per agent. In a shared process, each new agent resets the count. Further
output is read and discarded, so that the agents do not block.
"""
MAX_LINE_BYTES = 4096
"""Maximum length of a line in bytes. Longer lines are split."""
DRAIN_S = 5.0
"""Seconds for which programs that an ended agent left behind may still print."""


class Prints(asyncio.Protocol):
    """Prints the output of one pipe to standard error, line by line. Use :meth:`open` to create an instance.

    Args:
        name: Prefix for each line.
    """

    def __init__(self, name: str) -> None:
        self._name, self._left, self._rest = name, MAX_SHOWN_BYTES, b""
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def open(cls, name: str) -> tuple[Prints, int]:
        """Returns a new instance and the pipe's write end for the agent, which the caller must close."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        shows = cls(name)
        await asyncio.get_running_loop().connect_read_pipe(lambda: shows, os.fdopen(ours, "rb", buffering=0))
        return shows, theirs

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._left:
            return
        *lines, self._rest = (self._rest + data[: self._left]).split(b"\n")
        self._left -= len(data[: self._left])
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        for line in lines:
            self._show(line)
        if not self._left:
            self._flush()
            self._show(f"(it printed more than {MAX_SHOWN_BYTES} bytes; the rest is not shown)".encode())

    def connection_lost(self, error: Exception | None) -> None:
        self._flush()

    def refill(self) -> None:
        """Resets the count of printed bytes, for the next agent in this process."""
        self._left = MAX_SHOWN_BYTES

    def end(self) -> None:
        """Closes the pipe shortly after the agent has ended."""
        if self._transport is not None:
            asyncio.get_running_loop().call_later(DRAIN_S, self._transport.close)

    def _flush(self) -> None:
        if self._rest:
            self._show(self._rest)
            self._rest = b""

    def _show(self, line: bytes) -> None:
        text = in_one_line(line.removesuffix(b"\r").decode("utf-8", "backslashreplace"))
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)
