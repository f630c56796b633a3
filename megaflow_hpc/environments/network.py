"""A socket that listens inside a sandbox's private network and is served from outside.

``nsenter`` runs a helper in the container's user and network namespace; it binds 127.0.0.1:PORT there and passes the
listening descriptor out over a socket pair. Nothing is added to the image, no process stays, and the namespace has no
other way out. Needs user-namespace Apptainer; a setuid one keeps its network namespace from its user.
"""

from __future__ import annotations

import array
import asyncio
import shutil
import socket
import subprocess
import sys

from megaflow_hpc.errors import SandboxError

_HELPER = """
import array, socket, sys
out = socket.socket(fileno=int(sys.argv[1]))
inside = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
inside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
inside.bind(("127.0.0.1", int(sys.argv[2])))
inside.listen(256)
out.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [inside.fileno()]))])
"""


async def listen_inside(pid: int, port: int, timeout_s: float = 20.0) -> socket.socket:
    """A non-blocking listening socket on 127.0.0.1:``port`` of the network namespace of process ``pid``."""
    return await asyncio.to_thread(_listen, pid, port, timeout_s)


def _listen(pid: int, port: int, timeout_s: float) -> socket.socket:
    nsenter = shutil.which("nsenter")
    if nsenter is None:
        raise SandboxError(
            "nsenter: not on PATH, which network 'gateway' needs; install util-linux or use network 'host'"
        )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [nsenter, "--preserve-credentials", "-U", "-n", "-t", str(pid), "--", sys.executable, "-I", "-S", "-c"]
        process = subprocess.Popen(
            [*argv, _HELPER, str(theirs.fileno()), str(port)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        )
        theirs.close()
        ours.settimeout(timeout_s)
        try:
            descriptors = array.array("i")
            _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(data[: descriptors.itemsize])
        except TimeoutError:
            process.kill()
        _, said = process.communicate()
    if not descriptors:
        reason = said.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no answer"]
        raise SandboxError(f"no listener on port {port} in the sandbox: {reason[0]}")
    listener = socket.socket(fileno=descriptors[0])
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener
