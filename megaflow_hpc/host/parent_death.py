"""The kernel's parent-death signal (prctl ``PR_SET_PDEATHSIG``): no process outlives the one that started it."""

from __future__ import annotations

import ctypes
import functools
import shutil
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@functools.cache
def dies_with_parent() -> tuple[str, ...]:
    """Returns an argv prefix by which the kernel kills a command when the thread that started it ends.

    Empty where ``setpriv`` is missing.
    """
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL") if setpriv else ()


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that forked it ends; for a child between fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends (a child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_libc = ctypes.CDLL(None)  # at import: after a fork nothing should be loaded


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)
