"""Provides a copy of this process's Python that runs in any container, for helper programs in images without Python.

::

    PREPARED/  python  loader  libraries/…  lib/python3.N/{encodings/…, lib-dynload/_socket…}

The copied loader is started by its path, with the directory of the libraries that Python was linked against. The
image's own loader and C library therefore do not matter. The copy takes about 10 MB and is made once per node. Its
files are hard-linked into the control directory of a sandbox, which is read-only inside.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.types import ExecResult

Exec = Callable[..., Awaitable[ExecResult]]
"""Runs a command in the sandbox, with the arguments of :meth:`.ApptainerSandbox.exec`."""

ANSWER_S = 20.0
"""Seconds within which a helper must pass its descriptors."""

MAX_DESCRIPTORS = 64
"""Maximum number of descriptors that a helper passes."""

NAME = "python"
"""Name of the interpreter's directory inside a control directory."""
HOME = f"{CONTROL_DIR}/{NAME}"
"""Path of the interpreter's directory inside a container."""
INTERPRETER = (f"{HOME}/loader", "--library-path", f"{HOME}/libraries", f"{HOME}/python", "-s", "-S", "-B")
"""Argv that runs the interpreter inside a container."""
_SOCKET = "helper"
"""Name of a helper's socket inside a control directory."""

_MODULES = ("_socket", "_ctypes", "_struct", "fcntl")
_PURE = ("types.py", "struct.py", "ctypes/__init__.py", "ctypes/_endian.py")
"""Extension modules and pure Python modules that helpers import. Modules built into the interpreter need no file."""
_ENCODINGS = ("__init__", "aliases", "ascii", "latin_1", "utf_8")
"""Modules of ``encodings`` that the interpreter needs to start."""


@functools.cache
def _parts() -> tuple[tuple[str, str], ...]:
    """Returns the files of the copy: pairs of a path in the prepared directory and a source file on this machine.

    Raises:
        OSError: This Python cannot be copied.
    """
    program = os.path.realpath(sys.executable)
    modules = []
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.has_location:
            modules.append(str(spec.origin))
    parts = [("python", program)]
    for file in (program, *modules):
        listed = subprocess.run(["ldd", file], capture_output=True, text=True, check=False, timeout=20)
        for name, arrow, path in re.findall(r"^\s*(\S+)(?: (=>) (\S+))? \(0x", listed.stdout, re.MULTILINE):
            if arrow:
                parts.append((f"libraries/{name}", os.path.realpath(path)))
            elif name.startswith("/"):
                parts.append(("loader", os.path.realpath(name)))
        if "not found" in listed.stdout:
            raise OSError(f"{file}: ldd did not find one of its libraries")
    if "loader" not in dict(parts):
        raise OSError(f"{program}: not linked dynamically, so it has no loader")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in modules:
        parts.append((f"{sys.platlibdir}/{version}/lib-dynload/{os.path.basename(path)}", path))
    for name in _ENCODINGS:
        path = os.path.join(os.path.dirname(os.__file__), "encodings", f"{name}.py")
        parts.append((f"lib/{version}/encodings/{name}.py", path))
    for name in _PURE:
        parts.append((f"lib/{version}/{name}", os.path.join(os.path.dirname(os.__file__), name)))
    return tuple(dict(parts).items())


def why_not() -> str:
    """Returns the reason why helpers cannot run in containers, or an empty string if they can."""
    try:
        _parts()
    except (OSError, subprocess.SubprocessError) as error:
        return f"this Python cannot be copied into a container ({error})"
    return ""


def prepare(scratch: str | os.PathLike[str]) -> Path:
    """Returns the interpreter's directory on this node's scratch. Creates the directory if it is missing.

    Raises:
        SandboxError: The directory cannot be created.
    """
    try:
        stamp = [(name, path, os.stat(path).st_mtime_ns) for name, path in _parts()]
        home = Path(scratch, "python-" + hashlib.sha256(repr(stamp).encode()).hexdigest()[:12])
        if home.is_dir():
            return home
        partial = Path(tempfile.mkdtemp(prefix="python-new-", dir=scratch))
        for name, path in _parts():
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o555)
        try:
            os.rename(partial, home)
        except OSError:  # another process created it first
            remove_tree(partial)
            if not home.is_dir():
                raise
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"{scratch}: the Python for helpers in sandboxes cannot be created there ({error})"
        ) from error
    return home


def link_into(home: Path, control: Path) -> None:
    """Hard-links the interpreter into a container's control directory. Idempotent."""
    target = control / NAME
    if target.is_dir():
        return
    try:
        shutil.copytree(home, target, copy_function=os.link)
    except (OSError, shutil.Error) as error:
        raise SandboxError(f"{target}: cannot be created ({error}); check that scratch is not full") from error


def command(program: str) -> tuple[list[str], dict[str, str]]:
    """Returns the argv prefix that runs Python code in a container, and the environment variables that it needs."""
    return [*INTERPRETER, "-c", program], {"PYTHONHOME": HOME, "PYTHONPATH": "", "LD_PRELOAD": ""}


async def run_and_receive(
    run: Exec,
    control: str,
    interpreter: Path,
    program: str,
    arguments: Sequence[str],
    *,
    is_wanted: Callable[[int], bool],
    what: str,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    count: int = 1,
) -> tuple[list[int], asyncio.Task[ExecResult]]:
    """Runs a program as a command of the sandbox. Returns the descriptors that it passes out, and the command.

    The program's first argument is the path of a Unix socket in the control directory. The program connects to it and
    sends the descriptors in one message.

    Args:
        run: Runs a command in the sandbox.
        control: The container's control directory on the host.
        interpreter: Directory of the prepared interpreter (:func:`prepare`).
        program: Python source code.
        is_wanted: Checks a descriptor, because any process in the sandbox can connect to the socket.
        what: Describes the descriptor in error messages.
        count: Number of descriptors, at most :data:`MAX_DESCRIPTORS`.

    Raises:
        SandboxError: Not all descriptors arrived. The message quotes the last line of the program's standard error.
    """
    await asyncio.to_thread(link_into, interpreter, Path(control))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(control, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server.bind(f"/proc/self/fd/{directory}/{_SOCKET}")  # the real path may be too long for a socket
        server.listen(1)
        server.setblocking(False)
        argv, variables = command(program)
        words = [*argv, f"{CONTROL_DIR}/{_SOCKET}", *arguments]
        running = asyncio.ensure_future(run(words, cwd=cwd, env={**(env or {}), **variables}, output_limit=4096))
        try:
            descriptors = await _accept_and_receive(server, running, is_wanted, count)
            if not descriptors:
                await asyncio.wait((running,), timeout=1.0)
                errors = running.result().stderr.strip().splitlines() if running.done() else []
                raise SandboxError(f"no {what} in the sandbox: {errors[-1] if errors else 'no answer'}")
        except BaseException:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise
    finally:
        server.close()
        with suppress(FileNotFoundError):
            os.unlink(_SOCKET, dir_fd=directory)
        os.close(directory)
    return descriptors, running


async def _accept_and_receive(
    server: socket.socket, running: asyncio.Task[ExecResult], is_wanted: Callable[[int], bool], count: int
) -> list[int]:
    accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(server))
    try:
        await asyncio.wait((accepting, running), timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        if not accepting.done():
            # A program that exits early may have connected before its exit was noticed.
            await asyncio.wait((accepting,), timeout=0.1)
        if not accepting.done():
            return []
        connection, _ = accepting.result()
    finally:
        accepting.cancel()
    with connection:
        connection.settimeout(ANSWER_S)
        try:
            return await asyncio.to_thread(receive_descriptors, connection, is_wanted, count)
        except OSError:
            return []


def receive_descriptors(connection: socket.socket, is_wanted: Callable[[int], bool], count: int = 1) -> list[int]:
    """Returns the first ``count`` wanted descriptors that the other side passes, or none. Closes all others."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_DESCRIPTORS)
    wanted = [descriptor for descriptor in descriptors if is_wanted(descriptor)][:count]
    if len(wanted) < count:
        wanted = []
    for descriptor in descriptors:
        if descriptor in wanted:
            os.set_inheritable(descriptor, False)
        else:
            os.close(descriptor)
    return wanted
