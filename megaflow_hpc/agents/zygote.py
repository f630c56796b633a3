"""The process from which Python agents are forked after their modules have been imported.

``python -m megaflow_hpc.agents.zygote FD KEPT BESIDE [NAME…]`` imports the named agents once, also from the directories
KEPT and BESIDE (:mod:`~megaflow_hpc.agents.code`). Each packet on its control socket passes a socket for a new process.
The zygote forks that process, which shares the memory of the imported modules. A process usually runs one agent, so
that an agent that blocks, leaks or crashes harms only its own rollout. Agents without a sandbox may share a process
(:mod:`~megaflow_hpc.agents.pool`). End-of-file on the control socket ends the zygote and all its agents.

Packets are JSON. The runner sends ``{"run": N, "limited": BOOL}`` with the descriptors, and ``{"kill": N}``. The zygote
replies ``{"ended": N, "status": S}`` with the wait status. Only the zygote signals its children, so a recycled pid is
never signalled.

A process reads jobs, ``{"cancel": JOB}``, ``{"ping": …}`` and responses of sandboxes from its socket. It sends
``{"ready": PID}`` at its start and after each job, cancellation or ping, as soon as no agent blocks its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import io
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from contextvars import ContextVar
from typing import Any

from megaflow_hpc.agents import code
from megaflow_hpc.agents.registry import NAMES, create, result_of
from megaflow_hpc.agents.remote import RemoteSandbox, encode_error, frame, read_message
from megaflow_hpc.errors import MegaflowError, UserCodeError
from megaflow_hpc.host.child import die_with_parent
from megaflow_hpc.types import ModelEndpoint, Task

MAX_MEMORY_BYTES = 8 * 2**30
"""Limit on the private writable memory of a limited process, in bytes."""
MAX_CPU_S = 900
"""CPU seconds that a limited process may use without responding to the runner."""

MAX_LINE_CHARS = 4096
"""Maximum length of an unfinished line in a shared process. A longer line is printed immediately, as a separate
line."""

_label: ContextVar[str] = ContextVar("label", default="")
"""Label of the current rollout. Empty if it is alone in its process."""


def preload(names: list[str]) -> None:
    """Imports the named agents. Ignores failures, which the rollouts that use the agent will report."""
    for name in names:
        module = NAMES.get(name, name).partition(":")[0]
        with contextlib.suppress(Exception):
            importlib.import_module(module)
            create({"name": name})  # also triggers the agent's deferred imports


def serve(control: socket.socket) -> None:
    """Handles packets from the control socket, forking a process for each run, until the runner closes the socket."""
    children: dict[int, int] = {}
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    while True:
        ready = [key.fd for key, _ in selector.select()]
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            _reap(control, children)
        if control.fileno() not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
        if not data:
            return
        message = json.loads(data)
        if "kill" in message:
            for pid, number in children.items():
                if number == message["kill"]:
                    _kill_group(pid)
            continue
        descriptor, printed = descriptors
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # such as a process limit; only this agent fails, running agents continue
            print(f"no process can be started for an agent: {error}", file=sys.stderr)
            os.close(descriptor)
            os.close(printed)
            control.send(json.dumps({"ended": message["run"], "status": 1 << 8}).encode())
            continue
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            control.close()
            os._exit(_child(descriptor, printed, parent, message["limited"]))
        with contextlib.suppress(OSError):  # the child also does this, and may have ended already
            os.setpgid(pid, pid)
        os.close(descriptor)
        os.close(printed)
        children[pid] = message["run"]


def _reap(control: socket.socket, children: dict[int, int]) -> None:
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        _kill_group(ended.si_pid)  # kill the agent's remaining children; its id cannot be reused before it is reaped
        pid, status = os.waitpid(ended.si_pid, 0)
        if pid in children:
            with contextlib.suppress(OSError):
                control.send(json.dumps({"ended": children.pop(pid), "status": status}).encode())


def _kill_group(pid: int) -> None:
    """Kills all processes in an agent's process group. The agent's own process must not be reaped yet."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _child(descriptor: int, printed: int, parent: int, limited: bool) -> int:
    die_with_parent()
    if os.getppid() != parent:
        return 1
    os.setpgid(0, 0)
    try:
        _print_to(printed)
        if limited:
            _limit(MAX_MEMORY_BYTES)
            _extend_cpu_limit()
        # Do not use asyncio.run. If one agent calls sys.exit, it would cancel the other agents, which would then fail.
        asyncio.Runner().run(_serve_jobs(socket.socket(fileno=descriptor), limited))
    except SystemExit as left:  # the agent called sys.exit
        if left.code is None or isinstance(left.code, int):
            return (left.code or 0) & 0xFF
        print(left.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


class _Labelled(io.TextIOWrapper):
    """Prefixes each line with the label of the rollout that prints it, if several share this process."""

    def __init__(self, descriptor: int) -> None:
        raw = os.fdopen(descriptor, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._rest: dict[str, str] = {}

    def write(self, text: str) -> int:
        label = _label.get()
        if not label:
            return super().write(text)
        *lines, rest = (self._rest.pop(label, "") + text).split("\n")
        if len(rest) > MAX_LINE_CHARS:
            lines, rest = [*lines, rest], ""
        if rest:
            self._rest[label] = rest
        for line in lines:
            super().write(f"{label}: {line}\n")
        return len(text)

    def end_line(self) -> None:
        """Writes what the current rollout has printed after its last newline."""
        if _label.get() in self._rest:
            self.write("\n")


def _print_to(descriptor: int) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        stream = _Labelled(number)
        setattr(sys, name, stream)  # the old stream may have been redirected to a file
    os.close(descriptor)


async def _serve_jobs(connection: socket.socket, limited: bool) -> None:
    """Runs the agents that the runner requests, until the runner closes the connection."""
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
    jobs: dict[int, tuple[asyncio.Task[None], RemoteSandbox]] = {}

    async def work(job: dict[str, Any], sandbox: RemoteSandbox) -> None:
        try:
            await _run(job, sandbox, writer)
        finally:
            del jobs[job["job"]]

    writer.write(frame({"ready": os.getpid()}))
    while (message := await read_message(reader)) is not None:
        if "agent" in message:
            sandbox = RemoteSandbox(writer, message["job"])
            jobs[message["job"]] = asyncio.create_task(work(message, sandbox)), sandbox
            await asyncio.sleep(0)  # let the agent start, because it may block
        elif "id" in message:
            if message["job"] in jobs:
                jobs[message["job"]][1].deliver(message)
            continue
        elif message.get("cancel") in jobs:
            jobs[message["cancel"]][0].cancel()
        if limited:
            _extend_cpu_limit()
        writer.write(frame({"ready": os.getpid()}))
    os._exit(1)  # the runner is gone, or no longer needs this process


async def _run(job: dict[str, Any], sandbox: RemoteSandbox, writer: asyncio.StreamWriter) -> None:
    """Runs one agent and reports its result."""
    _label.set(job["label"])
    message: dict[str, Any]
    try:
        agent = create(job["agent"])
        if job["state"] is not None:
            agent.resume(job["state"])  # type: ignore[attr-defined]
        model = ModelEndpoint(**job["model"]) if job["model"] else None
        result = result_of(job["agent"]["name"], await agent.run(Task.from_dict(job["task"]), sandbox, model))
        message = {"result": dict(vars(result))}
        frame(message)
    except MegaflowError as error:
        message = encode_error(error)
    except asyncio.CancelledError:
        message = encode_error(UserCodeError(f"agent {job['agent']['name']}: it was cancelled"))
    except Exception as error:  # user code may raise anything
        if isinstance(error, MemoryError) and job["label"]:
            traceback.print_exc()
            os._exit(1)  # another agent in this process may hold the memory
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno} in {last.name}"
        message = {"error": "UserCodeError", "text": f"agent {job['agent']['name']}: {error!r} at {where}"}
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Labelled):
            stream.end_line()
    writer.write(frame({"job": job["job"], **message}))
    await writer.drain()


def _limit(memory_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _extend_cpu_limit() -> None:
    """Allows :data:`MAX_CPU_S` more seconds of CPU time, because the process still responds."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = int(time.process_time()) + MAX_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Runs the zygote. The first argument is the descriptor of the control socket."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # signals reach the whole job step, and the runner handles them
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    code.look_in(*sys.argv[2:4])
    preload(sys.argv[4:])
    gc.collect()
    gc.freeze()  # garbage collection would dirty the shared pages
    serve(control)
    os._exit(0)


if __name__ == "__main__":
    main()
