"""Child processes that die with their parent, and fast startup of this package's own programs.

The kernel's parent-death signal (prctl ``PR_SET_PDEATHSIG``) kills a child when its parent ends. Code that reads
another user's files runs in a child with resource limits (:func:`run_confined`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from megaflow_hpc.host.apptainer import clean_environment

_LIBRARY = str(Path(__file__).parents[2])
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


@functools.cache
def dies_with_parent(signal_name: str = "KILL") -> tuple[str, ...]:
    """Returns an argv prefix that makes the kernel kill a command when the thread that started it ends. It is empty if
    ``setpriv`` is missing.
    """
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", signal_name) if setpriv else ()


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that forked it ends. Call it in a child between fork and
    exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process a child subreaper, which becomes the parent of orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_libc = ctypes.CDLL(None)  # loaded at import, because it is unsafe to load libraries after a fork


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)


def argv_of(module: ModuleType) -> list[str]:
    """Returns the command line, without arguments, that runs a module's ``main`` with fast startup. The module should
    have few imports."""
    program = f"import sys; sys.path.append(sys.argv.pop(1)); from {module.__name__} import main; main()"
    return [*dies_with_parent(), sys.executable, "-S", "-E", "-c", program, _LIBRARY]


def cp(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *options: str,
    prefix: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> str:
    """Copies a file or tree with all attributes (``cp -a``), using reflinks if the file system supports them.

    Args:
        options: Additional options for ``cp``.
        prefix: Argv prefix that runs ``cp``, for example as another user.

    Returns: The error message in one line, or an empty string on success.
    """
    done = subprocess.run(
        [*prefix, *dies_with_parent(), "cp", "-a", "--reflink=auto", *options, "--", source, target],
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if not done.returncode:
        return ""
    return (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["cp failed"])[-1][:500]


async def run(argv: Sequence[str], stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    """Runs a program and returns its exit status, stdout and stderr. Kills it if this task is cancelled."""
    import asyncio  # deferred, so that a child that imports this module starts faster

    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean_environment(),
        cwd="/",
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate(stdin)
    except BaseException:
        with suppress(ProcessLookupError):  # the process has just exited
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, output, errors


class ProcessLimits(NamedTuple):
    """Resource limits of a process."""

    memory_bytes: int
    """Maximum private writable memory in bytes. Address space is not limited, because libraries reserve more than they
    use."""
    cpu_s: int
    file_bytes: int
    """Maximum size in bytes of each file that the process writes."""


def confine(limits: ProcessLimits, network: bool = False) -> None:
    """Permanently limits the resources of this process and its children.

    Args:
        network: Keep network access. Otherwise the process enters an empty network namespace, if users may create one.
    """
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)
    for kind, limit in zip(kinds, (limits.memory_bytes, limits.cpu_s, limits.file_bytes, 0), strict=True):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each additional numpy thread would use memory
    if not network:
        _leave_network()


def _leave_network() -> None:
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWNET | (_CLONE_NEWUSER if user else 0)) or not user:
        return
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with suppress(OSError), open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def run_confined(call: Callable[[], int], limits: ProcessLimits, network: bool = False) -> int:
    """Calls a function in a child process. Returns the exit status, or the negative number of the signal that killed
    it.

    The child shares this process's terminal, so Ctrl-C reaches it too. A second Ctrl-C kills the child, in case a
    library blocks the first.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            die_with_parent()
            confine(limits, network)
            status = call()
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except Exception as error:
            if isinstance(error, MemoryError) or "can't start new thread" in str(error):  # its stack needs memory too
                status = -signal.SIGKILL
            else:
                sys.excepthook(*sys.exc_info())
        finally:
            with suppress(OSError, ValueError, MemoryError):
                sys.stdout.flush()
                sys.stderr.flush()
            if status < 0:
                os.kill(os.getpid(), -status)
            os._exit(status & 0xFF)

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: os.kill(child, signal.SIGKILL))

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.signal(signal.SIGINT, before)
