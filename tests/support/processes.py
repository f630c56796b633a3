"""Processes of this host and their arguments, as text."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaflow_hpc.host import process
from tests.support.places import ROOT


def processes() -> Iterator[tuple[int, list[str]]]:
    """Return pid and arguments of every process of this host. The arguments are empty if they cannot be read."""
    return ((pid, [word.decode("utf-8", "replace") for word in process.argv(pid)]) for pid in process.processes())


def environment(pid: int) -> dict[str, str]:
    """Return the environment of one of our processes; empty if it has ended."""
    pairs = (entry.decode("utf-8", "replace") for entry in process.environment(pid))
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def kill(pid: int) -> bool:
    """Kill a process. Return ``False`` if no process has this pid."""
    identity = process.Identity.of(pid)
    return identity is not None and identity.kill()


def processes_of(*words: str) -> list[int]:
    """Return the pids of processes that have each of ``words`` as an argument, except ``srun``, in ascending order."""
    return sorted(pid for pid, said in processes() if set(words) <= set(said) and "srun" not in said[0])


def workers_of(run: Path) -> list[int]:
    """Return the pids of a run's worker ranks on this host: those with a runner as a child."""
    ranks = processes_of("megaflow_hpc.pod", str(run))
    return [pid for pid in ranks if Path(f"/proc/{pid}/task/{pid}/children").read_text()]


def start_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a Python program and waits until it prints ``ready``."""
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def proceed(process: subprocess.Popen[str]) -> None:
    """Writes a line to a process that waits for one."""
    assert process.stdin
    process.stdin.write("\n")


_END = """
import sys, time
from tests.support.processes import environment, kill, processes
sys.stdin.read()
while found := [pid for pid, _ in processes() if environment(pid).get(sys.argv[1]) == sys.argv[2]]:
    for pid in found:
        kill(pid)
    time.sleep(0.1)
"""


@contextmanager
def descendants_end_with_this(name: str) -> Iterator[None]:
    """Kills the processes that are started in this context once it is left, or once this process is killed.

    Args:
        name: Environment variable that marks them.
    """
    value = f"{os.getpid()}-{time.time_ns()}"
    command = [sys.executable, "-c", _END, name, value]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True):
        os.environ[name] = value
        try:
            yield
        finally:
            del os.environ[name]
