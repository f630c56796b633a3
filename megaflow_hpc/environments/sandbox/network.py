"""Creates sockets in a sandbox's private network that the host can use.

A helper creates the sockets in the container's network namespace and passes their descriptors to the host. Some of them
listen on a loopback address in the namespace. Others can be connected to programs in it. Nothing is added to the image,
no process stays behind, and the namespace has no other way out. The helper enters the namespace in one of two ways:

=======  ======================================================  ==============================================
way      method                                                  used if
=======  ======================================================  ==============================================
nsenter  it enters the container's namespaces from outside       user namespaces work (setuid Apptainer or not)
helper   it runs as a command of the sandbox, and passes the     only root can start containers: namespaces are
         descriptor over a Unix socket in the control directory  root's, and no other user may enter them
=======  ======================================================  ==============================================

The second way does not need Python in the image (:mod:`.helper_python`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.spec import WITHOUT_VARIABLE, Address, is_without
from megaflow_hpc.errors import SandboxError

Way = Literal["nsenter", "helper", ""]

_MAKE = """
def made(wish):
    inside = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if wish:
        address, port = wish.split(":")
        inside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        inside.bind((address, int(port)))
        inside.listen(256)
    return inside
all = [made(wish) for wish in sys.argv[2].split(",")]
numbers = b"".join(each.fileno().to_bytes(4, sys.byteorder) for each in all)
out.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
"""
"""Python code that creates the sockets. Its second argument is a comma-separated list with one item for each socket:
the address to listen on, or an empty item for an unconnected socket."""
_FROM_OUTSIDE = "import socket, sys\nout = socket.socket(fileno=int(sys.argv[1]))" + _MAKE
_FROM_WITHIN = (
    "import _socket as socket, sys\nout = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\nout.connect(sys.argv[1])"
    + _MAKE
)


def how_to_listen(no_namespaces: str) -> tuple[Way, str]:
    """Returns the way in which a helper can listen on this node, and an empty string.

    If there is no such way, returns an empty string and the reason.

    Args:
        no_namespaces: Reason why user namespaces are unavailable. Empty if they are available.
    """
    if is_without("nsenter"):
        not_from_outside = f"{WITHOUT_VARIABLE} names nsenter"
    elif shutil.which("nsenter") is None:
        not_from_outside = "nsenter is not on PATH"
    else:
        not_from_outside = no_namespaces
    if not not_from_outside:
        return "nsenter", ""
    if not_from_inside := helper_python.why_not():
        return "", f"{not_from_outside}; and {not_from_inside}"
    return "helper", ""


class InsideSockets:
    """Makes sockets in the network namespace of a container.

    Args:
        run: Runs a command in the container.
        interpreter: Prepares the interpreter of a helper inside the container. If ``None``, the sockets are made from
            outside.
    """

    def __init__(self, container: Container, run: helper_python.Exec, interpreter: Callable[[], Path] | None) -> None:
        self._container, self._run, self._interpreter = container, run, interpreter

    async def listen(self, addresses: Sequence[Address]) -> list[socket.socket]:
        """Returns non-blocking sockets that listen on these addresses inside the container."""
        ports = ", ".join(str(port) for _, port in addresses)
        wishes = [f"{address}:{port}" for address, port in addresses]
        return await self._make(wishes, _is_listener, f"listener on port {ports}")

    async def unconnected(self, count: int) -> list[socket.socket]:
        """Returns unconnected, non-blocking sockets, to connect to programs inside the container."""
        return await self._make([""] * count, _is_tcp, "socket")

    async def _make(self, wishes: Sequence[str], is_wanted: Callable[[int], bool], what: str) -> list[socket.socket]:
        made: list[socket.socket] = []
        for first in range(0, len(wishes), helper_python.MAX_DESCRIPTORS):
            some = wishes[first : first + helper_python.MAX_DESCRIPTORS]
            try:
                made += await self._sockets(some, is_wanted, what)
            except BaseException:
                for each in made:
                    each.close()
                raise
        for each in made:
            each.setblocking(False)
        return made

    async def _sockets(self, wishes: Sequence[str], is_wanted: Callable[[int], bool], what: str) -> list[socket.socket]:
        if self._interpreter is not None:
            home = await asyncio.to_thread(self._interpreter)
            descriptors, running = await helper_python.run_and_receive(
                self._run,
                self._container.control,
                home,
                _FROM_WITHIN,
                [",".join(wishes)],
                is_wanted=is_wanted,
                what=what,
                cwd="/",
                count=len(wishes),
            )
            sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            await running
            return sockets
        if self._container.init is None:
            raise SandboxError("the container's first process cannot be found below /proc; use network 'host'")
        return await asyncio.to_thread(_from_outside, self._container.init.pid, wishes, is_wanted, what)


def listen_on_host(addresses: Sequence[Address]) -> list[socket.socket]:
    """Returns non-blocking sockets that listen on these addresses of the host's loopback.

    Raises:
        SandboxError: An address is taken, or this user may not use the port.
    """
    listeners: list[socket.socket] = []
    for address, port in addresses:
        try:
            listeners.append(socket.create_server((address, port), backlog=256))
        except OSError as error:
            for each in listeners:
                each.close()
            raise SandboxError(
                f"{address}:{port}: cannot listen on this address ({error.strerror}); with network 'host', services "
                "need ports from 1024 on; use network 'gateway'"
            ) from error
    for each in listeners:
        each.setblocking(False)
    return listeners


def _from_outside(pid: int, wishes: Sequence[str], is_wanted: Callable[[int], bool], what: str) -> list[socket.socket]:
    """Returns sockets in the network namespace of process ``pid``. If the caller discards them, garbage collection
    closes them.
    """
    nsenter = shutil.which("nsenter")
    if nsenter is None:
        raise SandboxError(
            "nsenter: not on PATH, but network 'gateway' needs it; install util-linux or use network 'host'"
        )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [nsenter, "--preserve-credentials", "-U", "-n", "-t", str(pid), "--", sys.executable, "-I", "-S", "-c"]
        process = subprocess.Popen(
            [*argv, _FROM_OUTSIDE, str(theirs.fileno()), ",".join(wishes)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        )
        theirs.close()
        ours.settimeout(helper_python.ANSWER_S)
        try:
            descriptors = helper_python.receive_descriptors(ours, is_wanted, len(wishes))
        except TimeoutError:
            descriptors = []
            process.kill()
        _, errors = process.communicate()
    if not descriptors:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise SandboxError(f"no {what} in the sandbox: {lines[-1] if lines else 'no answer'}")
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def _is_tcp(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as passed:
        return passed.family == socket.AF_INET and passed.type == socket.SOCK_STREAM


def _is_listener(descriptor: int) -> bool:
    if not _is_tcp(descriptor):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as passed:
        return bool(passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
