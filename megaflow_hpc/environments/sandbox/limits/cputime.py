"""Counts the CPU time of a sandbox's processes, also of ended processes that no process waited for.

The kernel adds the time of an ended process to the process that waits for it. If the parent ignores SIGCHLD, the time
is lost: the process is gone at the next look, and its parent's time has not grown by the same amount. If the sandbox
has a control group, the kernel counts all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megaflow_hpc.environments.sandbox.limits.cgroups import Cgroup
from megaflow_hpc.environments.sandbox.limits.usage import TICKS, Look, Process

Processes = Mapping[int, Process]


def lost(before: Processes, now: Processes, init: int, ticks: float, processors: int) -> float:
    """Returns the CPU time, in ticks, of processes that ended between two looks and that no process waited for.

    A process that started and ended within two looks stands for others like it. It is charged the time between them.

    Args:
        init: waits for orphans.
        ticks: time between the looks.
        processors: maximum number of processes that run at the same time.
    """
    if before.keys() <= now.keys():
        return 0.0
    debts: Counter[int] = Counter()
    passing: Counter[int] = Counter()
    for pid, old in before.items():
        if _lives(pid, old, now):
            continue
        parent = old.parent
        while parent in before and not _lives(parent, before[parent], now):
            parent = before[parent].parent
        debts[parent] += old.own + old.waited
        passing[parent] += old.state == "R" and old.own <= ticks
    unpaid = guessed = spare = 0.0
    if init in before and init in now:
        spare = max(0, now[init].waited - before[init].waited - debts.pop(init, 0))
    for parent, debt in debts.items():
        grown = now[parent].waited - before[parent].waited if parent in before and parent in now else 0
        if debt > grown:
            unpaid += debt - grown
            guessed += passing[parent] * ticks
    unpaid -= spare
    return max(unpaid, min(guessed, processors * ticks)) if unpaid > 0 else 0.0


def _lives(pid: int, old: Process, now: Processes) -> bool:
    return pid in now and now[pid].start == old.start


class CpuTime:
    """The CPU time of one sandbox, over all its containers."""

    def __init__(self) -> None:
        self.leaks = False
        """True if processes ended and no process waited for them."""
        self._earlier = 0.0
        self._before = self._now = self._lost = 0.0
        self._group_before = 0.0
        self._processes: Processes = {}
        self._looked = 0.0

    @property
    def seconds(self) -> float:
        """CPU seconds since the last :meth:`renew`, at the last look."""
        return self._before + self._now

    @property
    def total(self) -> float:
        """CPU seconds since the beginning, at the last look."""
        return self._earlier + self.seconds

    def renew(self, group: Cgroup | None) -> None:
        """Counts from zero again."""
        self._earlier = self.total
        self._before = self._now = self._lost = 0.0
        self._group_before = group.cpu_s() or 0.0 if group else 0.0
        self._processes = {}

    def end(self) -> None:
        """Handles the end of a container."""
        self._before += self._now
        self._now = self._lost = 0.0
        self._processes = {}
        self.leaks = False

    def look(self, init: int, seen: Look, group: Cgroup | None, processors: int, now: float) -> float:
        """Takes in a look; returns the CPU seconds since the last one."""
        last = self._now
        kernel = group.cpu_s() if group is not None else None
        if kernel is not None:
            self._before, self._now = 0.0, kernel - self._group_before
            return self._now - last
        if self._processes:
            gone = lost(self._processes, seen.processes, init, (now - self._looked) * TICKS, processors)
            self._lost += gone / TICKS
            self.leaks = self.leaks or gone > 0
        self._processes, self._looked = seen.processes, now
        self._now = seen.cpu_s + self._lost
        return self._now - last
