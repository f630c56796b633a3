"""Creates sockets that listen inside a sandbox's private network and are served from the host.

A helper binds 127.0.0.1:PORT in the container's network namespace and passes the listening descriptor to the host.
The image is not changed, no helper process remains, and the namespace has no other connection. The helper enters the
namespace in one of two ways:

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
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments.sandbox import helper_python
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.spec import WITHOUT_VARIABLE, is_without
from megaflow_hpc.errors import SandboxError

Way = Literal["nsenter", "helper", ""]

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
    """Returns how a helper can listen on this node, or the reason why it cannot. The other string is empty.

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


async def listen(
    container: Container, run: helper_python.Exec, interpreter: Callable[[], Path] | None, port: int
) -> socket.socket:
    """Returns a non-blocking socket that listens on 127.0.0.1:``port`` inside a container.

    Args:
        interpreter: Prepares the interpreter of a helper inside the container. If ``None``, a process outside the
            container binds the socket.
    """
    if interpreter is not None:
        home = await asyncio.to_thread(interpreter)
        descriptor, running = await helper_python.run_and_receive(
            run,
            container.control,
            home,
            _FROM_WITHIN,
            [str(port)],
            is_wanted=_is_listener,
            what=f"listener on port {port}",
            cwd="/",
        )
        await running
    elif container.init is None:
        raise SandboxError("the container's first process cannot be found below /proc; use network 'host'")
    else:
        descriptor = await asyncio.to_thread(_listen_from_outside, container.init.pid, port)
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    return listener


def _listen_from_outside(pid: int, port: int) -> int:
    """Opens a listening socket in the network namespace of process ``pid``. Returns its descriptor."""
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
        ours.settimeout(helper_python.ANSWER_S)
        try:
            descriptor = helper_python.receive_descriptor(ours, _is_listener)
        except TimeoutError:
            descriptor = None
            process.kill()
        _, errors = process.communicate()
    if descriptor is None:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise SandboxError(f"no listener on port {port} in the sandbox: {lines[-1] if lines else 'no answer'}")
    return descriptor


def _is_listener(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as passed:
        return passed.family == socket.AF_INET and bool(passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
