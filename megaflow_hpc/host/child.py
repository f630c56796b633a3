"""Child processes that end with their parent, and fast starts of this package's own programs.

The kernel's parent-death signal (prctl ``PR_SET_PDEATHSIG``) ends a child with its parent. Code that reads files of
another user runs in a child with resource limits (:func:`run_confined`).
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
    """Returns an argv prefix by which the kernel kills a command when the thread that started it ends.

    Empty where ``setpriv`` is missing.
    """
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", signal_name) if setpriv else ()


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that forked it ends; for a child between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends (a child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_libc = ctypes.CDLL(None)  # at import: after a fork nothing should be loaded


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)


def argv_of(module: ModuleType) -> list[str]:
    """Returns the command line, up to its arguments, of a module's ``main`` that imports little and starts fast."""
    program = f"import sys; sys.path.append(sys.argv.pop(1)); from {module.__name__} import main; main()"
    return [*dies_with_parent(), sys.executable, "-S", "-E", "-c", program, _LIBRARY]


def cp(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *options: str,
    prefix: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
) -> str:
    """Copies a file or a tree with all attributes (``cp -a``). Shares blocks if the file system can.

    Args:
        options: Further options of ``cp``.
        prefix: argv prefix of a command that runs ``cp``, such as one that changes its user.

    Returns:
        The error in one line. Empty on success.
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
    """Runs a program to its end, and returns its exit status and both streams; it ends with this task."""
    import asyncio  # which the program itself, who imports this module for nothing else, is spared

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
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, output, errors


class ProcessLimits(NamedTuple):
    """Resource limits of a process."""

    memory_bytes: int
    """Limit of private writable memory. Address space is not limited, because libraries reserve more than they use."""
    cpu_s: int
    file_bytes: int
    """Maximum size of each file that the process writes."""


def confine(limits: ProcessLimits, network: bool = False) -> None:
    """Limits this process and its children permanently.

    Args:
        network: Keep the network. Otherwise the process enters an empty network namespace, if the kernel lets users
            create one.
    """
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)
    for kind, most in zip(kinds, (limits.memory_bytes, limits.cpu_s, limits.file_bytes, 0), strict=True):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each further thread of numpy would use memory
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
    """Calls a function in a child process. Returns the exit status, or a signal as a negative number.

    The child shares this process's terminal, so Ctrl-C reaches it too. A second Ctrl-C kills a child that a library
    keeps from reacting to the first.
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
        except MemoryError:
            status = -signal.SIGKILL
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT
        except Exception:
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
