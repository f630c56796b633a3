"""Processes by identity (pid and start time), their descendants, and how to end them. Linux ``/proc`` only."""

from __future__ import annotations

import functools
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Iterator

from megaflow_hpc.host.apptainer import CONTROL_DIR
from megaflow_hpc.host.process import Identity, stat_fields


def children(pid: int) -> Iterator[int]:
    """The processes that ``pid`` is the parent of."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from [int(child) for child in file.read().split()]
        except OSError:
            continue


def descendants(pid: int) -> Iterator[int]:
    """Every process below ``pid``. Those of a pid namespace are all below its first process, orphans too."""
    waiting = [pid]
    while waiting:
        for child in children(waiting.pop()):
            waiting.append(child)
            yield child


def namespace_init(pid: int) -> int | None:
    """The first process of the pid namespace below ``pid``: PID 1 of a container that ``pid`` runs."""
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
    """At most ``count`` processes and threads in the user namespace of a container just started; ``False`` if not here.

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


def session(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[3]) if fields else 0


def parent(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def group(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[2]) if fields else 0


def stop_all(init: int) -> list[Identity]:
    """Stops every process of a container but PID 1; :func:`continue_all` undoes it.

    The runner's shells first: a shell with job control takes a stopped command for an ended one.
    """
    stopped: list[Identity] = []
    for _ in range(50):
        known = {identity.pid for identity in stopped}
        found = [pid for pid in descendants(init) if pid not in known]
        new = [identity for pid in found if (identity := Identity.of(pid))]
        for identity in sorted(new, key=lambda one: not is_runner(one.pid)):
            identity.send(signal.SIGSTOP)
            stopped.append(identity)
        if not new:
            break
    return stopped


def continue_all(stopped: list[Identity]) -> None:
    for identity in reversed(stopped):
        identity.send(signal.SIGCONT)


def kill_marked(init: int, marker: bytes, rounds: int = 50) -> int:
    """SIGKILLs the processes below ``init`` whose environment holds ``marker``, and their whole groups and sessions.

    A process that left its session keeps the environment it was started with, so a daemon is found as well; one that
    also wiped its environment lives until the sandbox's processes are killed as a whole. Repeats until a look finds
    nobody, since a process may fork while it is being looked at.
    """
    killed = 0
    for _ in range(rounds):
        found: set[int] = set()
        groups: set[int] = set()
        sessions: set[int] = set()
        kept: set[int] = set()
        everyone = list(descendants(init))
        for pid in everyone:
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if marker in file.read(1 << 20).split(b"\0"):
                        found.add(pid)
                        groups.add(group(pid))
                        sessions.add(session(pid))
                        continue
            except OSError:
                continue
            if is_runner(pid):
                kept.add(pid)
        for pid in kept:
            groups.discard(group(pid))
            sessions.discard(session(pid))
        groups -= {0, group(init)}
        sessions -= {0, session(init)}
        found |= {pid for pid in everyone if session(pid) in sessions or group(pid) in groups}
        victims = [identity for pid in found if (identity := Identity.of(pid))]
        if not victims:
            break
        killed += sum(identity.kill() for identity in victims)
        time.sleep(0.002)
    return killed


def is_runner(pid: int) -> bool:
    """Whether a process of a sandbox says that it is one of runner.sh's shells."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(64).startswith(f"/bin/sh\0{CONTROL_DIR}/runner.sh\0".encode())
    except OSError:
        return False


@functools.cache
def dies_with_parent() -> tuple[str, ...]:
    """Words to put before a command so that the kernel kills it when the thread that started it ends."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL") if setpriv else ()
