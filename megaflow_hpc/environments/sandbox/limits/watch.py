"""One sandbox under watch: what it may use, what it was last seen to use, and the end of what goes over.

What goes over is ended and said so: memory, processes and disk cost the command that uses most (the whole container
where none can be named: a process that wiped its environment); CPU and wall time, which no command can give back, end
the sandbox. Where a cgroup is delegated the kernel holds memory, processes and CPU shares as well (cgroups.py).

Rights are not needed for what is set once at the start: RLIMIT_NPROC (per user namespace), RLIMIT_FSIZE, an affinity
of ``cpus`` processors, and the first place in the queue of the kernel's own out-of-memory killer.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megaflow_hpc.environments.sandbox.commands.running import command_of
from megaflow_hpc.environments.sandbox.commands.shell import MARKER
from megaflow_hpc.environments.sandbox.limits import cgroups, usage
from megaflow_hpc.environments.sandbox.limits.consumption import Consumption, MemoryPeak
from megaflow_hpc.environments.sandbox.limits.cputime import CpuTime
from megaflow_hpc.environments.sandbox.limits.descriptors import (
    MAX_DESCRIPTORS,
    MAX_DESCRIPTORS_OF_PROCESS,
    Descriptors,
    Held,
)
from megaflow_hpc.environments.sandbox.limits.disk import DiskUse, Free
from megaflow_hpc.environments.sandbox.processes import kill_marked, limit_processes
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.host.process import Identity, descendants

TICK_S = 0.05
"""Seconds between two looks at the node."""
BUSY_S = 0.5
"""Seconds between looks at a sandbox that works."""
IDLE_S = 2.0
"""Seconds between looks at a sandbox that did nothing since the last."""
MB = 1_000_000
_ALL = os.cpu_count() or 1
FULL = 0.95
KILL_ROUNDS = 5
OOM_FIRST = "900"
"""``oom_score_adj`` of a sandbox: where memory runs out before the watchdog looks, no rank dies for it."""


@dataclass(frozen=True)
class Breach:
    """A limit that was passed. ``value`` and ``allowed`` in the unit that :meth:`__str__` writes."""

    limit: str
    value: float
    allowed: float
    final: bool = False
    """The sandbox cannot go on: what was used cannot be given back."""

    def __str__(self) -> str:
        units = {"memory": "MB", "disk": "MB", "processes": "processes and threads", "descriptors": "open descriptors"}
        unit = units.get(self.limit, "s")
        return f"{self.limit} limit: {self.value:.0f} of {self.allowed:g} {unit}"


OnBreach = Callable[[Breach, int | None, bool], None]
"""Called in the watchdog's thread before anything is killed: the breach, the number of the command to blame, and
whether the whole container does. Neither: it was seen, and nobody who could be blamed is left."""


class Node(NamedTuple):
    """What the whole node has, asked at every tick."""

    available: int
    """Bytes of memory."""
    free: Free
    """Scratch."""
    opened: int
    """Files that are open."""


class Watch:
    """One sandbox under watch. ``attach`` and ``detach`` as its containers come and go; ``renew`` when its times
    (CPU and wall) start anew."""

    def __init__(self, spec: SandboxSpec, layer: str, on_breach: OnBreach, *, layer_in_memory: bool = False) -> None:
        self.spec = spec
        self.directories = [layer]
        """What ``disk_mb`` bounds: the writable layer first, and what else of the sandbox's own it may write."""
        self.on_breach = on_breach
        self.layer_in_memory = layer_in_memory
        """Scratch is memory: what the layer holds counts as such."""
        self.occupied = 0
        """Bytes in them that are not the sandbox's work: a copy of the image, what was laid out for its verifier."""
        self.init: Identity | None = None
        self.group: cgroups.Group | None = None
        self.cpus: frozenset[int] = frozenset()
        self.due = 0.0
        self._poked = False
        self._looked = 0.0
        self._cpu = CpuTime()
        self._descriptors = Descriptors()
        self._disk = DiskUse()
        self._memory_peak = MemoryPeak()
        self._counting = threading.Lock()
        """Held while CPU time is counted, by the watchdog's thread or by that which ends a container."""
        self._began = time.monotonic()
        self._full = 0
        self._beside = 0
        self._repeated = 0
        self._unblamed = 0
        self._memory = 0
        self._available = 0
        self._opened = 0

    def poke(self) -> None:
        """Asks for a look as soon as one that works gets it, since a command starts. Cheap enough for every one."""
        self._poked = True

    def adopt(self, owner: Identity) -> None:
        """Puts the process that will start a container into the control group, and with it all that it starts."""
        if self.group is not None:
            self.group.add(owner.pid)

    def attach(self, init: Identity) -> None:
        """Begins with a container that has started, and sets what the kernel enforces by itself on its few first
        processes."""
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
                continue  # it ended, or the site forbids it: the watchdog still looks
        if spec.processes and os.geteuid() != 0:
            limit_processes(init.pid, spec.processes)
        self._full = self._repeated = 0
        self._beside = usage.runtime_threads(init.pid)
        self._descriptors = Descriptors()
        self.due = 0.0
        self.init = init

    def detach(self) -> None:
        """Ends with a container that is about to be dropped, after a last look at its CPU; times go on counting."""
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
        """Counts CPU and wall time from zero again; whoever runs from now on is not blamed for a layer that is full."""
        self._cpu.renew(self.group)
        self._disk.excuse()
        self._began = time.monotonic()

    def end(self) -> None:
        """Gives up a measurement under way, after the watch."""
        self._disk.end()

    # --- in the watchdog's thread -------------------------------------------------------------------------------

    def wanted(self, now: float, node: Node) -> bool:
        """Whether to look now: it is its turn, or the node lost half of what it may still take."""
        if self.init is None:
            return False
        if now >= self.due or (self._poked and now >= self._looked + BUSY_S) or self._node_loses(node):
            return True
        return bool(self.spec.disk_mb and self._disk.wanted(self.spec.disk_mb * MB, node.free))

    def _node_loses(self, node: Node) -> bool:
        """Whether it lost memory, or descriptors, as fast as a hog takes them."""
        if node.opened - self._opened > (MAX_DESCRIPTORS - self._descriptors.held.count) / 2:
            return True
        allowed = (self.spec.memory_mb or 0) * MB
        return bool(allowed and self._available - node.available > (allowed - self._memory) / 2)

    def check(self, now: float, node: Node) -> None:
        """Looks once, and ends what goes over."""
        init = self.init
        if init is None or not init.alive():
            return
        spec = self.spec
        poked, early = self._poked, now < self._looked + BUSY_S
        self._poked, self._looked = False, now
        seen = usage.look(init.pid, written=bool(spec.disk_mb))
        with self._counting:
            if self.init is not init:
                return
            used = self._cpu.look(init.pid, seen, self.group, self._processors, now)
        # What starts may only begin to work, and in less than a turn there is little to see of it.
        worked = used > 0.02 or len(seen.pids) > 8 or poked or early or not self.due
        urgent = self._node_loses(node)
        self._available, self._opened = node.available, node.opened
        self._descriptors.poll(init.pid, seen, now, urgent)
        self.due = now + (BUSY_S if worked else IDLE_S)
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
        self.due = now + TICK_S
        self._end(init, seen, breach)

    def _times(self, now: float) -> Breach | None:
        spec = self.spec
        used = self._cpu.seconds
        if spec.cpu_s and used > spec.cpu_s:
            return Breach("cpu time", used, spec.cpu_s, final=True)
        if spec.cpu_s:  # at most as many seconds as there are processors pass before it can be over
            self.due = min(self.due, now + max(TICK_S, (spec.cpu_s - used) / self._processors))
            if self._cpu.leaks:
                self.due = now
        if spec.wall_s:
            if now - self._began > spec.wall_s:
                return Breach("wall time", now - self._began, spec.wall_s, final=True)
            self.due = min(self.due, self._began + spec.wall_s + TICK_S)
        return None

    @property
    def _processors(self) -> int:
        return len(self.cpus) or _ALL

    def _processes(self, seen: usage.Look, now: float) -> Breach | None:
        """Full in two looks in a row: programs that touch the limit for a moment live, fork bombs do not.

        Nearly full counts: at the limit processes end of a fork that failed as fast as others are born.
        """
        allowed = self.spec.processes
        if not allowed or seen.threads + self._beside < FULL * allowed:
            self._full = 0
            return None
        self._full += 1
        self.due = now + 2 * TICK_S
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
        """Ends the command that uses most; all of the container if that did not help, or no command can be blamed."""
        number = None
        if not breach.final and self._repeated < 2:
            number = blame(seen.pids, breach.limit, self._descriptors.held)
        self._repeated += 1
        whole = number is None
        if whole and breach.limit == "disk":  # who wrote may have ended long ago; twice is somebody in hiding
            self._unblamed += 1
            whole = self._unblamed > 1
        self.on_breach(breach, number, whole)
        if number is not None:
            kill_marked(init.pid, b"%s=%d" % (MARKER.encode(), number), KILL_ROUNDS)
        elif whole:
            init.kill()


def blame(pids: list[int], limit: str, held: Held) -> int | None:
    """Returns the command whose processes use most of what ran out; ``None`` if most of it belongs to no command."""
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
        del used[None]  # the runner has reaped those who wrote before, and counts what they wrote as its own
    return max(used, key=lambda number: used[number]) if used else None
