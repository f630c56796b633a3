"""The CPU time of a sandbox's processes, ended ones too, also where nobody waited for them.

A process that is waited for leaves its time to the one that waits. One whose parent ignores SIGCHLD leaves it to
nobody: between two looks such a process is gone, and its parent's time has not grown by what it had used. Where the
sandbox has a control group the kernel counts all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megaflow_hpc.environments.sandbox.limits.cgroups import Group
from megaflow_hpc.environments.sandbox.limits.usage import TICKS, Look, Process

Processes = Mapping[int, Process]


def lost(before: Processes, now: Processes, init: int, ticks: float, processors: int) -> float:
    """Returns the CPU time, in ticks, of processes that ended between two looks and left it to nobody.

    One that was born and ended within two looks stands for others like it, and is charged the time between them.

    Args:
        init: takes the time of orphans.
        ticks: time between the looks.
        processors: at most so many ran at a time.
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
    """The CPU time of one sandbox, over all its containers. ``begin`` and ``end`` as they come and go."""

    def __init__(self) -> None:
        self.leaks = False
        """Processes were seen to end without anybody's waiting for them."""
        self._earlier = 0.0
        self._before = self._now = self._lost = 0.0
        self._group_before = 0.0
        self._processes: Processes = {}
        self._looked = 0.0

    @property
    def seconds(self) -> float:
        """Used since the last :meth:`renew`, as of the last look."""
        return self._before + self._now

    @property
    def total(self) -> float:
        """Used since the beginning, as of the last look."""
        return self._earlier + self.seconds

    def renew(self, group: Group | None) -> None:
        """Counts from zero again."""
        self._earlier = self.total
        self._before = self._now = self._lost = 0.0
        self._group_before = group.cpu_s() or 0.0 if group else 0.0
        self._processes = {}

    def end(self) -> None:
        """Ends with a container."""
        self._before += self._now
        self._now = self._lost = 0.0
        self._processes = {}
        self.leaks = False

    def look(self, init: int, seen: Look, group: Group | None, processors: int, now: float) -> float:
        """Counts a look; returns the seconds used since the last one."""
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
