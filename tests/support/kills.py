"""Kill a process at random instants, and start it again until it ends by itself."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable


def start(child: Callable[[], int]) -> int:
    """Fork a process that exits with the result of ``child``; return its id."""
    process = os.fork()
    if process == 0:
        status = 70
        try:
            status = child()
        finally:
            os._exit(status)
    return process


def status_of(process: int) -> int | None:
    """Return the exit status of a forked process, negative for a signal, or ``None`` while it runs."""
    ended, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def run_killed(
    child: Callable[[], int],
    entered: Callable[[], int],
    work: Callable[[], object],
    kills: int,
    draw: random.Random,
    span_s: float = 1.0,
    timeout_s: float = 200.0,
) -> int:
    """Run ``child`` to its end, with SIGKILLs in between; return its last exit status.

    Args:
        entered: number of processes that have begun their work so far. The time to a kill is counted from there.
        work: called all the time; serves the process.
        kills: number of kills.
        span_s: longest time to a kill.
    """
    deadline = time.monotonic() + timeout_s
    for kill in range(kills + 1):
        before, begun, after = entered(), None, draw.uniform(0, span_s)
        process = start(child)
        while (status := status_of(process)) is None:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGABRT)
                os.waitpid(process, 0)
                raise TimeoutError(f"the process did not end within {timeout_s:g} s")
            work()
            if begun is None and entered() > before:
                begun = time.monotonic()
            if kill < kills and begun is not None and time.monotonic() - begun >= after:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                break
            time.sleep(0.01)
        if status is not None:
            return status
    raise AssertionError("unreachable")
