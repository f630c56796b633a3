"""Inspects processes through Linux ``/proc``, kills them by identity, and raises this process's descriptor limit.

This module is cheap to import, because the parent of an engine's processes imports it.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


def node_name() -> str:
    """Returns this node's name in Slurm, or the host name outside Slurm."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def boot_id() -> str:
    """Returns the kernel's boot id. Pids and start times are comparable only within one boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


PF_EXITING = 0x4
"""Process flag in ``/proc/PID/stat``, from Linux's ``include/linux/sched.h``."""


@dataclass(frozen=True)
class Identity:
    """Identifies a process by pid and start time, because pids are reused. ``start`` is in clock ticks since boot."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}"

    @classmethod
    def parse(cls, text: str) -> Identity | None:
        """Parses the output of :meth:`__str__`. Returns ``None`` if ``text`` is malformed."""
        match = re.fullmatch(r"([0-9]{1,20})-([0-9]{1,20})", text)
        return cls(int(match[1]), int(match[2])) if match else None

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Returns the identity of the process that currently has ``pid``, or ``None`` if it is missing or a zombie."""
        fields = stat_fields(pid)
        return cls(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None

    def alive(self) -> bool:
        """Returns whether this process is still running. Zombies count as ended."""
        return Identity.of(self.pid) == self

    def kill(self) -> bool:
        """Sends SIGKILL. Returns False if the process has already ended."""
        return self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> bool:
        """Sends a signal through a pidfd, after verifying the identity. Returns False if the process has already
        ended."""
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


def kill_each(pids: Iterable[int]) -> None:
    """Sends SIGKILL to the processes that currently have these pids."""
    for pid in pids:
        identity = Identity.of(pid)
        if identity is not None:
            identity.kill()


def read_proc(path: str) -> bytes:
    """Reads a file in ``/proc``. Uses half as many system calls as a file object, because the watchdog reads thousands
    of files per second.

    Raises:
        OSError: The file cannot be read because the process has ended.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = data = os.read(descriptor, 65536)
        while len(data) > 1024:  # a read returns at most a page
            data = os.read(descriptor, 65536)
            content += data
        return content
    finally:
        os.close(descriptor)


def stat_fields(pid: int) -> list[str]:
    """Returns the fields of ``/proc/PID/stat`` from the third (state) onwards, or an empty list if the process has
    ended."""
    try:
        # The second field is in parentheses and may contain spaces and parentheses.
        return read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    except OSError:
        return []


def exiting(pid: int) -> bool:
    """Returns whether a process has ended or is exiting. An exiting process runs no user code, and its command line
    is already empty."""
    fields = stat_fields(pid)
    return not fields or fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)


def parent(pid: int) -> int:
    """Returns the parent's pid, or 0 if the process has ended."""
    return _stat_number(pid, 1)


def group(pid: int) -> int:
    """Returns the process group id, or 0 if the process has ended."""
    return _stat_number(pid, 2)


def session(pid: int) -> int:
    """Returns the session id, or 0 if the process has ended."""
    return _stat_number(pid, 3)


def _stat_number(pid: int, field: int) -> int:
    fields = stat_fields(pid)
    return int(fields[field]) if fields else 0


def children(pid: int, threads: int | None = None) -> list[int]:
    """Returns the child processes of ``pid``.

    Args:
        threads: Number of threads of ``pid``, if known. If 1, listing the threads is skipped.
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
    """Yields all descendants of ``pid``. For the init process of a pid namespace, these are all its processes,
    including orphans."""
    waiting = [pid]
    while waiting:
        for child in children(waiting.pop()):
            waiting.append(child)
            yield child


def processes() -> Iterator[int]:
    """Yields the pids of all processes on this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def argv(pid: int) -> list[bytes]:
    """Returns a process's command-line arguments. The list is empty if the process has ended or belongs to another
    user."""
    return _zero_separated(pid, "cmdline")


def environment(pid: int) -> list[bytes]:
    """Returns a process's initial environment as ``NAME=VALUE`` entries. The list is empty if the process has ended or
    belongs to another user."""
    return _zero_separated(pid, "environ")


def _zero_separated(pid: int, name: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return [entry for entry in file.read(1 << 20).split(b"\0") if entry]
    except OSError:
        return []


def mapped_files(pid: int) -> set[str]:
    """Returns the paths of a process's mapped files. The set is empty if the process has ended or belongs to another
    user."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            paths = [line.rstrip("\n").partition("/")[2] for line in file]
            return {f"/{path}" for path in paths if path}
    except OSError:
        return set()


def user_name(uid: int) -> str:
    """Returns a user's login name, or the numeric uid if the name is unknown."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


MAX_DESCRIPTORS = 65_536
"""Soft limit on descriptors for processes with many connections, if the hard limit allows it.

The hard limit may be millions. Child processes inherit the soft limit, and some programs loop over all possible
descriptors.
"""


def descriptor_limit() -> int:
    """Returns the maximum number of descriptors that this process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raises the soft limit to the smaller of the hard limit and :data:`MAX_DESCRIPTORS`. Never lowers it."""
    global _inherited_limit
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _inherited_limit is None:
        _inherited_limit = descriptor_limit()
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def inherited_descriptor_limit() -> int | None:
    """Returns the soft limit with which this process was started, or ``None`` if it has not been raised since."""
    return _inherited_limit if _inherited_limit != descriptor_limit() else None


_inherited_limit: int | None = None
