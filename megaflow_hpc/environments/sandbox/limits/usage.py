"""What the processes of a sandbox use, read from ``/proc`` by the user who owns them. No rights, no agent inside.

Reading is split by price. One look at a process (``stat`` and its children, some 30 µs) gives its threads, resident
set and CPU time; the resident sets of a sandbox add up to at least what it really occupies, so most looks end there.
Proportional set sizes (``smaps_rollup``, which walks page tables) are read only where that sum is over a limit.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from megaflow_hpc.host.process import children, parent, read_proc, stat_fields

PAGE = resource.getpagesize()
TICKS = os.sysconf("SC_CLK_TCK")

PEAK_GROWTH = 1.05
"""A peak is measured again if the upper bound has changed by more than this factor."""
PEAK_SLACK_BYTES = 1_000_000

_IN_MEMORY = ("dev", "dev/shm")
"""Directories of a container that are memory: what is written there is held by no process."""


class Process(NamedTuple):
    """One process at one look. Times in clock ticks."""

    start: int
    parent: int
    state: str
    own: int
    waited: int
    """CPU time of children that it has waited for."""


@dataclass
class Look:
    """One cheap look at every process below a container's first: sums, and CPU time of children already reaped."""

    pids: list[int] = field(default_factory=list)
    threads: int = 0
    resident: int = 0
    """Bytes; pages that several processes share are counted in each."""
    cpu_s: float = 0.0
    written: int = 0
    """Bytes passed to ``write`` since the container started, as far as the kernel counts them (``/proc/PID/io``)."""
    processes: dict[int, Process] = field(default_factory=dict)


def look(init: int, written: bool = False) -> Look:
    """Reads every process of the container whose first process is ``init``; ``written``: also what they wrote."""
    found = Look()
    waiting = [init]
    while waiting:
        pid = waiting.pop()
        fields = stat_fields(pid)
        if not fields:
            continue
        threads = int(fields[17])
        found.pids.append(pid)
        found.threads += threads
        found.resident += max(0, int(fields[21])) * PAGE
        own, waited = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        found.cpu_s += (own + waited) / TICKS
        found.processes[pid] = Process(int(fields[19]), int(fields[1]), fields[0], own, waited)
        if written:
            found.written += written_by(pid)
        waiting += children(pid, threads)
    return found


def runtime_threads(init: int) -> int:
    """Returns how many threads the kernel counts with a container's without being in it: the runtime's, in its user
    namespace."""
    try:
        runtime = parent(init)
        if os.readlink(f"/proc/{runtime}/ns/user") == os.readlink(f"/proc/{init}/ns/user"):
            return len(os.listdir(f"/proc/{runtime}/task"))
    except OSError:
        pass
    return 0


def written_by(pid: int) -> int:
    """Returns the bytes a process and its reaped children passed to ``write``."""
    try:
        return int(read_proc(f"/proc/{pid}/io").partition(b"wchar:")[2].split(None, 1)[0])
    except (OSError, ValueError, IndexError):
        return 0


def proportional(pid: int) -> tuple[int, int]:
    """Returns the bytes of a process that cannot be dropped, shares divided: (anonymous, swapped out included; shared
    memory).

    Pages of mapped files are left out: the kernel takes them back when it needs them.
    """
    anonymous = shared = whole = 0
    split = False
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                name, _, rest = line.partition(b":")
                if name == b"Pss":
                    whole = int(rest.split()[0]) * 1024
                elif name in (b"Pss_Anon", b"SwapPss"):
                    anonymous += int(rest.split()[0]) * 1024
                    split = split or name == b"Pss_Anon"
                elif name == b"Pss_Shmem":
                    shared = int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        return 0, 0
    return (anonymous, shared) if split else (whole, 0)  # the split is there from Linux 5.4 on


def memory_of(init: int, pids: Iterable[int], files: int) -> int:
    """Returns the bytes a container occupies: its processes' share, and files in memory that nobody has mapped.

    Args:
        files: bytes of them that are in no file system of the container (memfds).
    """
    anonymous = shared = 0
    for pid in pids:
        own, common = proportional(pid)
        anonymous += own
        shared += common
    return anonymous + max(shared, memory_files(init) + files)


def memory_devices(init: int) -> dict[int, str]:
    """Returns the container's own memory file systems (``/dev/shm`` and ``/dev``): device → path on the host."""
    root = f"/proc/{init}/root"
    try:
        own = os.stat(root).st_dev
        found = {os.stat(f"{root}/{name}").st_dev: f"{root}/{name}" for name in _IN_MEMORY}
    except OSError:
        return {}
    found.pop(own, None)
    return found


def memory_files(init: int) -> int:
    """Returns the bytes in the container's own memory file systems."""
    total = 0
    for path in memory_devices(init).values():
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        total += (found.f_blocks - found.f_bfree) * found.f_frsize
    return total


def _swap() -> bool:
    try:
        with open("/proc/swaps", "rb") as file:
            return len(file.readlines()) > 1
    except OSError:
        return False


SWAP = _swap()
"""Memory may be swapped out, which resident sets do not show."""


def open_files() -> int:
    """Returns how many files are open on this node; more than its kernel allows, and nobody opens any."""
    try:
        return int(_read("/proc/sys/fs/file-nr").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def available_memory() -> int:
    """Returns the bytes of memory this node could give out now (``MemAvailable``)."""
    try:
        return int(_read("/proc/meminfo").partition(b"MemAvailable:")[2].split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def _read(path: str) -> bytes:
    """The beginning of a file of the node's that is asked for twenty times a second, and stays open for that."""
    return os.pread(_opened(path), 4096, 0)


@functools.cache
def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class Consumption(NamedTuple):
    """Use of a sandbox so far, over all its containers, for the record of its rollout. MB are 10^6 bytes."""

    cpu_s: float
    """CPU time of its processes, ended ones included."""
    memory_peak_mb: float
    """The largest amount of memory at a poll. Pages that processes share count once. Use between polls is not seen."""
    disk_peak_mb: float | None
    """The largest measured size; ``None`` without a disk limit or before the first measurement."""


class MemoryPeak:
    """Keeps the largest amount of memory that a sandbox held.

    A cheap look counts shared pages in each process, so it is an upper bound. Only a possible peak is measured exactly.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._bound = 0

    def look(self, bound: int, exact: Callable[[], int]) -> None:
        """Takes in a look.

        Args:
            bound: an upper bound of what is held, in bytes.
            exact: measures what is held.
        """
        is_no_peak = bound <= self.bytes * PEAK_GROWTH + PEAK_SLACK_BYTES
        is_unchanged = self._bound / PEAK_GROWTH <= bound <= self._bound * PEAK_GROWTH
        if is_no_peak or is_unchanged:
            return
        self._bound = bound
        self.bytes = max(self.bytes, exact())
