"""Measures the memory and CPU time of a sandbox's processes, and the bytes that only their open descriptors hold.

All values come from ``/proc`` and need no privileges. Sampling a process (``stat`` and its children, about 30 µs) gives
its threads, resident set and CPU time. The sum of the resident sets is an upper bound on a sandbox's memory. Only if it
exceeds a limit are proportional set sizes read (``smaps_rollup``, which walks page tables).

The kernel adds the CPU time of an exited process to the process that waits for it. If the parent ignores SIGCHLD, that
time is lost. The process is then missing at the next poll, and its parent's time has not grown accordingly.
:class:`CpuTime` also counts the lost time.

Neither resident memory nor the file tree includes bytes that only descriptors hold. Without :class:`Descriptors`, a
sandbox limited to 300 MB could take 1.2 GB of a node with one memfd, or with 4,000 socket pairs.

=================  =========  ==========================================================================================
resource           counts as  measurement
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
import resource
import socket
import stat
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megaflow_hpc.host.process import children, parent, read_proc, stat_fields

PAGE = resource.getpagesize()
TICKS = os.sysconf("SC_CLK_TCK")

PEAK_GROWTH = 1.05
"""Measure a memory peak again once the upper bound has changed by more than this factor."""
PEAK_SLACK_BYTES = 1_000_000

_IN_MEMORY = ("dev", "dev/shm")
"""Directories of a container that hold files in memory, which belong to no process."""

MAX_DESCRIPTORS = 131_072
"""Maximum number of open descriptors in one sandbox. Scanning more would delay the polls of other sandboxes."""
MAX_DESCRIPTORS_OF_PROCESS = 65_536
DESCRIPTORS_INTERVAL_S = 4.0
"""Interval in seconds between polls of an active sandbox's descriptors, unless the node is losing memory."""
MAX_SHARE_OF_TIME = 1 / 30
"""Maximum fraction of the watchdog's time for polling the descriptors of one sandbox."""

_PIDFD_GETFD = 438
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("9I")
_F_GETPIPE_SZ = 1032

_libc = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """One process at the time of a poll. Times are in clock ticks."""

    start: int
    parent: int
    state: str
    own: int
    waited: int
    """CPU time of exited children that the process has waited for."""


@dataclass
class UsageSample:
    """Totals over all processes of a container at one poll."""

    pids: list[int] = field(default_factory=list)
    threads: int = 0
    resident: int = 0
    """Resident bytes. Pages shared by several processes count for each of them."""
    cpu_s: float = 0.0
    """CPU seconds, including children that have been waited for."""
    written: int = 0
    """Bytes passed to ``write`` since the container started, as far as the kernel counts them (``/proc/PID/io``)."""
    processes: dict[int, Process] = field(default_factory=dict)


def sample(init: int, written: bool = False) -> UsageSample:
    """Samples all processes of a container.

    Args:
        init: The container's first process.
        written: Also read how many bytes the processes have written.
    """
    result = UsageSample()
    waiting = [init]
    while waiting:
        pid = waiting.pop()
        fields = stat_fields(pid)
        if not fields:
            continue
        threads = int(fields[17])
        result.pids.append(pid)
        result.threads += threads
        result.resident += max(0, int(fields[21])) * PAGE
        own, waited = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        result.cpu_s += (own + waited) / TICKS
        result.processes[pid] = Process(int(fields[19]), int(fields[1]), fields[0], own, waited)
        if written:
            result.written += written_by(pid)
        waiting += children(pid, threads)
    return result


def runtime_threads(init: int) -> int:
    """Returns the number of Apptainer's threads in a container's user namespace. The kernel counts them with the
    container's threads."""
    try:
        runtime = parent(init)
        if os.readlink(f"/proc/{runtime}/ns/user") == os.readlink(f"/proc/{init}/ns/user"):
            return len(os.listdir(f"/proc/{runtime}/task"))
    except OSError:
        pass
    return 0


def written_by(pid: int) -> int:
    """Returns the bytes that a process and its reaped children have passed to ``write``."""
    try:
        return int(read_proc(f"/proc/{pid}/io").partition(b"wchar:")[2].split(None, 1)[0])
    except (OSError, ValueError, IndexError):
        return 0


def proportional(pid: int) -> tuple[int, int]:
    """Returns a process's proportional set sizes in bytes: anonymous memory including swap, and shared memory.

    Pages of mapped files do not count, because the kernel can drop them.
    """
    anonymous = shared = total = 0
    is_split = False  # before Linux 5.4 only the total is available
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                name, _, rest = line.partition(b":")
                if name == b"Pss":
                    total = int(rest.split()[0]) * 1024
                elif name in (b"Pss_Anon", b"SwapPss"):
                    anonymous += int(rest.split()[0]) * 1024
                    is_split = is_split or name == b"Pss_Anon"
                elif name == b"Pss_Shmem":
                    shared = int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        return 0, 0
    return (anonymous, shared) if is_split else (total, 0)


def memory_of(init: int, pids: Iterable[int], files: int) -> int:
    """Returns the memory usage of a container in bytes, including in-memory files that no process has mapped.

    Args:
        files: Bytes of memfds, which are in no file system of the container.
    """
    anonymous = shared = 0
    for pid in pids:
        own_anonymous, own_shared = proportional(pid)
        anonymous += own_anonymous
        shared += own_shared
    return anonymous + max(shared, memory_files(init) + files)


def memory_devices(init: int) -> dict[int, str]:
    """Returns the host paths of the container's own in-memory file systems (``/dev/shm`` and ``/dev``), by device
    number."""
    root = f"/proc/{init}/root"
    try:
        root_device = os.stat(root).st_dev
        devices = {os.stat(f"{root}/{name}").st_dev: f"{root}/{name}" for name in _IN_MEMORY}
    except OSError:
        return {}
    devices.pop(root_device, None)
    return devices


def memory_files(init: int) -> int:
    """Returns the bytes used in the container's own in-memory file systems."""
    total = 0
    for path in memory_devices(init).values():
        try:
            status = os.statvfs(path)
        except OSError:
            continue
        total += (status.f_blocks - status.f_bfree) * status.f_frsize
    return total


def _swap() -> bool:
    try:
        with open("/proc/swaps", "rb") as file:
            return len(file.readlines()) > 1
    except OSError:
        return False


SWAP = _swap()
"""True if memory may be swapped out. Swapped-out memory is not part of resident sets."""


def open_files() -> int:
    """Returns the number of open files on this node."""
    try:
        return int(read_proc("/proc/sys/fs/file-nr").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def available_memory() -> int:
    """Returns the available memory of this node in bytes (``MemAvailable``)."""
    try:
        return int(read_proc("/proc/meminfo").partition(b"MemAvailable:")[2].split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def lost_ticks(
    before: Mapping[int, Process], now: Mapping[int, Process], init: int, ticks: float, processors: int
) -> float:
    """Returns the CPU time, in clock ticks, of processes that exited between two polls without being waited for.

    A process that was new at the first poll and gone at the second may have been one of many short-lived processes. It
    is therefore charged the whole time between the polls.

    Args:
        init: The first process, which reaps orphans.
        ticks: Time between the polls, in clock ticks.
        processors: Maximum number of processes that can run at the same time.
    """
    if before.keys() <= now.keys():
        return 0.0
    owed: Counter[int] = Counter()
    short_lived: Counter[int] = Counter()
    for pid, old in before.items():
        if _is_alive(pid, old, now):
            continue
        ancestor = old.parent
        while ancestor in before and not _is_alive(ancestor, before[ancestor], now):
            ancestor = before[ancestor].parent
        owed[ancestor] += old.own + old.waited
        if old.state == "R" and old.own <= ticks:
            short_lived[ancestor] += 1
    unpaid = estimate = from_orphans = 0.0
    if init in before and init in now:
        from_orphans = max(0, now[init].waited - before[init].waited - owed.pop(init, 0))
    for pid, debt in owed.items():
        grown = 0
        if pid in before and pid in now:
            grown = now[pid].waited - before[pid].waited
        if debt > grown:
            unpaid += debt - grown
            estimate += short_lived[pid] * ticks
    unpaid -= from_orphans
    if unpaid <= 0:
        return 0.0
    return max(unpaid, min(estimate, processors * ticks))


def _is_alive(pid: int, old: Process, now: Mapping[int, Process]) -> bool:
    return pid in now and now[pid].start == old.start


class CpuTime:
    """CPU time of one sandbox across all its containers."""

    def __init__(self) -> None:
        self.leaks = False
        """True if processes have exited without being waited for."""
        self._until_renewal = 0.0
        self._ended_containers = self._container = self._lost = 0.0
        self._processes: Mapping[int, Process] = {}
        self._last_poll = 0.0

    @property
    def seconds(self) -> float:
        """CPU seconds since the last :meth:`renew`, as of the last poll."""
        return self._ended_containers + self._container

    @property
    def total(self) -> float:
        """CPU seconds since the start, as of the last poll."""
        return self._until_renewal + self.seconds

    def renew(self) -> None:
        """Restarts the count from zero."""
        self._until_renewal = self.total
        self._ended_containers = self._container = self._lost = 0.0
        self._processes = {}

    def end(self) -> None:
        """Adds the CPU time of the ending container to the sandbox's total."""
        self._ended_containers += self._container
        self._container = self._lost = 0.0
        self._processes = {}
        self.leaks = False

    def add(self, init: int, sample: UsageSample, processors: int, now: float) -> float:
        """Adds the result of a poll. Returns the CPU seconds used since the previous poll."""
        last = self._container
        if self._processes:
            gone = lost_ticks(self._processes, sample.processes, init, (now - self._last_poll) * TICKS, processors)
            self._lost += gone / TICKS
            self.leaks = self.leaks or gone > 0
        self._processes, self._last_poll = sample.processes, now
        self._container = sample.cpu_s + self._lost
        return self._container - last


# --- bytes held only through open descriptors ------------------------------------------------------------------------


@dataclass
class Held:
    """Resources that a sandbox's open descriptors hold, in bytes."""

    memfds: int = 0
    buffers: int = 0
    """Bytes buffered in sockets and pipes."""
    deleted_files: int = 0
    count: int = 0
    count_of: Counter[int] = field(default_factory=Counter)
    """Maps each process to its number of descriptors."""
    memory_of: Counter[int] = field(default_factory=Counter)
    """Maps each process to the bytes of memory held by its descriptors. A shared file counts for each process."""


def measure_descriptors(init: int, pids: Iterable[int], whole: bool = True) -> Held:
    """Measures the descriptors of ``pids``, or only counts them if there are more than :data:`MAX_DESCRIPTORS`.

    Args:
        init: The container's first process.
        whole: Measure the descriptors. If false, only count them, which is much faster.
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
    if whole and held.count <= MAX_DESCRIPTORS:
        _measure_each(held, listed, set(memory_devices(init)))
    return held


def _measure_each(held: Held, listed: Mapping[int, Sequence[str]], counted_devices: set[int]) -> None:
    """Measures each open file once.

    Args:
        counted_devices: In-memory file systems whose files are counted elsewhere.
    """
    memory_of_file: dict[tuple[int, int], int] = {}
    for pid, names in listed.items():
        pidfd = _open_pidfd(pid)
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
                    memory_of_file[key] = _add_file(held, status, pidfd, int(name))
                held.memory_of[pid] += memory_of_file[key]
        finally:
            if pidfd >= 0:
                os.close(pidfd)


def _add_file(held: Held, status: os.stat_result, pidfd: int, number: int) -> int:
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


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _buffered(pidfd: int, number: int, is_socket: bool) -> int:
    """Returns the bytes buffered in a socket or pipe. Returns 0 if the kernel hides them (before 5.6, or with Yama)."""
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
    """Measures the bytes that one sandbox's descriptors hold, and keeps the result of the last poll."""

    def __init__(self) -> None:
        self.held = Held()
        self._next_count = 0.0
        self._next_poll = 0.0
        self._next_urgent_poll = 0.0
        self._cpu_s = -1.0

    def poll(self, init: int, sample: UsageSample, now: float, urgent: bool) -> None:
        """Measures the descriptors if a poll is due. Urgent polls are more frequent and also cover idle sandboxes.

        If measuring takes so long that polls are rare, only counts the descriptors in between.

        Args:
            urgent: True if the node is losing memory or descriptors.
        """
        is_due = now >= (self._next_urgent_poll if urgent else self._next_poll)
        is_idle = sample.cpu_s == self._cpu_s
        if is_idle and not urgent:
            return
        if not is_due and now < self._next_count:
            return
        began = time.monotonic()
        held = measure_descriptors(init, sample.pids, is_due)
        took_s = time.monotonic() - began
        pause_s = max(DESCRIPTORS_INTERVAL_S, took_s / MAX_SHARE_OF_TIME)
        if not is_due:
            self.held.count, self.held.count_of = held.count, held.count_of
            self._next_count = now + pause_s
            return
        self.held, self._cpu_s = held, sample.cpu_s
        self._next_count, self._next_poll = now + DESCRIPTORS_INTERVAL_S, now + pause_s
        self._next_urgent_poll = now + 4 * took_s


# --- totals -----------------------------------------------------------------------------------------------------------


class Consumption(NamedTuple):
    """Resources that a sandbox has used so far, across all its containers. 1 MB is 10^6 bytes."""

    cpu_s: float
    """CPU seconds of the sandbox's processes, including exited ones."""
    memory_peak_mb: float
    """Largest memory usage seen at a poll. Shared pages count once. Peaks between two polls are missed."""
    disk_peak_mb: float | None
    """Largest measured disk usage. ``None`` without a disk limit or before the first measurement."""


class MemoryPeak:
    """Tracks the peak memory usage of a sandbox.

    A plain poll counts shared pages once per process, so its result is an upper bound. Only a possible new peak is
    measured exactly.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._bound = 0

    def add(self, bound: int, exact: Callable[[], int]) -> None:
        """Updates the peak after a poll.

        Args:
            bound: Upper bound of the memory usage in bytes.
            exact: Returns the exact memory usage in bytes.
        """
        is_no_peak = bound <= self.bytes * PEAK_GROWTH + PEAK_SLACK_BYTES
        is_unchanged = self._bound / PEAK_GROWTH <= bound <= self._bound * PEAK_GROWTH
        if is_no_peak or is_unchanged:
            return
        self._bound = bound
        self.bytes = max(self.bytes, exact())
