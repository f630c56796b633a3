"""The watchdog that holds sandboxes to what they may use, without root: one thread for all of a process.

The thread ticks 20 times a second and asks the node three cheap things: how much memory is available, how much of
scratch is free, how many files are open. A sandbox (watch.py) is looked at when its own turn comes (twice a second
while it works, every two seconds while it idles), or as soon as the node lost a good part of what that sandbox may
still take. So the price grows with what happens and not with how many sandboxes there are, and a hog is seen within one
tick.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter

from megaflow_hpc.environments.sandbox.limits import cgroups, usage
from megaflow_hpc.environments.sandbox.limits.disk import free_disk
from megaflow_hpc.environments.sandbox.limits.watch import TICK_S, Node, Watch


class Watchdog:
    """One thread that watches every sandbox of this process. It starts with the first and ends with :meth:`close`.

    Args:
        scratch: directory of the writable layers.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._watches: set[Watch] = set()
        self._pinned: Counter[int] = Counter()
        self._number = 0
        group = cgroups.delegated()
        self._group = group if group is not None and cgroups.prepare(group) else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, watch: Watch) -> None:
        """Chooses the sandbox's processors and begins to watch it."""
        with self._lock:
            watch.cpus = self._choose_cpus(watch.spec.cpus)
            if self._group is not None:
                self._number += 1
                name = f"megaflow-{os.getpid()}-{id(self) & 0xFFFFFF:x}-{self._number}"
                watch.group = cgroups.Group(self._group, name, watch.spec)
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox limits", daemon=True)
                self._thread.start()

    def unwatch(self, watch: Watch) -> None:
        """Ends the watch of a sandbox. Idempotent."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
                self._pinned.subtract(watch.cpus)
        watch.end()
        if watch.group is not None:
            watch.group.remove()

    def close(self) -> None:
        """Ends the thread; what is still watched is watched no more."""
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
        """The least used of this process's processors, as many as asked for; empty: all of them, no affinity set."""
        ours = sorted(os.sched_getaffinity(0))
        if not wanted or math.ceil(wanted) >= len(ours):
            return frozenset()
        # Ties are broken from a place of this process's own: others on the node do not know of these choices.
        first = os.getpid() % len(ours)
        turned = ours[first:] + ours[:first]
        chosen = sorted(turned, key=lambda cpu: self._pinned[cpu])[: math.ceil(wanted)]
        self._pinned.update(chosen)
        return frozenset(chosen)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
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
