"""Enforces the limits of sandboxes without root privileges, in one thread for all sandboxes of a process.

The thread polls three cheap values of the node 20 times a second: available memory, free space on scratch, and open
files. It polls each sandbox (:class:`SandboxWatch`) twice a second while the sandbox is active, and every two seconds
while it is idle. It polls a sandbox immediately if the node has lost much of the sandbox's remaining memory, disk space
or files. The cost therefore depends on activity rather than on the number of sandboxes. Runaway processes are noticed
within one poll.

A breach of the memory, process, disk or descriptor limit kills the command with the highest usage. If no command can be
identified because a process cleared its environment, the whole container is killed. A breach of CPU or wall time ends
the sandbox.

Some limits are set once at the start and need no privileges: RLIMIT_NPROC (per user namespace), RLIMIT_FSIZE and
affinity to ``cpus`` processors. A high ``oom_score_adj`` makes the OOM killer prefer sandboxes.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from megaflow_hpc.environments.sandbox.commands.command import MARKER, command_of
from megaflow_hpc.environments.sandbox.limits import usage
from megaflow_hpc.environments.sandbox.limits.disk import DiskUse, Free, free_disk
from megaflow_hpc.environments.sandbox.limits.usage import (
    MAX_DESCRIPTORS,
    MAX_DESCRIPTORS_OF_PROCESS,
    Consumption,
    CpuTime,
    Descriptors,
    Held,
    MemoryPeak,
)
from megaflow_hpc.environments.sandbox.processes import kill_marked, limit_processes
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.host.process import Identity, descendants

NODE_POLL_INTERVAL_S = 0.05
BUSY_POLL_INTERVAL_S = 0.5
"""Seconds between polls of an active sandbox."""
IDLE_POLL_INTERVAL_S = 2.0
"""Seconds between polls of an idle sandbox."""
MB = 1_000_000
_ALL = os.cpu_count() or 1
FULL = 0.95
"""Fraction of the process limit that counts as reaching it."""
MAX_COMMAND_KILLS = 2
"""Number of consecutive commands to kill for a breach before killing the container itself."""
KILL_ROUNDS = 5
OOM_FIRST = "900"
"""``oom_score_adj`` of a sandbox. If memory runs out between polls, the kernel kills a sandbox first."""


@dataclass(frozen=True)
class Breach:
    """A limit that was exceeded. ``value`` and ``allowed`` have the unit that :meth:`__str__` prints."""

    limit: str
    value: float
    allowed: float
    final: bool = False
    """True if the sandbox must end, because used CPU or wall time cannot be freed."""

    def __str__(self) -> str:
        units = {"memory": "MB", "disk": "MB", "processes": "processes and threads", "descriptors": "open descriptors"}
        unit = units.get(self.limit, "s")
        return f"{self.limit} limit: {self.value:.0f} of {self.allowed:g} {unit}"


OnBreach = Callable[[Breach, int | None, bool], None]
"""Callback for a breach, which the watchdog's thread calls before the kill.

Its arguments are the breach, the number of the command to kill, and whether the whole container is killed. With
``None`` and ``False``, nothing is killed.
"""


class Node(NamedTuple):
    """Node-wide measurements at one poll."""

    available: int
    """Available memory in bytes."""
    free: Free
    """Free space on scratch."""
    opened: int
    """Number of open files."""


@dataclass
class ContainerState:
    """State of a sandbox's current container."""

    init: Identity
    runtime_threads: int = 0
    """Number of Apptainer's threads. The kernel counts them together with the container's."""
    descriptors: Descriptors = field(default_factory=Descriptors)
    memory: int = 0
    """Memory in bytes at the last poll. It is an upper bound unless it exceeds the limit."""
    polls_at_process_limit: int = 0
    command_kills: int = 0
    """Number of consecutively killed commands, none of which ended the breach."""


class SandboxWatch:
    """Watches one sandbox.

    Call ``attach`` and ``detach`` when its containers start and end, and ``renew`` to restart CPU time from zero.

    Args:
        layer: The writable layer.
        layer_in_memory: True if scratch is in memory, so that the layer counts as memory.
    """

    def __init__(self, spec: SandboxSpec, layer: str, on_breach: OnBreach, *, layer_in_memory: bool = False) -> None:
        self.spec = spec
        self.disk = DiskUse(layer)
        self.cpus: frozenset[int] = frozenset()
        self.container: ContainerState | None = None
        self.next_poll = 0.0
        """Monotonic time of the next poll. 0 for a new container."""
        self._on_breach = on_breach
        self._layer_in_memory = layer_in_memory
        self._poked = False
        self._last_poll = 0.0
        self._last_node = Node(0, Free(0, 0), 0)
        self._cpu = CpuTime()
        self._cpu_lock = threading.Lock()
        """Guards the CPU time. The watchdog's thread and the thread that ends a container both update it."""
        self._memory_peak = MemoryPeak()
        self._unblamed_disk_breaches = 0

    def poke(self) -> None:
        """Requests an early poll, because a command is starting."""
        self._poked = True

    def attach(self, init: Identity) -> None:
        """Starts watching a newly started container, and sets kernel limits on its first processes."""
        for pid in (init.pid, *descendants(init.pid)):
            try:
                self._set_limits(pid)
            except OSError:
                continue  # it has exited, or the site forbids it; the watchdog still polls
        if self.spec.processes and os.geteuid() != 0:
            limit_processes(init.pid, self.spec.processes)
        self.next_poll = 0.0
        self.container = ContainerState(init, usage.runtime_threads(init.pid))

    def _set_limits(self, pid: int) -> None:
        if self.spec.disk_mb:
            size = self.spec.disk_mb * MB
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        most = min(MAX_DESCRIPTORS_OF_PROCESS, hard)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(soft, most), most))
        if self.cpus:
            os.sched_setaffinity(pid, self.cpus)
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(OOM_FIRST)

    def detach(self) -> None:
        """Takes a last sample of the container's CPU time and stops watching it. The CPU time still counts."""
        with self._cpu_lock:
            self._count_cpu()
            self.container = None
            self._cpu.end()

    def consumption(self) -> Consumption:
        """Returns the resources used so far."""
        with self._cpu_lock:
            self._count_cpu()
        disk = self.disk.peak
        return Consumption(self._cpu.total, self._memory_peak.bytes / MB, None if disk is None else disk / MB)

    def _count_cpu(self) -> None:
        if self.container is None or not self.container.init.alive():
            return
        pid = self.container.init.pid
        sample = usage.sample(pid)
        if sample.pids:
            self._cpu.add(pid, sample, self._processors, time.monotonic())

    def renew(self) -> None:
        """Restarts CPU time from zero, and stops counting existing files against later commands."""
        self._cpu.renew()
        self.disk.excuse()

    # --- in the watchdog's thread -------------------------------------------------------------------------------

    def wanted(self, now: float, node: Node) -> bool:
        """Returns whether a poll is due.

        A poll is due by schedule, or if the node has lost half of the sandbox's remaining memory, descriptors or disk
        space.
        """
        container = self.container
        if container is None:
            return False
        if now >= self.next_poll or (self._poked and now >= self._last_poll + BUSY_POLL_INTERVAL_S):
            return True
        if self._node_loses(container, node):
            return True
        return bool(self.spec.disk_mb and self.disk.wanted(self.spec.disk_mb * MB, node.free))

    def _node_loses(self, container: ContainerState, node: Node) -> bool:
        """Returns whether the node has lost half of the sandbox's remaining memory or descriptors."""
        opened = node.opened - self._last_node.opened
        if opened > (MAX_DESCRIPTORS - container.descriptors.held.count) / 2:
            return True
        if not self.spec.memory_mb:
            return False
        taken = self._last_node.available - node.available
        return taken > (self.spec.memory_mb * MB - container.memory) / 2

    def check(self, now: float, node: Node) -> None:
        """Polls the sandbox once, and kills processes if a limit is exceeded."""
        container = self.container
        if container is None or not container.init.alive():
            return
        init = container.init
        is_early = now < self._last_poll + BUSY_POLL_INTERVAL_S
        is_first = not self.next_poll
        poked, self._poked = self._poked, False
        self._last_poll = now
        sample = usage.sample(init.pid, written=bool(self.spec.disk_mb))
        with self._cpu_lock:
            if self.container is not container:
                return
            cpu_s = self._cpu.add(init.pid, sample, self._processors, now)
        urgent = self._node_loses(container, node)
        self._last_node = node
        container.descriptors.poll(init.pid, sample, now, urgent)
        # A command that has just started may not have begun its work yet.
        is_busy = cpu_s > 0.02 or len(sample.pids) > 8 or poked or is_early or is_first
        self.next_poll = now + (BUSY_POLL_INTERVAL_S if is_busy else IDLE_POLL_INTERVAL_S)
        breach = (
            self._time_breach(now)
            or self._process_breach(container, sample, now)
            or self._memory_breach(container, sample)
            or self._descriptor_breach(container)
            or self._disk_breach(container, sample, now, node.free)
        )
        if breach is None:
            container.command_kills = 0
            return
        self.next_poll = now + NODE_POLL_INTERVAL_S
        self._end(container, sample, breach)

    def _time_breach(self, now: float) -> Breach | None:
        spec = self.spec
        cpu_s = self._cpu.seconds
        if spec.cpu_s:
            if cpu_s > spec.cpu_s:
                return Breach("cpu time", cpu_s, spec.cpu_s, final=True)
            # One second of wall time adds at most one CPU second per processor.
            left_s = (spec.cpu_s - cpu_s) / self._processors
            self.next_poll = min(self.next_poll, now + max(NODE_POLL_INTERVAL_S, left_s))
            if self._cpu.leaks:
                self.next_poll = now
        return None

    @property
    def _processors(self) -> int:
        return len(self.cpus) or _ALL

    def _process_breach(self, container: ContainerState, sample: usage.UsageSample, now: float) -> Breach | None:
        """Reports a breach after two consecutive polls near the limit, so that short spikes are tolerated.

        At the limit, fork fails, so processes exit as fast as new ones start. Usage just below the limit therefore
        counts.
        """
        allowed = self.spec.processes
        threads = sample.threads + container.runtime_threads
        if not allowed or threads < FULL * allowed:
            container.polls_at_process_limit = 0
            return None
        container.polls_at_process_limit += 1
        self.next_poll = now + 2 * NODE_POLL_INTERVAL_S
        return Breach("processes", threads, allowed) if container.polls_at_process_limit > 1 else None

    def _memory_breach(self, container: ContainerState, sample: usage.UsageSample) -> Breach | None:
        pid, held = container.init.pid, container.descriptors.held
        outside = held.buffers + (self.disk.bytes if self._layer_in_memory else 0)

        def exact() -> int:
            return usage.memory_of(pid, sample.pids, held.memfds) + outside

        container.memory = sample.resident + usage.memory_files(pid) + held.memfds + outside
        self._memory_peak.add(container.memory, exact)
        allowed = self.spec.memory_mb
        if not allowed or (container.memory <= allowed * MB and not usage.SWAP):
            return None
        container.memory = exact()
        return Breach("memory", container.memory / MB, allowed) if container.memory > allowed * MB else None

    def _descriptor_breach(self, container: ContainerState) -> Breach | None:
        count = container.descriptors.held.count
        return Breach("descriptors", count, MAX_DESCRIPTORS) if count > MAX_DESCRIPTORS else None

    def _disk_breach(
        self, container: ContainerState, sample: usage.UsageSample, now: float, free: Free
    ) -> Breach | None:
        allowed = self.spec.disk_mb
        if not allowed:
            return None
        pid, descriptors = container.init.pid, container.descriptors

        def deleted() -> int:
            descriptors.poll(pid, sample, now, True)
            return descriptors.held.deleted_files

        if self.disk.exceeds(allowed * MB, pid, sample.written, deleted, now, free):
            return Breach("disk", self.disk.bytes / MB, allowed)
        return None

    def _end(self, container: ContainerState, sample: usage.UsageSample, breach: Breach) -> None:
        """Kills the command with the highest usage. Kills the container if that did not help or no command can be
        identified."""
        number = None
        if not breach.final and container.command_kills < MAX_COMMAND_KILLS:
            number = blame(sample.pids, breach.limit, container.descriptors.held)
        container.command_kills += 1
        ends_container = number is None
        if ends_container and breach.limit == "disk":
            # The writer may have exited. At the second breach, it must be hiding.
            self._unblamed_disk_breaches += 1
            ends_container = self._unblamed_disk_breaches > 1
        self._on_breach(breach, number, ends_container)
        if number is not None:
            kill_marked(container.init.pid, b"%s=%d" % (MARKER.encode(), number), KILL_ROUNDS)
        elif ends_container:
            container.init.kill()


def blame(pids: list[int], limit: str, held: Held) -> int | None:
    """Returns the number of the command with the highest usage, or ``None`` if processes outside any command use
    more."""
    used: Counter[int | None] = Counter()
    for pid in pids:
        amount = 1
        if limit == "memory":
            amount = sum(usage.proportional(pid)) + held.memory_of[pid]
        elif limit == "disk":
            amount = usage.written_by(pid)
        elif limit == "descriptors":
            amount = held.count_of[pid]
        used[command_of(pid)] += amount
    if limit == "disk":
        del used[None]  # the kernel credits writes of reaped processes to the runner
    return max(used, key=lambda number: used[number]) if used else None


class Watchdog:
    """Watches all sandboxes of this process in one thread, from the first sandbox until :meth:`close`.

    Args:
        scratch: Directory of the writable layers.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._watches: set[SandboxWatch] = set()
        self._pinned: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, watch: SandboxWatch) -> None:
        """Chooses the sandbox's processors and starts watching it."""
        with self._lock:
            watch.cpus = self._choose_cpus(watch.spec.cpus)
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox limits", daemon=True)
                self._thread.start()

    def unwatch(self, watch: SandboxWatch) -> None:
        """Stops watching a sandbox. Idempotent."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
                self._pinned.subtract(watch.cpus)
        watch.disk.end()

    def close(self) -> None:
        """Stops the watchdog's thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _choose_cpus(self, wanted: float | None) -> frozenset[int]:
        """Chooses the least used processors, ``wanted`` rounded up. Returns an empty set to leave the affinity
        unset."""
        ours = sorted(os.sched_getaffinity(0))
        if not wanted or math.ceil(wanted) >= len(ours):
            return frozenset()
        # Other processes on the node do not know these choices, so each process starts at a different processor.
        first = os.getpid() % len(ours)
        rotated = ours[first:] + ours[:first]
        chosen = sorted(rotated, key=lambda cpu: self._pinned[cpu])[: math.ceil(wanted)]
        self._pinned.update(chosen)
        return frozenset(chosen)

    def _run(self) -> None:
        while not self._stop.wait(NODE_POLL_INTERVAL_S):
            with self._lock:
                watches = list(self._watches)
            if not watches:
                continue
            node = Node(usage.available_memory(), free_disk(self._scratch), usage.open_files())
            now = time.monotonic()
            for watch in watches:
                try:
                    if watch.wanted(now, node):
                        watch.check(now, node)
                except (OSError, ValueError, IndexError):
                    continue  # a process exited while it was being read
