"""A socket that listens inside a sandbox's private network and is served from outside.

A helper binds 127.0.0.1:PORT in the container's network namespace and passes the listening descriptor out. Nothing is
added to the image, no process stays, and the namespace has no other way out. The helper gets there in one of two ways:

=======  ======================================================  ==============================================
way      how                                                     where
=======  ======================================================  ==============================================
nsenter  it enters the container's namespaces from outside       user namespaces work (setuid Apptainer or not)
helper   it runs as a command of the sandbox, and passes the     only root's rights start containers: namespaces
         descriptor over a Unix socket in the control directory  are root's, and nobody else may enter them
=======  ======================================================  ==============================================

The second brings its interpreter along, since an image may have none: this process's own Python with its C library,
linked or copied once per node (:mod:`.helper_python`) and started by its own loader, whatever C library the image has.
"""

from __future__ import annotations

import array
import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.without import VARIABLE, is_without
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.types import ExecResult

Exec = Callable[..., Awaitable[ExecResult]]
"""Runs a command in the sandbox: :meth:`.SandboxFiles.exec`."""

Way = Literal["nsenter", "helper", ""]
LISTEN_S = 20.0

_BIND = """
inside = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
inside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
inside.bind(("127.0.0.1", int(sys.argv[2])))
inside.listen(256)
out.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, inside.fileno().to_bytes(4, sys.byteorder))])
"""
_FROM_OUTSIDE = "import socket, sys\nout = socket.socket(fileno=int(sys.argv[1]))" + _BIND
_FROM_WITHIN = (
    "import _socket as socket, sys\nout = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\nout.connect(sys.argv[1])"
    + _BIND
)


def how_to_listen(no_namespaces: str) -> tuple[Way, str]:
    """Returns the way to use on this node. If no way works, returns an empty string and the reason.

    Args:
        no_namespaces: why there are no user namespaces; empty if there are.
    """
    if is_without("nsenter"):
        not_from_outside = f"{VARIABLE} names nsenter"
    elif shutil.which("nsenter") is None:
        not_from_outside = "nsenter is not on PATH"
    else:
        not_from_outside = no_namespaces
    if not not_from_outside:
        return "nsenter", ""
    if not_from_inside := helper_python.why_not():
        return "", f"{not_from_outside}; and {not_from_inside}"
    return "helper", ""


async def listen_inside(pid: int, port: int, timeout_s: float = LISTEN_S) -> socket.socket:
    """Returns a non-blocking listening socket on 127.0.0.1:``port`` of the network namespace of process ``pid``."""
    return await asyncio.to_thread(_enter, pid, port, timeout_s)


def _enter(pid: int, port: int, timeout_s: float) -> socket.socket:
    nsenter = shutil.which("nsenter")
    if nsenter is None:
        raise SandboxError(
            "nsenter: not on PATH, which network 'gateway' needs; install util-linux or use network 'host'"
        )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [nsenter, "--preserve-credentials", "-U", "-n", "-t", str(pid), "--", sys.executable, "-I", "-S", "-c"]
        process = subprocess.Popen(
            [*argv, _FROM_OUTSIDE, str(theirs.fileno()), str(port)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        )
        theirs.close()
        ours.settimeout(timeout_s)
        try:
            listener = _receive(ours)
        except TimeoutError:
            listener = None
            process.kill()
        _, said = process.communicate()
    if listener is None:
        raise SandboxError(f"no listener on port {port} in the sandbox: {_last(said.decode('utf-8', 'replace'))}")
    return listener


async def listen(container: Container, run: Exec, interpreter: Callable[[], Path] | None, port: int) -> socket.socket:
    """Returns a listening socket on 127.0.0.1:``port`` as seen inside of a container.

    Args:
        interpreter: prepares the interpreter of a helper inside; ``None`` binds the listener from outside.
    """
    if interpreter is not None:
        return await listen_by_helper(run, container.control, await asyncio.to_thread(interpreter), port)
    if container.init is None:
        raise SandboxError("the container's first process cannot be found below /proc; use network 'host'")
    return await listen_inside(container.init.pid, port)


async def listen_by_helper(run: Exec, control: str, interpreter: Path, port: int) -> socket.socket:
    """Returns a listening socket as :func:`listen_inside` does, by a command of the sandbox.

    Args:
        control: the container's control directory on the host; it gets the interpreter, and for a moment a socket.
        interpreter: the interpreter (:func:`.helper_python.prepare`).
    """
    name = "listen"
    await asyncio.to_thread(helper_python.link_into, interpreter, Path(control))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(control, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server.bind(
            f"/proc/self/fd/{directory}/{name}"
        )  # the directory's own path may be longer than a socket's may be
        server.listen(1)
        argv, env = helper_python.command(CONTROL_DIR, _FROM_WITHIN)
        done = await run([*argv, f"{CONTROL_DIR}/{name}", str(port)], cwd="/", env=env, timeout_s=LISTEN_S)
        server.setblocking(False)
        try:
            connection, _ = server.accept()
        except BlockingIOError:
            raise SandboxError(f"no listener on port {port} in the sandbox: {_last(done.stderr)}") from None
        with connection:
            connection.settimeout(1.0)
            listener = _receive(connection)
    finally:
        server.close()
        os.unlink(name, dir_fd=directory)
        os.close(directory)
    if listener is None:
        raise SandboxError(f"no listener on port {port} in the sandbox: {_last(done.stderr)}")
    return listener


def _receive(connection: socket.socket) -> socket.socket | None:
    """The listening socket that the other side passes; whatever else it passes is closed."""
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(4 * descriptors.itemsize)
    _, ancillary, _, _ = connection.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    found = None
    for descriptor in descriptors:
        try:
            passed = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            continue
        is_listener = passed.family == socket.AF_INET and passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if found is None and is_listener:
            found = passed
        else:
            passed.close()
    if found is not None:
        found.set_inheritable(False)
        found.setblocking(False)
    return found


def _last(said: str) -> str:
    return (said.strip().splitlines() or ["no answer"])[-1]
