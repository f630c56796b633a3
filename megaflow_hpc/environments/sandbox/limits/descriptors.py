"""Measures memory and disk space that a sandbox's processes hold only through open descriptors.

Neither resident memory nor the file tree includes these bytes. Without this check, a sandbox limited to 300 MB could
take 1.2 GB of a node with one memfd, or with 4,000 socket pairs.

=================  =========  ==========================================================================================
what               counts as  how it is measured
=================  =========  ==========================================================================================
memfd              memory     ``stat`` through ``/proc/PID/fd``: its blocks, mapped or not
sockets, pipes     memory     the kernel's count for a buffer, through a copy of the descriptor (``pidfd_getfd``)
deleted files      disk       ``stat`` through ``/proc/PID/fd``
=================  =========  ==========================================================================================

Measuring takes about 3 µs per descriptor and 15 µs per buffer, so it is done only while a sandbox is active.
Descriptors in transit through a socket are not counted.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megaflow_hpc.environments.sandbox.limits import usage

MAX_DESCRIPTORS = 131_072
"""Maximum number of open descriptors in one sandbox. Scanning more would keep the watchdog from other sandboxes."""
MAX_DESCRIPTORS_OF_PROCESS = 65_536
POLL_INTERVAL_S = 4.0
"""Seconds between polls of an active sandbox, unless the node is losing memory."""
MAX_SHARE_OF_TIME = 1 / 30
"""Maximum fraction of the watchdog's time spent polling one sandbox."""

_PIDFD_GETFD = 438
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("9I")
_F_GETPIPE_SZ = 1032

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Held:
    """Bytes that a sandbox's descriptors hold."""

    memfds: int = 0
    buffers: int = 0
    """Bytes in sockets and pipes."""
    deleted_files: int = 0
    count: int = 0
    count_of: Counter[int] = field(default_factory=Counter)
    """Process → number of descriptors."""
    memory_of: Counter[int] = field(default_factory=Counter)
    """Process → bytes of memory. A file held by several processes counts for each of them."""


def measure(init: int, pids: Iterable[int]) -> Held:
    """Measures the descriptors of ``pids``, or only counts them if there are more than :data:`MAX_DESCRIPTORS`.

    Args:
        init: The container's first process.
    """
    held = Held()
    listed: dict[int, list[str]] = {}
    for pid in pids:
        try:
            listed[pid] = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        held.count_of[pid] = len(listed[pid])
        held.count += len(listed[pid])
    if held.count <= MAX_DESCRIPTORS:
        _measure_each(held, listed, set(usage.memory_devices(init)))
    return held


def _measure_each(held: Held, listed: Mapping[int, Sequence[str]], counted_devices: set[int]) -> None:
    """Measures each open file once.

    Args:
        counted_devices: In-memory file systems whose files are already counted.
    """
    memory_of_file: dict[tuple[int, int], int] = {}
    for pid, names in listed.items():
        pidfd = _open(pid)
        try:
            for name in names:
                try:
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode) and (status.st_nlink or status.st_dev in counted_devices):
                    continue
                key = (status.st_dev, status.st_ino)
                if key not in memory_of_file:
                    memory_of_file[key] = _add(held, status, pidfd, int(name))
                held.memory_of[pid] += memory_of_file[key]
        finally:
            if pidfd >= 0:
                os.close(pidfd)


def _add(held: Held, status: os.stat_result, pidfd: int, number: int) -> int:
    """Adds an open file and returns the bytes of memory that it holds."""
    if stat.S_ISREG(status.st_mode):
        size = status.st_blocks * 512
        if status.st_dev != _memfd_device():
            held.deleted_files += size
            return 0
        held.memfds += size
        return size
    is_socket = stat.S_ISSOCK(status.st_mode)
    if not is_socket and not stat.S_ISFIFO(status.st_mode):
        return 0
    buffered = _buffered(pidfd, number, is_socket)
    held.buffers += buffered
    return buffered


def _open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _buffered(pidfd: int, number: int, is_socket: bool) -> int:
    """Returns the bytes buffered in a socket or pipe; 0 if the kernel hides them (before 5.6, or with Yama)."""
    copy = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0) if pidfd >= 0 else -1
    if copy < 0:
        return 0
    try:
        unread = int(struct.unpack("i", fcntl.ioctl(copy, termios.FIONREAD, b"\0" * 4))[0])
        if not is_socket:  # each write takes up a page, however small it is
            return fcntl.fcntl(copy, _F_GETPIPE_SZ) if unread else 0
        with socket.socket(fileno=os.dup(copy)) as one:
            numbers = _MEMINFO.unpack(one.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size))
        received, _, sent, _, ahead, queued, _, backlog, _ = numbers
        # The kernel charges data received on a Unix socket to the sender, which may be closed by now.
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


class Descriptors:
    """Measures what one sandbox's descriptors hold and keeps the result of the last poll."""

    def __init__(self) -> None:
        self.held = Held()
        self._next_poll = 0.0
        self._next_urgent_poll = 0.0
        self._cpu_s = -1.0

    def poll(self, init: int, seen: usage.Look, now: float, urgent: bool) -> None:
        """Measures if a poll is due. Urgent polls are more frequent and also cover idle sandboxes.

        Args:
            urgent: True if the node is losing memory or descriptors.
        """
        is_idle = seen.cpu_s == self._cpu_s
        if now < (self._next_urgent_poll if urgent else self._next_poll) or (is_idle and not urgent):
            return
        began = time.monotonic()
        self.held = measure(init, seen.pids)
        took_s = time.monotonic() - began
        self._cpu_s = seen.cpu_s
        self._next_poll = now + max(POLL_INTERVAL_S, took_s / MAX_SHARE_OF_TIME)
        self._next_urgent_poll = now + 4 * took_s
