"""Implements leases: files with a counter that the holder increments and observers read. This module does no I/O
itself.

=========================== =============== ================================ ======================= file under
``RUN/ledger``   holder          meaning                          expires after ===========================
=============== ================================ ======================= ``leases/<pod>.<start>``    a pod
works on the blocks it claimed   :attr:`Times.lease_s` ``open/<consumer>``         a consumer      may add blocks
:attr:`Times.open_s` ``<role>.json``             a process       does a job for all pods          ``leader.STALE_S``
=========================== =============== ================================ =======================

Clocks of different machines are never compared. An observer uses its own clock to measure how long a counter has not
changed: from the *end* of the read that first showed the value to the *beginning* of the latest read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger.calls import Clock, Publish, Read, Rewrite, Steps


@dataclass(frozen=True)
class Times:
    """Lease intervals and timeouts, in seconds."""

    renew_s: float = 30.0
    """Lease age at which a pod renews its lease."""
    commit_s: float = 90.0
    """Lease age at which a pod stops committing results. Its fence is then closed."""
    lease_s: float = 180.0
    """Lease age at which another pod may take over. The margin over ``commit_s`` allows for file-system caches."""
    open_s: float = 900.0
    """Lease age at which pods stop waiting for a consumer. A trainer that restarts or changes its allocation is usually
    back by then. If the trainer is queued for longer, the pods should not occupy their nodes."""


TIMES = Times()


@dataclass(frozen=True)
class PodIdentity:
    """Identity of one start of a pod. Each start of the same array element has a different ``start``."""

    pod: str
    start: str
    job_id: str = ""
    """``<array job>_<element>`` under Slurm, otherwise empty."""
    host: str = ""
    pid: int = 0
    pid_start: int = 0
    """Start time of rank 0 from /proc/PID/stat (field 22), in clock ticks after boot. Host, pid and start time together
    identify a process uniquely."""

    @property
    def name(self) -> str:
        """Name of the form ``<pod>.<start>``, unique in a run."""
        return f"{self.pod}.{self.start}"


@dataclass
class Lease:
    """A lease file, as seen by its holder or an observer. Operations are generators of file-system calls."""

    path: str
    counter: int = 0
    """Last value read or written. 0 if the file was missing."""
    content: dict[str, Any] = field(default_factory=dict)
    """Last content read or written. Empty if the file was missing."""
    renewed_at: float = -math.inf
    """Time just before this process last renewed the lease, on this machine's clock. Minus infinity before the first
    renewal."""
    unchanged_since: float | None = None
    """Time just after the read that first showed the current counter, on this machine's clock. ``None`` before the
    first read."""
    changed: bool = False
    """True if the counter changed between two reads, which proves that the holder was alive."""

    def publish(self, now: float, content: Mapping[str, Any]) -> Steps[None]:
        """Increments the counter and replaces the file.

        Args:
            now: Time before the call, on this machine's clock. The lease's age counts from this time.
        """
        new = self.next(content)
        yield Publish(self.path, new)
        self.renewed(now, new)

    def rewrite(self, now: float, content: Mapping[str, Any]) -> Steps[None]:
        """Increments the counter by overwriting the file in place. Unlike a rename, this does not change the directory.
        Raises FileNotFoundError if the lease was removed."""
        new = self.next(content)
        yield Rewrite(self.path, new)
        self.renewed(now, new)

    def next(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the file content for the next renewal."""
        return {**content, "counter": self.counter + 1}

    def renewed(self, now: float, content: dict[str, Any]) -> None:
        """Records that this process wrote ``content``."""
        self.counter, self.content = content["counter"], content
        self.renewed_at = self.unchanged_since = now

    def look(self) -> Steps[float]:
        """Reads the lease. Returns for how many seconds the counter is known to be unchanged."""
        began: float = yield Clock()
        try:
            content: dict[str, Any] | None = yield Read(self.path)
        except ValueError:
            return 0.0  # the holder is writing it
        self.content = content or {}
        counter = self.content.get("counter")
        if not isinstance(counter, int):
            counter = 0
        if self.unchanged_since is not None and counter == self.counter:
            return began - self.unchanged_since
        self.changed = self.unchanged_since is not None
        self.counter = counter
        self.unchanged_since = yield Clock()
        return 0.0

    def unchanged_s(self, now: float) -> float:
        """Returns the age of the counter in seconds at ``now``, assuming that it has not changed since the last
        read."""
        return 0.0 if self.unchanged_since is None else now - self.unchanged_since


def process_here(lease: Mapping[str, Any]) -> Identity | None:
    """Returns the process of a pod that runs outside Slurm on this host, dead or alive. Returns ``None`` for any other
    pod."""
    if lease.get("job_id") or lease.get("host") != os.uname().nodename:
        return None
    try:
        return Identity(int(lease["pid"]), int(lease["pid_start"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
