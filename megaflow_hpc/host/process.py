"""Inspect processes through Linux ``/proc``, and kill them by identity, since a pid may be reused.

The module is light to import, because the parent of an engine's processes imports it.
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
    """Returns the kernel's id of this boot. Pids and start times are comparable only within one boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


PF_EXITING = 0x4
"""Flag in ``/proc/PID/stat``, from Linux' ``include/linux/sched.h``."""


@dataclass(frozen=True)
class Identity:
    """Identifies a process, so that a later one with the same pid is not mistaken for it. ``start`` is in clock ticks
    since boot."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}"

    @classmethod
    def parse(cls, text: str) -> Identity | None:
        """Parses the output of :meth:`__str__`. ``None`` if ``text`` has another form."""
        match = re.fullmatch(r"([0-9]{1,20})-([0-9]{1,20})", text)
        return cls(int(match[1]), int(match[2])) if match else None

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Returns the process that has ``pid`` now. ``None`` if it does not exist or is a zombie."""
        fields = stat_fields(pid)
        return cls(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None

    def alive(self) -> bool:
        """Returns whether this process is running. A zombie does not count."""
        return Identity.of(self.pid) == self

    def kill(self) -> bool:
        """Sends SIGKILL. Returns False if the process had ended."""
        return self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal through a pidfd that was verified to be this process. Returns False if it had ended."""
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
    """Sends SIGKILL to the processes that have these pids now. Returns the number of signals sent."""
    return sum(identity.kill() for pid in pids if (identity := Identity.of(pid)))


def read_proc(path: str) -> bytes:
    """Returns a file of ``/proc``, with half the system calls of a file object, since a watchdog reads thousands per
    second.

    Raises:
        OSError: It cannot be read because the process has ended.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = data = os.read(descriptor, 65536)
        while data := os.read(descriptor, 65536) if len(data) > 1024 else b"":  # the kernel returns it page by page
            content += data
        return content
    finally:
        os.close(descriptor)


def stat_fields(pid: int) -> list[str]:
    """Returns the fields of ``/proc/PID/stat`` from the third (state) on. Empty if the process has ended."""
    try:
        # The second field is in brackets and may contain blanks and brackets.
        return read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    except OSError:
        return []


def exiting(pid: int) -> bool:
    """Returns whether a process has ended or is exiting. An exiting process runs no code and loses its argv before its
    entry."""
    fields = stat_fields(pid)
    return not fields or fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)


def parent(pid: int) -> int:
    """Returns the parent's pid. 0 if the process has ended."""
    return _stat_number(pid, 1)


def group(pid: int) -> int:
    """Returns the process group. 0 if the process has ended."""
    return _stat_number(pid, 2)


def session(pid: int) -> int:
    """Returns the session. 0 if the process has ended."""
    return _stat_number(pid, 3)


def _stat_number(pid: int, field: int) -> int:
    fields = stat_fields(pid)
    return int(fields[field]) if fields else 0


def children(pid: int, threads: int | None = None) -> list[int]:
    """Returns the child processes of ``pid``.

    Args:
        threads: Number of threads of ``pid``, if known. With 1 its threads need not be listed.
    """
    names = [str(pid)]
    if threads != 1:
        try:
            names = os.listdir(f"/proc/{pid}/task")
        except OSError:
            return []
    pids: list[int] = []
    for name in names:
        try:
            pids += map(int, read_proc(f"/proc/{pid}/task/{name}/children").split())
        except OSError:
            continue
    return pids


def descendants(pid: int) -> Iterator[int]:
    """Yields all descendants of ``pid``. For the first process of a pid namespace these are all in it, including
    orphans."""
    waiting = [pid]
    while waiting:
        for child in children(waiting.pop()):
            waiting.append(child)
            yield child


def processes() -> Iterator[int]:
    """Yields the pid of every process of this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def argv(pid: int) -> list[bytes]:
    """Returns the arguments of a process's command line. Empty if it has ended or belongs to another user."""
    return _zero_separated(pid, "cmdline")


def environment(pid: int) -> list[bytes]:
    """Returns the ``NAME=VALUE`` entries with which a process was started. Empty if it has ended or belongs to another
    user."""
    return _zero_separated(pid, "environ")


def _zero_separated(pid: int, name: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return [entry for entry in file.read(1 << 20).split(b"\0") if entry]
    except OSError:
        return []


def mapped_files(pid: int) -> set[str]:
    """Returns the paths of a process's mapped files. Empty if it has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            return {f"/{path}" for line in file if (path := line.rstrip("\n").partition("/")[2])}
    except OSError:
        return set()


def user_name(uid: int) -> str:
    """Returns the login name, or the number if it is unknown."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
