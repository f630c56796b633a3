"""Finds, stops and kills the processes of a container from the host: its PID 1 ("init") and all descendants."""

from __future__ import annotations

import os
import re
import resource
import signal
import time

from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.process import Identity, argv, descendants, environment, group, session

NPROC_KERNEL = (5, 14)
"""First Linux version in which RLIMIT_NPROC applies per user namespace. Earlier versions count all processes of the
user."""

_RUNNER = f"{CONTROL_DIR}/runner".encode()


def kernel_version() -> tuple[int, int]:
    """Returns the major and minor version of this node's kernel."""
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    return int(major), int(minor)


def namespace_init(pid: int) -> int | None:
    """Returns the host PID of PID 1 in the container that ``pid`` runs, or ``None`` if it is not found."""
    for child in descendants(pid):
        try:
            with open(f"/proc/{child}/status", "rb") as file:
                for line in file:
                    if line.startswith(b"NSpid:"):
                        if len(line.split()) > 2 and line.split()[-1] == b"1":
                            return child
                        break
        except OSError:
            continue
    return None


def limit_processes(init: int, count: int) -> bool:
    """Limits the processes and threads of a newly started container. Returns ``False`` if that is not possible."""
    if kernel_version() < NPROC_KERNEL:
        return False
    for pid in (init, *descendants(init)):
        try:
            resource.prlimit(pid, resource.RLIMIT_NPROC, (count, count))
        except (OSError, ValueError):
            return False
    return True


def stop_all(init: int) -> list[Identity]:
    """Stops all processes of a container except PID 1 with SIGSTOP. Returns them for :func:`continue_all`."""
    stopped: list[Identity] = []
    for _ in range(50):
        seen = {identity.pid for identity in stopped}
        new = [Identity.of(pid) for pid in descendants(init) if pid not in seen]
        running = [identity for identity in new if identity]
        # Stop the runner first, because a shell with job control treats a stopped command as finished.
        for identity in sorted(running, key=lambda one: not is_runner(one.pid)):
            identity.send(signal.SIGSTOP)
            stopped.append(identity)
        if not running:
            break
    return stopped


def continue_all(stopped: list[Identity]) -> None:
    """Resumes processes that :func:`stop_all` stopped."""
    for identity in reversed(stopped):
        identity.send(signal.SIGCONT)


def kill_marked(init: int, marker: bytes, rounds: int = 50) -> int:
    """Kills the processes below ``init`` whose environment contains ``marker``, with their process groups and sessions.

    A daemon keeps its initial environment, so it is found too. A process that cleared its environment survives until
    all processes of the sandbox are killed. Processes may fork in the meantime, so the search is repeated until it
    finds no process, at most ``rounds`` times.

    Returns:
        The number of processes killed.
    """
    killed = 0
    for _ in range(rounds):
        everyone = list(descendants(init))
        marked = {pid for pid in everyone if marker in environment(pid)}
        runners = [pid for pid in everyone if pid not in marked and is_runner(pid)]
        kept = [*runners, init]
        groups = {group(pid) for pid in marked} - {0, *map(group, kept)}
        sessions = {session(pid) for pid in marked} - {0, *map(session, kept)}
        marked |= {pid for pid in everyone if session(pid) in sessions or group(pid) in groups}
        victims = [identity for identity in map(Identity.of, marked) if identity]
        if not victims:
            break
        killed += sum(identity.kill() for identity in victims)
        time.sleep(0.002)
    return killed


def is_runner(pid: int) -> bool:
    """Returns whether a process of a sandbox looks like the runner: a shell of runner.sh, or the compiled runner.c."""
    words = argv(pid)[:2]
    return words in ([b"/bin/sh", _RUNNER + b".sh"], [_RUNNER, CONTROL_DIR.encode()])
