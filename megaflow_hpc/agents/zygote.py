"""The process from which Python agents are forked after their modules have been imported.

``python -m megaflow_hpc.agents.zygote FD KEPT BESIDE [NAME…]`` imports the named agents once, also from the directories
KEPT and BESIDE (:mod:`~megaflow_hpc.agents.code`). Each packet on its control socket passes a socket for one rollout.
The zygote forks a process that runs the rollout's agent and shares the memory of the imported modules. An agent that
blocks, leaks or crashes harms only its own rollout. End-of-file on the control socket ends the zygote and all its
agents.

Packets are JSON. The runner sends ``{"run": N}`` with the descriptors, and ``{"kill": N}``. The zygote replies
``{"ended": N, "status": S}`` with the wait status. Only the zygote signals its children, so a recycled pid is never
signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from megaflow_hpc.agents import code
from megaflow_hpc.agents.registry import NAMES, create, result_of
from megaflow_hpc.agents.remote import RemoteSandbox, encode_error, frame, read_message
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.child import die_with_parent
from megaflow_hpc.types import ModelEndpoint, Task


def preload(names: list[str]) -> None:
    """Imports the named agents. Ignores failures, which the rollouts that use the agent will report."""
    for name in names:
        module = NAMES.get(name, name).partition(":")[0]
        with contextlib.suppress(Exception):
            importlib.import_module(module)
            create({"name": name, "args": {}})  # also triggers the agent's deferred imports


def serve(control: socket.socket) -> None:
    """Serves packets from the control socket and forks an agent for each run, until the runner closes it."""
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
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            selector.close()
            control.close()
            os._exit(_child(descriptor, printed, parent))
        with contextlib.suppress(OSError):  # the child does so too, and may have ended
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
        _kill_group(ended.si_pid)  # what an agent started and left; its id is not free before it is reaped
        pid, status = os.waitpid(ended.si_pid, 0)
        if pid in children:
            with contextlib.suppress(OSError):
                control.send(json.dumps({"ended": children.pop(pid), "status": status}).encode())


def _kill_group(pid: int) -> None:
    """Kills all processes in an agent's process group. The agent's own process must not be reaped yet."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _child(descriptor: int, printed: int, parent: int) -> int:
    die_with_parent()
    if os.getppid() != parent:
        return 1
    os.setpgid(0, 0)
    try:
        _print_to(printed)
        asyncio.run(_rollout(socket.socket(fileno=descriptor)))
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


def _print_to(descriptor: int) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        stream = os.fdopen(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)  # the old stream may have been redirected to a file
    os.close(descriptor)


async def _rollout(connection: socket.socket) -> None:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
    job = await read_message(reader)
    if job is None:
        return
    sandbox = RemoteSandbox(reader, writer)
    listening = asyncio.create_task(sandbox.listen_for_answers())
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
    except Exception as error:  # user code may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno} in {last.name}"
        message = {"error": "UserCodeError", "text": f"agent {job['agent']['name']}: {error!r} at {where}"}
    listening.cancel()
    writer.write(frame(message))
    await writer.drain()
    writer.close()


def main() -> None:
    """Runs the zygote. The first argument is the descriptor of the control socket."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # signals reach the whole job step, and the runner decides
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
