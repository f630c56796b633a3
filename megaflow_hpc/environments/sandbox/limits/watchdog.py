"""The watchdog holds sandboxes to their limits, without root: one thread for all sandboxes of a process.

The thread polls the node 20 times a second for three cheap figures: available memory, free space of scratch, and open
files. It looks at one sandbox (:class:`SandboxWatch`) twice a second while that works and every two seconds while it
idles. It looks at once if the node has lost a good part of what the sandbox may still take. So the cost depends on what
happens and not on the number of sandboxes, and a hog is seen within one poll.

A breach of memory, processes, disk or descriptors ends the command that uses most. It ends the whole container if no
command can be named, because a process wiped its environment. A breach of CPU or wall time ends the sandbox. If the
site delegates a cgroup, the kernel holds memory, processes and CPU shares as well (cgroups.py).

Some limits are set once at the start and need no rights: RLIMIT_NPROC (per user namespace), RLIMIT_FSIZE, an affinity
of ``cpus`` processors, and the first place in the queue of the kernel's out-of-memory killer.
"""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megaflow_hpc.environments.sandbox.commands.command import MARKER, command_of
from megaflow_hpc.environments.sandbox.limits import cgroups, usage
from megaflow_hpc.environments.sandbox.limits.cputime import CpuTime
from megaflow_hpc.environments.sandbox.limits.descriptors import (
    MAX_DESCRIPTORS,
    MAX_DESCRIPTORS_OF_PROCESS,
    Descriptors,
    Held,
)
from megaflow_hpc.environments.sandbox.limits.disk import DiskUse, Free, free_disk
from megaflow_hpc.environments.sandbox.limits.usage import Consumption, MemoryPeak
from megaflow_hpc.environments.sandbox.processes import kill_marked, limit_processes
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.host.process import Identity, descendants

NODE_POLL_INTERVAL_S = 0.05
BUSY_POLL_INTERVAL_S = 0.5
"""Seconds between two looks at a sandbox that works."""
IDLE_POLL_INTERVAL_S = 2.0
"""Seconds between two looks at a sandbox that idles."""
MB = 1_000_000
_ALL = os.cpu_count() or 1
FULL = 0.95
"""Share of the process limit that counts as reached."""
KILL_ROUNDS = 5
OOM_FIRST = "900"
"""``oom_score_adj`` of a sandbox. If memory runs out before the watchdog looks, the kernel kills a sandbox first."""


@dataclass(frozen=True)
class Breach:
    """A limit that was passed. ``value`` and ``allowed`` are in the unit that :meth:`__str__` writes."""

    limit: str
    value: float
    allowed: float
    final: bool = False
    """The sandbox ends, because CPU and wall time cannot be given back."""

    def __str__(self) -> str:
        units = {"memory": "MB", "disk": "MB", "processes": "processes and threads", "descriptors": "open descriptors"}
        unit = units.get(self.limit, "s")
        return f"{self.limit} limit: {self.value:.0f} of {self.allowed:g} {unit}"


OnBreach = Callable[[Breach, int | None, bool], None]
"""Called in the watchdog's thread before a kill: the breach, the number of the command to kill, and whether the whole
container is killed. With neither, nothing is left that could be killed."""


class Node(NamedTuple):
    """Figures of the whole node at one poll."""

    available: int
    """Bytes of memory."""
    free: Free
    """Free space of scratch."""
    opened: int
    """Open files."""


class SandboxWatch:
    """One sandbox under watch.

    Call ``attach`` and ``detach`` as its containers start and end, and ``renew`` to count CPU and wall time from zero.
    """

    def __init__(self, spec: SandboxSpec, layer: str, on_breach: OnBreach, *, layer_in_memory: bool = False) -> None:
        self.spec = spec
        self.directories = [layer]
        """Directories that ``disk_mb`` bounds: the writable layer first, then others that the sandbox may write."""
        self.on_breach = on_breach
        self.layer_in_memory = layer_in_memory
        """True if scratch is memory, so that the layer counts as memory."""
        self.occupied = 0
        """Bytes in them that the sandbox did not write: a copy of the image, files for its verifier."""
        self.init: Identity | None = None
        self.group: cgroups.Cgroup | None = None
        self.cpus: frozenset[int] = frozenset()
        self.due = 0.0
        self._poked = False
        self._looked = 0.0
        self._cpu = CpuTime()
        self._descriptors = Descriptors()
        self._disk = DiskUse()
        self._memory_peak = MemoryPeak()
        self._counting = threading.Lock()
        """Held while the watchdog's thread or the thread that ends a container counts CPU time."""
        self._began = time.monotonic()
        self._full = 0
        self._beside = 0
        self._repeated = 0
        self._unblamed = 0
        self._memory = 0
        self._available = 0
        self._opened = 0

    def poke(self) -> None:
        """Asks for a look soon, because a command starts."""
        self._poked = True

    def adopt(self, owner: Identity) -> None:
        """Moves the process that will start a container into the control group. What it starts follows."""
        if self.group is not None:
            self.group.add(owner.pid)

    def attach(self, init: Identity) -> None:
        """Begins to watch a container that has started, and sets the limits of the kernel on its first processes."""
        spec = self.spec
        for pid in (init.pid, *descendants(init.pid)):
            try:
                if spec.disk_mb:
                    size = spec.disk_mb * MB
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
                soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                most = min(MAX_DESCRIPTORS_OF_PROCESS, hard)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(soft, most), most))
                if self.cpus:
                    os.sched_setaffinity(pid, self.cpus)
                with open(f"/proc/{pid}/oom_score_adj", "w") as file:
                    file.write(OOM_FIRST)
            except OSError:
                continue  # it ended, or the site forbids it; the watchdog still looks
        if spec.processes and os.geteuid() != 0:
            limit_processes(init.pid, spec.processes)
        self._full = self._repeated = 0
        self._beside = usage.runtime_threads(init.pid)
        self._descriptors = Descriptors()
        self.due = 0.0
        self.init = init

    def detach(self) -> None:
        """Ends the watch of a container after a last look at its CPU time. Times continue to count."""
        with self._counting:
            self._count_cpu()
            self.init = None
            self._cpu.end()

    def consumption(self) -> Consumption:
        """Returns what was used so far."""
        with self._counting:
            self._count_cpu()
        disk = self._disk.peak
        return Consumption(self._cpu.total, self._memory_peak.bytes / MB, None if disk is None else disk / MB)

    def _count_cpu(self) -> None:
        init = self.init
        if init is None or not init.alive():
            return
        seen = usage.look(init.pid)
        if seen.pids:
            self._cpu.look(init.pid, seen, self.group, self._processors, time.monotonic())

    def renew(self) -> None:
        """Counts CPU and wall time from zero. Commands from now on are not blamed for a layer that is full already."""
        self._cpu.renew(self.group)
        self._disk.excuse()
        self._began = time.monotonic()

    def end(self) -> None:
        """Cancels a measurement under way, after the watch has ended."""
        self._disk.end()

    # --- in the watchdog's thread -------------------------------------------------------------------------------

    def wanted(self, now: float, node: Node) -> bool:
        """Returns whether to look now: it is time, or the node lost half of what the sandbox may still take."""
        if self.init is None:
            return False
        if now >= self.due or (self._poked and now >= self._looked + BUSY_POLL_INTERVAL_S) or self._node_loses(node):
            return True
        return bool(self.spec.disk_mb and self._disk.wanted(self.spec.disk_mb * MB, node.free))

    def _node_loses(self, node: Node) -> bool:
        """Returns whether the node loses memory or descriptors as fast as a hog takes them."""
        if node.opened - self._opened > (MAX_DESCRIPTORS - self._descriptors.held.count) / 2:
            return True
        allowed = (self.spec.memory_mb or 0) * MB
        return bool(allowed and self._available - node.available > (allowed - self._memory) / 2)

    def check(self, now: float, node: Node) -> None:
        """Looks once, and ends what exceeds a limit."""
        init = self.init
        if init is None or not init.alive():
            return
        spec = self.spec
        poked, early = self._poked, now < self._looked + BUSY_POLL_INTERVAL_S
        self._poked, self._looked = False, now
        seen = usage.look(init.pid, written=bool(spec.disk_mb))
        with self._counting:
            if self.init is not init:
                return
            used = self._cpu.look(init.pid, seen, self.group, self._processors, now)
        # A command that has just started may only begin to work.
        worked = used > 0.02 or len(seen.pids) > 8 or poked or early or not self.due
        urgent = self._node_loses(node)
        self._available, self._opened = node.available, node.opened
        self._descriptors.poll(init.pid, seen, now, urgent)
        self.due = now + (BUSY_POLL_INTERVAL_S if worked else IDLE_POLL_INTERVAL_S)
        if self.group is not None and self.group.new_ooms():  # the kernel was first
            most = float(spec.memory_mb or 0)
            self.on_breach(Breach("memory", most, most), None, False)
        breach = self._times(now) or self._processes(seen, now) or self._memory_over(init, seen)
        if breach is None and (count := self._descriptors.held.count) > MAX_DESCRIPTORS:
            breach = Breach("descriptors", count, MAX_DESCRIPTORS)
        if breach is None and spec.disk_mb:
            breach = self._disk_over(init, seen, now, node.free)
        if breach is None:
            self._repeated = 0
            return
        self.due = now + NODE_POLL_INTERVAL_S
        self._end(init, seen, breach)

    def _times(self, now: float) -> Breach | None:
        spec = self.spec
        used = self._cpu.seconds
        if spec.cpu_s and used > spec.cpu_s:
            return Breach("cpu time", used, spec.cpu_s, final=True)
        if spec.cpu_s:  # one second of wall time adds at most one CPU second for each processor
            self.due = min(self.due, now + max(NODE_POLL_INTERVAL_S, (spec.cpu_s - used) / self._processors))
            if self._cpu.leaks:
                self.due = now
        if spec.wall_s:
            if now - self._began > spec.wall_s:
                return Breach("wall time", now - self._began, spec.wall_s, final=True)
            self.due = min(self.due, self._began + spec.wall_s + NODE_POLL_INTERVAL_S)
        return None

    @property
    def _processors(self) -> int:
        return len(self.cpus) or _ALL

    def _processes(self, seen: usage.Look, now: float) -> Breach | None:
        """Reports a breach only after two looks in a row near the limit, so short spikes survive and fork bombs do not.

        At the limit, processes end because a fork failed as fast as others start. So nearly full counts as full.
        """
        allowed = self.spec.processes
        if not allowed or seen.threads + self._beside < FULL * allowed:
            self._full = 0
            return None
        self._full += 1
        self.due = now + 2 * NODE_POLL_INTERVAL_S
        return Breach("processes", seen.threads + self._beside, allowed) if self._full > 1 else None

    def _memory_over(self, init: Identity, seen: usage.Look) -> Breach | None:
        held = self._descriptors.held
        beside = held.buffers + (self._disk.bytes if self.layer_in_memory else 0)

        def exact() -> int:
            return usage.memory_of(init.pid, seen.pids, held.memfds) + beside

        self._memory = seen.resident + usage.memory_files(init.pid) + held.memfds + beside
        self._memory_peak.look(self._memory, exact)
        allowed = self.spec.memory_mb
        if not allowed or (self._memory <= allowed * MB and not usage.SWAP):
            return None
        self._memory = exact()
        return Breach("memory", self._memory / MB, allowed) if self._memory > allowed * MB else None

    def _disk_over(self, init: Identity, seen: usage.Look, now: float, free: Free) -> Breach | None:
        assert self.spec.disk_mb is not None

        def deleted() -> int:
            self._descriptors.poll(init.pid, seen, now, True)
            return self._descriptors.held.deleted_files

        if self._disk.grows_over(
            self.spec.disk_mb * MB, self.directories, self.occupied, init.pid, seen.written, deleted, now, free
        ):
            return Breach("disk", self._disk.bytes / MB, self.spec.disk_mb)
        return None

    def _end(self, init: Identity, seen: usage.Look, breach: Breach) -> None:
        """Ends the command that uses most. Ends the container if that did not help or no command can be named."""
        number = None
        if not breach.final and self._repeated < 2:
            number = blame(seen.pids, breach.limit, self._descriptors.held)
        self._repeated += 1
        whole = number is None
        if whole and breach.limit == "disk":  # the writer may have ended; twice in a row means it hides
            self._unblamed += 1
            whole = self._unblamed > 1
        self.on_breach(breach, number, whole)
        if number is not None:
            kill_marked(init.pid, b"%s=%d" % (MARKER.encode(), number), KILL_ROUNDS)
        elif whole:
            init.kill()


def blame(pids: list[int], limit: str, held: Held) -> int | None:
    """Returns the command whose processes use most; ``None`` if most of it belongs to no command."""
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
        del used[None]  # the runner counts what processes wrote that it has reaped
    return max(used, key=lambda number: used[number]) if used else None


class Watchdog:
    """Watches every sandbox of this process in one thread, from the first sandbox to :meth:`close`.

    Args:
        scratch: directory of the writable layers.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._watches: set[SandboxWatch] = set()
        self._pinned: Counter[int] = Counter()
        self._number = 0
        group = cgroups.delegated()
        self._group = group if group is not None and cgroups.prepare(group) else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, watch: SandboxWatch) -> None:
        """Chooses the sandbox's processors and begins to watch it."""
        with self._lock:
            watch.cpus = self._choose_cpus(watch.spec.cpus)
            if self._group is not None:
                self._number += 1
                name = f"megaflow-{os.getpid()}-{id(self) & 0xFFFFFF:x}-{self._number}"
                watch.group = cgroups.Cgroup(self._group, name, watch.spec)
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox limits", daemon=True)
                self._thread.start()

    def unwatch(self, watch: SandboxWatch) -> None:
        """Ends the watch of a sandbox. Idempotent."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
                self._pinned.subtract(watch.cpus)
        watch.end()
        if watch.group is not None:
            watch.group.remove()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def cpu_s(self) -> float:
        """Returns the CPU seconds the watchdog has taken so far."""
        thread = self._thread
        if thread is None or thread.ident is None or not thread.is_alive():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def _choose_cpus(self, wanted: float | None) -> frozenset[int]:
        """Returns the least used processors, as many as wanted; empty to set no affinity."""
        ours = sorted(os.sched_getaffinity(0))
        if not wanted or math.ceil(wanted) >= len(ours):
            return frozenset()
        # Other processes of the node do not know these choices, so each process starts at a different processor.
        first = os.getpid() % len(ours)
        turned = ours[first:] + ours[:first]
        chosen = sorted(turned, key=lambda cpu: self._pinned[cpu])[: math.ceil(wanted)]
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
                    continue  # a process that ended while it was read
