"""The processes of a container as the host sees them: its PID 1 ("init") and all below, found, stopped, killed."""

from __future__ import annotations

import os
import re
import resource
import signal
import time

from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.process import Identity, argv, descendants, environment, group, session

_RUNNER = [b"/bin/sh", f"{CONTROL_DIR}/runner.sh".encode()]


def namespace_init(pid: int) -> int | None:
    """Returns the first process of the pid namespace below ``pid``: PID 1 of a container that ``pid`` runs."""
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
    """Bounds the processes and threads in the user namespace of a container just started; ``False`` if it cannot.

    Linux counts RLIMIT_NPROC per user namespace from 5.14 on; before, all processes of the user would count.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if version < (5, 14):
        return False
    for pid in (init, *descendants(init)):
        try:
            resource.prlimit(pid, resource.RLIMIT_NPROC, (count, count))
        except (OSError, ValueError):
            return False
    return True


def stop_all(init: int) -> list[Identity]:
    """Stops every process of a container but PID 1; :func:`continue_all` takes the result and undoes it."""
    stopped: list[Identity] = []
    for _ in range(50):
        known = {identity.pid for identity in stopped}
        found = [pid for pid in descendants(init) if pid not in known]
        new = [identity for pid in found if (identity := Identity.of(pid))]
        # The runner first: a shell with job control takes a stopped command for an ended one.
        for identity in sorted(new, key=lambda one: not is_runner(one.pid)):
            identity.send(signal.SIGSTOP)
            stopped.append(identity)
        if not new:
            break
    return stopped


def continue_all(stopped: list[Identity]) -> None:
    """Lets processes go on that :func:`stop_all` stopped."""
    for identity in reversed(stopped):
        identity.send(signal.SIGCONT)


def kill_marked(init: int, marker: bytes, rounds: int = 50) -> int:
    """Kills the processes below ``init`` whose environment holds ``marker``, and their whole groups and sessions.

    A process that left its session keeps the environment it was started with, so a daemon is found as well; one that
    also wiped its environment lives until the sandbox's processes are killed as a whole. Repeats until a look finds
    nobody, since a process may fork while it is being looked at.

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
        victims = [identity for pid in marked if (identity := Identity.of(pid))]
        if not victims:
            break
        killed += sum(identity.kill() for identity in victims)
        time.sleep(0.002)
    return killed


def is_runner(pid: int) -> bool:
    """Returns whether a process of a sandbox claims to be one of the runner's shells."""
    return argv(pid)[:2] == _RUNNER
