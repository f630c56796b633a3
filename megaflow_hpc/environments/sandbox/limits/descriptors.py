"""What the processes of a sandbox hold by open descriptors alone: neither their pages nor their files' tree shows it.

=================  =========  ==========================================================================================
what               charged    how it is seen
=================  =========  ==========================================================================================
memfd              as memory  ``stat`` through ``/proc/PID/fd``: blocks, whether they are mapped or not
sockets, pipes     as memory  the kernel's own count of a buffer, by a copy of the descriptor (``pidfd_getfd``)
deleted files      as disk    ``stat`` through ``/proc/PID/fd``
=================  =========  ==========================================================================================

A descriptor costs some 3 µs to look at and a buffer 15, so they are looked through only while a sandbox works, and
buffers only where there are so many that they could matter. Descriptors on their way through a socket are not seen.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import socket
import stat
import struct
import termios
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from megaflow_hpc.environments.sandbox.limits import usage

MOST = 131_072
"""Descriptors in one sandbox; beyond, looking through them would take the watchdog from the others."""
MOST_EACH = 65_536
"""In one process (RLIMIT_NOFILE)."""
LOOK_S = 4.0
"""Seconds between two looks at a sandbox that works, unless the node loses memory."""
LOOK_SHARE = 30
"""Looking takes at most a thirtieth of the time."""
BUFFERS_SHARE = 16
"""Buffers are asked only where they could hold more than a sixteenth of the memory."""

_PIDFD_GETFD = 438
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("9I")
_F_GETPIPE_SZ = 1032
_LARGEST_PIPE = 1 << 20
_SYSCTLS = ("core/rmem_max", "core/wmem_max", "ipv4/tcp_rmem", "ipv4/tcp_wmem")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Held:
    """Bytes of a sandbox that descriptors hold."""

    files: int = 0
    """In memfds."""
    buffers: int = 0
    """In sockets and pipes."""
    disk: int = 0
    """In deleted files."""
    count: int = 0
    count_of: Counter[int] = field(default_factory=Counter)
    """Process → descriptors."""
    memory_of: Counter[int] = field(default_factory=Counter)
    """Process → bytes of memory; what several hold counts for each."""


def held(init: int, pids: Iterable[int], memory: int) -> Held:
    """Looks through the descriptors of ``pids``; only counts them if they are more than :data:`MOST`.

    Args:
        init: the container's first process.
        memory: bytes the sandbox may use; decides whether buffers are asked.
    """
    found = Held()
    seen: dict[tuple[int, int], int] = {}
    buffers: list[tuple[int, int, bool, tuple[int, int]]] = []
    counted = usage.memory_devices(init)
    listed: dict[int, list[str]] = {}
    for pid in pids:
        try:
            listed[pid] = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        found.count_of[pid] = len(listed[pid])
        found.count += len(listed[pid])
    if found.count > MOST:
        return found
    for pid, names in listed.items():
        for name in names:
            try:
                status = os.stat(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            key = (status.st_dev, status.st_ino)
            if stat.S_ISREG(status.st_mode):
                if status.st_nlink or status.st_dev in counted:
                    continue
                size = status.st_blocks * 512
                in_memory = status.st_dev == _memfd_device()
                if key not in seen:
                    found.files += size if in_memory else 0
                    found.disk += 0 if in_memory else size
                found.memory_of[pid] += size if in_memory else 0
                seen[key] = size
            elif stat.S_ISSOCK(status.st_mode) or stat.S_ISFIFO(status.st_mode):
                buffers.append((pid, int(name), stat.S_ISSOCK(status.st_mode), key))
    kinds = {key: is_socket for _, _, is_socket, key in buffers}
    if memory and BUFFERS_SHARE * sum(_largest_socket() if one else _LARGEST_PIPE for one in kinds.values()) > memory:
        _ask(found, buffers)
    return found


def _ask(found: Held, buffers: list[tuple[int, int, bool, tuple[int, int]]]) -> None:
    seen: dict[tuple[int, int], int] = {}
    pidfds: dict[int, int] = {}
    try:
        for pid, number, is_socket, key in buffers:
            if key not in seen:
                if pid not in pidfds:
                    pidfds[pid] = _open(pid)
                seen[key] = _buffered(pidfds[pid], number, is_socket)
                found.buffers += seen[key]
            found.memory_of[pid] += seen[key]
    finally:
        for descriptor in pidfds.values():
            if descriptor >= 0:
                os.close(descriptor)


def _open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _buffered(pidfd: int, number: int, is_socket: bool) -> int:
    """Bytes of memory that one socket or pipe holds; 0 where the kernel shows them to nobody (before 5.6, Yama)."""
    copy = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0) if pidfd >= 0 else -1
    if copy < 0:
        return 0
    try:
        unread = int(struct.unpack("i", fcntl.ioctl(copy, termios.FIONREAD, b"\0" * 4))[0])
        if not is_socket:  # a page for each write, however small
            return fcntl.fcntl(copy, _F_GETPIPE_SZ) if unread else 0
        with socket.socket(fileno=os.dup(copy)) as one:
            numbers = _MEMINFO.unpack(one.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))
        received, _, sent, _, ahead, queued, _, backlog, _ = numbers
        # What a Unix socket received is charged to the sender's, which may be closed by now.
        return max(received + max(sent, queued) + ahead + backlog, unread)
    except OSError:
        return 0
    finally:
        os.close(copy)


@functools.cache
def _memfd_device() -> int:
    descriptor = os.memfd_create("device")
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


@functools.cache
def _largest_socket() -> int:
    """The most that one socket may buffer, in bytes."""
    sizes = [0]
    for name in _SYSCTLS:
        try:
            with open(f"/proc/sys/net/{name}", "rb") as file:
                sizes.append(int(file.read().split()[-1]))
        except (OSError, ValueError, IndexError):
            continue
    return 2 * max(sizes)


class Descriptors:
    """What one sandbox holds by descriptors, as of the last look."""

    def __init__(self) -> None:
        self.held = Held()
        self._due = self._urgent = 0.0
        self._cpu_s = -1.0

    def look(self, init: int, seen: usage.Look, memory: int, now: float, urgent: bool) -> None:
        """Looks through them if it is time, or, sooner, if the node loses memory; not while nobody works.

        Args:
            memory: bytes the sandbox may use.
        """
        if now < (self._urgent if urgent else self._due) or (seen.cpu_s == self._cpu_s and not urgent):
            return
        began = time.monotonic()
        self.held = held(init, seen.pids, memory)
        took = time.monotonic() - began
        self._cpu_s = seen.cpu_s
        self._due, self._urgent = now + max(LOOK_S, LOOK_SHARE * took), now + 4 * took
