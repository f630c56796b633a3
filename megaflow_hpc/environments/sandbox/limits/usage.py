"""Reads the memory and CPU time of a sandbox's processes from ``/proc``. Needs no privileges.

Sampling a process (``stat`` and its children, about 30 µs) gives its threads, resident set and CPU time. The sum of the
resident sets is an upper bound on a sandbox's memory. Only if it exceeds a limit are proportional set sizes read
(``smaps_rollup``, which walks page tables).

The kernel adds the CPU time of an exited process to the process that waits for it. If the parent ignores SIGCHLD, that
time is lost: the process is missing at the next poll, and its parent's time has not grown accordingly. :class:`CpuTime`
still counts such time. If the sandbox has a cgroup, the kernel does the counting.
"""

from __future__ import annotations

import functools
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megaflow_hpc.environments.sandbox.limits.cgroups import Cgroup
from megaflow_hpc.host.process import children, parent, read_proc, stat_fields

PAGE = resource.getpagesize()
TICKS = os.sysconf("SC_CLK_TCK")

PEAK_GROWTH = 1.05
"""Measure a peak again once the upper bound has changed by more than this factor."""
PEAK_SLACK_BYTES = 1_000_000

_IN_MEMORY = ("dev", "dev/shm")
"""Directories of a container whose files are in memory but belong to no process."""


class Process(NamedTuple):
    """One process as of one poll. Times are in clock ticks."""

    start: int
    parent: int
    state: str
    own: int
    waited: int
    """CPU time of the children that it has waited for."""


@dataclass
class Look:
    """Totals of one poll of all processes of a container."""

    pids: list[int] = field(default_factory=list)
    threads: int = 0
    resident: int = 0
    """Resident bytes. Pages shared by several processes count for each of them."""
    cpu_s: float = 0.0
    """CPU seconds, including children that have been waited for."""
    written: int = 0
    """Bytes passed to ``write`` since the container started, to the extent that the kernel counts them
    (``/proc/PID/io``)."""
    processes: dict[int, Process] = field(default_factory=dict)


def look(init: int, written: bool = False) -> Look:
    """Polls all processes of a container.

    Args:
        init: The container's first process.
        written: Also read how many bytes they have written.
    """
    result = Look()
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
    """Returns the number of Apptainer's threads in a container's user namespace; the kernel counts them with the
    container's."""
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
    """Returns the proportional set size of a process in bytes: anonymous memory including swap, and shared memory.

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
    """Returns the memory of a container in bytes: its processes, and in-memory files that no process has mapped.

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
    """Returns the container's own in-memory file systems (``/dev/shm`` and ``/dev``): device → path on the host."""
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
"""True if memory may be swapped out, in which case resident sets do not show it."""


def open_files() -> int:
    """Returns the number of open files on this node."""
    try:
        return int(_read("/proc/sys/fs/file-nr").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def available_memory() -> int:
    """Returns the available memory of this node in bytes (``MemAvailable``)."""
    try:
        return int(_read("/proc/meminfo").partition(b"MemAvailable:")[2].split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def _read(path: str) -> bytes:
    """Reads a file of ``/proc``. The file is kept open because it is read 20 times per second."""
    return os.pread(_opened(path), 4096, 0)


@functools.cache
def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def lost_ticks(
    before: Mapping[int, Process], now: Mapping[int, Process], init: int, ticks: float, processors: int
) -> float:
    """Returns the CPU time, in clock ticks, of processes that exited between two polls without being waited for.

    A process that started shortly before one poll and is gone at the next is assumed to have successors like it. The
    whole time between the polls is charged for it.

    Args:
        init: The first process, which reaps orphans.
        ticks: Time between the polls.
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
        self._group_at_renewal = 0.0
        self._processes: Mapping[int, Process] = {}
        self._last_look = 0.0

    @property
    def seconds(self) -> float:
        """CPU seconds since the last :meth:`renew`, as of the last poll."""
        return self._ended_containers + self._container

    @property
    def total(self) -> float:
        """CPU seconds since the start, as of the last poll."""
        return self._until_renewal + self.seconds

    def renew(self, group: Cgroup | None) -> None:
        """Restarts the count from zero."""
        self._until_renewal = self.total
        self._ended_containers = self._container = self._lost = 0.0
        self._group_at_renewal = group.cpu_s() or 0.0 if group else 0.0
        self._processes = {}

    def end(self) -> None:
        """Adds up the time of a container that is ending."""
        self._ended_containers += self._container
        self._container = self._lost = 0.0
        self._processes = {}
        self.leaks = False

    def look(self, init: int, seen: Look, group: Cgroup | None, processors: int, now: float) -> float:
        """Adds the result of a poll. Returns the CPU seconds used since the previous one."""
        last = self._container
        kernel = group.cpu_s() if group is not None else None
        if kernel is not None:
            self._ended_containers, self._container = 0.0, kernel - self._group_at_renewal
            return self._container - last
        if self._processes:
            gone = lost_ticks(self._processes, seen.processes, init, (now - self._last_look) * TICKS, processors)
            self._lost += gone / TICKS
            self.leaks = self.leaks or gone > 0
        self._processes, self._last_look = seen.processes, now
        self._container = seen.cpu_s + self._lost
        return self._container - last


class Consumption(NamedTuple):
    """Resources that a sandbox has used so far, across all its containers. 1 MB is 10^6 bytes."""

    cpu_s: float
    """CPU time of its processes, including exited ones."""
    memory_peak_mb: float
    """Largest memory usage seen at a poll. Shared pages count once. Peaks between polls are missed."""
    disk_peak_mb: float | None
    """Largest measured size; ``None`` without a disk limit or before the first measurement."""


class MemoryPeak:
    """Tracks the peak memory usage of a sandbox.

    A plain poll counts shared pages once per process, so its result is an upper bound. Only a potential peak is
    measured exactly.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._bound = 0

    def look(self, bound: int, exact: Callable[[], int]) -> None:
        """Updates the peak after a poll.

        Args:
            bound: Upper bound of the memory in bytes.
            exact: Measures the memory exactly.
        """
        is_no_peak = bound <= self.bytes * PEAK_GROWTH + PEAK_SLACK_BYTES
        is_unchanged = self._bound / PEAK_GROWTH <= bound <= self._bound * PEAK_GROWTH
        if is_no_peak or is_unchanged:
            return
        self._bound = bound
        self.bytes = max(self.bytes, exact())
