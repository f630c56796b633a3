"""Both ends of a Python agent in its own process: ``Zygote`` in the runner, ``RemoteSandbox`` in the agent's process.

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
from typing import Any

from megaflow_hpc import errors
from megaflow_hpc.agents.registry import AgentSpec
from megaflow_hpc.errors import MegaflowError, SandboxError, UserCodeError
from megaflow_hpc.host import wire
from megaflow_hpc.texts import in_one_line
from megaflow_hpc.types import AgentResult, ExecResult, ModelEndpoint, Sandbox, Task

IN_RUNNER = frozenset({"oracle", "nop", "replay", "command", "claude-code", "codex", "qwen-code"})
"""Built-in agents that run in the runner's event loop, because they mostly wait."""
_OPERATIONS = frozenset({"exec", "upload", "download", "kill_processes"})


def forked(name: str) -> bool:
    """Returns whether the named agent runs in its own process."""
    return name not in IN_RUNNER


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
    """A :class:`~megaflow_hpc.types.Sandbox` proxy in the agent's process. The runner executes its operations."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._calls = 0

    async def listen_for_answers(self) -> None:
        """Delivers each response from the runner to its pending call. Exits the process if the connection is closed."""
        while (message := await read_message(self._reader)) is not None:
            future = self._waiting.pop(message["id"], None)
            if future is not None and not future.done():
                future.set_result(message)
        os._exit(1)  # the runner is gone, and with it the sandbox

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
        self._writer.write(frame({"id": number, "do": operation, "arguments": arguments, "options": options or {}}))
        await self._writer.drain()
        answer = await future
        if "error" in answer:
            raise decode_error(answer)
        return answer["value"]


class Zygote:
    """The zygote process, started with the first agent, and the agents forked from it. Use it from a single event loop.

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

    async def run(
        self,
        spec: AgentSpec,
        task: Task,
        sandbox: Sandbox,
        model: ModelEndpoint | None,
        state: Mapping[str, Any] | None = None,
        label: str = "agent",
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> AgentResult:
        """Runs one agent to completion. Cancelling the call kills the agent's process.

        Args:
            spec: The agent.
            task: The agent's task.
            sandbox: The sandbox on which to execute the agent's operations.
            model: The agent's model, or ``None``.
            state: State of a suspended rollout from which to resume.
            label: Prefix for each line that the agent prints.
            timed: Returns a context manager to enter around each sandbox operation.

        Raises:
            MegaflowError: The agent raised this error.
            UserCodeError: The agent raised another exception, or its process crashed.
        """
        control = self._started()
        ours, theirs = socket.socketpair()
        self._count += 1
        number = self._count
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        prints, printed = await Prints.open(label)
        try:
            socket.send_fds(control, [json.dumps({"run": number}).encode()], [theirs.fileno(), printed])
        except OSError as error:
            ours.close()
            raise UserCodeError(f"the agents' parent process is gone ({error})") from None
        finally:
            theirs.close()
            os.close(printed)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        agent = {"name": spec.name, "max_turns": spec.max_turns, "timeout_s": spec.timeout_s, "args": dict(spec.args)}
        endpoint = dict(vars(model)) if model else None
        job = {"agent": agent, "task": task.to_dict(), "model": endpoint, "state": state}
        work: set[asyncio.Task[None]] = set()
        try:
            writer.write(frame(job))
            while (message := await read_message(reader)) is not None:
                if "result" in message:
                    return AgentResult(**message["result"])
                if "error" in message:
                    raise decode_error(message)
                step = asyncio.create_task(_carry_out(sandbox, message, writer, timed))
                work.add(step)
                step.add_done_callback(work.discard)
            raise UserCodeError(f"agent {spec.name}: {_describe_exit(await asyncio.wait_for(ended, 10))}")
        finally:
            if not ended.done():
                with contextlib.suppress(OSError):
                    control.send(json.dumps({"kill": number}).encode())
            prints.end()
            self._ended.pop(number, None)
            for step in work:
                step.cancel()
            writer.close()

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

    def _on_packet(self, control: socket.socket) -> None:
        data = control.recv(4096, socket.MSG_DONTWAIT)
        if not data:  # the zygote and all its agents are gone
            asyncio.get_running_loop().remove_reader(control)
            for future in self._ended.values():
                if not future.done():
                    future.set_result(signal.SIGKILL)
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
    try:
        if operation not in _OPERATIONS:
            raise UserCodeError(f"{operation!r} is not an operation of a sandbox")
        with timed():
            value = await getattr(sandbox, operation)(*message["arguments"], **message["options"])
        answer = {"id": message["id"], "value": dict(vars(value)) if isinstance(value, ExecResult) else None}
    except MegaflowError as error:
        answer = {"id": message["id"], **encode_error(error)}
    except (TypeError, ValueError, OSError) as error:
        answer = {"id": message["id"], "error": "UserCodeError", "text": repr(error)}
    with contextlib.suppress(ConnectionError, RuntimeError):
        writer.write(frame(answer))
        await writer.drain()


def _describe_exit(status: int) -> str:
    """Describes the wait status of a process that exited without a result."""
    if os.WIFSIGNALED(status):
        return f"its process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"its process ended with exit code {os.WEXITSTATUS(status)} before it returned a result"


MAX_SHOWN_BYTES = 64 * 1024
"""Maximum bytes of output to print per agent. Further output is read and discarded, so that the agent does not
block."""
MAX_LINE_BYTES = 4096
"""Maximum length of a line in bytes. Longer lines are split."""
DRAIN_S = 5.0
"""Seconds after an agent's end during which its remaining processes may still print."""


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
