"""Processes of this machine, read from Linux ``/proc``, and killed by identity: a pid may be given to another process.

Light to import: the parent of an engine's processes does.
"""

from __future__ import annotations

import os
import pwd
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


def node_name() -> str:
    """Returns this node's name as Slurm knows it, else the host's name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def boot_id() -> str:
    """Returns the kernel's identity of this boot; pids and start times mean something within one boot only."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


PF_EXITING = 0x4
"""Flag in ``/proc/PID/stat``, of Linux' ``include/linux/sched.h``."""


@dataclass(frozen=True)
class Identity:
    """A process that cannot be mistaken for a later one of the same pid. ``start`` in clock ticks since boot."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}"

    @classmethod
    def parse(cls, text: str) -> Identity | None:
        """Reads what :meth:`__str__` wrote; ``None`` if ``text`` is of another form."""
        found = re.fullmatch(r"([0-9]{1,20})-([0-9]{1,20})", text)
        return cls(int(found[1]), int(found[2])) if found else None

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Returns the process that has ``pid`` now; ``None`` if there is none, or only its zombie."""
        fields = stat_fields(pid)
        return cls(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None

    def alive(self) -> bool:
        """Whether this very process runs; a zombie does not."""
        return Identity.of(self.pid) == self

    def kill(self) -> bool:
        """Sends SIGKILL; returns ``False`` if the process was gone."""
        return self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal through a pidfd that was checked to be this very process; ``False`` if it was gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(descriptor)


def kill_each(pids: Iterable[int]) -> int:
    """Sends SIGKILL to the processes that have these pids now; returns to how many it could be sent."""
    return sum(identity.kill() for pid in pids if (identity := Identity.of(pid)))


def read_proc(path: str) -> bytes:
    """Returns a file of ``/proc``, in half the system calls of a file object: a watchdog reads thousands a second.

    Raises:
        OSError: it cannot be read; the process is gone.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = data = os.read(descriptor, 65536)
        while data := os.read(descriptor, 65536) if len(data) > 1024 else b"":  # the kernel gives it by the page
            found += data
        return found
    finally:
        os.close(descriptor)


def stat_fields(pid: int) -> list[str]:
    """Returns the fields of ``/proc/PID/stat`` from the third (state) on; empty if the process is gone."""
    try:
        # The second field, in brackets, may hold blanks and brackets itself.
        return read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    except OSError:
        return []


def exiting(pid: int) -> bool:
    """Whether a process is gone or on its way out: it runs nothing any more, and has lost its argv before its entry."""
    fields = stat_fields(pid)
    return not fields or fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)


def parent(pid: int) -> int:
    """Returns the parent's pid; 0 if the process is gone."""
    return _stat_number(pid, 1)


def group(pid: int) -> int:
    """Returns the process group; 0 if the process is gone."""
    return _stat_number(pid, 2)


def session(pid: int) -> int:
    """Returns the session; 0 if the process is gone."""
    return _stat_number(pid, 3)


def _stat_number(pid: int, field: int) -> int:
    fields = stat_fields(pid)
    return int(fields[field]) if fields else 0


def children(pid: int, threads: int | None = None) -> list[int]:
    """Returns the processes that ``pid`` is the parent of.

    Args:
        threads: threads of ``pid``, where the caller knows; with 1 the listing of its threads is spared.
    """
    names = [str(pid)]
    if threads != 1:
        try:
            names = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return []
    found: list[int] = []
    for name in names:
        try:
            found += map(int, read_proc(f"/proc/{pid}/task/{name}/children").split())
        except OSError:
            continue
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yields every process below ``pid``. Those of a pid namespace are all below its first process, orphans too."""
    waiting = [pid]
    while waiting:
        for child in children(waiting.pop()):
            waiting.append(child)
            yield child


def processes() -> Iterator[int]:
    """Yields the pid of every process of this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def argv(pid: int) -> list[bytes]:
    """Returns the words of a process's command line; empty if it is gone or another user's."""
    return _zero_separated(pid, "cmdline")


def environment(pid: int) -> list[bytes]:
    """Returns the ``NAME=VALUE`` entries a process was started with; empty if it is gone or another user's."""
    return _zero_separated(pid, "environ")


def _zero_separated(pid: int, name: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return [entry for entry in file.read(1 << 20).split(b"\0") if entry]
    except OSError:
        return []


def mapped_files(pid: int) -> set[str]:
    """Returns the paths of the files a process has mapped; empty if it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            return {f"/{path}" for line in file if (path := line.rstrip("\n").partition("/")[2])}
    except OSError:
        return set()


def user_name(uid: int) -> str:
    """Returns the login name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
