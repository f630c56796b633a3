"""Child processes: none outlives the one that started it, and programs of ours, which import little and start fast.

No process outlives its parent by the kernel's parent-death signal (prctl ``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from megaflow_hpc.host.apptainer import clean_environment

_LIBRARY = str(Path(__file__).parents[2])
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


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
    """Copies a file or a tree with all that it has, blocks shared where the file system can (``cp -a``).

    Args:
        options: further ones.
        prefix: argv prefix that changes what it runs as.

    Returns:
        Why it failed, one line; empty if it did not.
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
        said, errors = await process.communicate(stdin)
    except BaseException:
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, said, errors
