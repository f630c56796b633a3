"""Leases: files with a counter that the holder increments and observers read. Pure: no file is touched here.

=========================== =============== ================================ =======================
file under ``RUN/ledger``   holder          meaning                          expires after
=========================== =============== ================================ =======================
``leases/<pod>.<start>``    a pod           works on the blocks it claimed   :attr:`Times.lease_s`
``open/<consumer>``         a consumer      may add blocks                   :attr:`Times.open_s`
``<role>.json``             a process       does a job for all pods          ``leader.STALE_S``
=========================== =============== ================================ =======================

Clocks of different machines are never compared. An observer measures with its own clock how long a counter has been
unchanged: from the *end* of the read that first showed the value to the *beginning* of the latest read.
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
    """Age at which a pod renews its lease."""
    commit_s: float = 90.0
    """Age of its lease at which a pod's fence closes. The pod commits nothing more."""
    lease_s: float = 180.0
    """Age at which another pod takes over. The margin over ``commit_s`` covers file-system caches."""
    open_s: float = 900.0
    """Age at which pods stop waiting for a consumer. A trainer that restarts or changes its allocation is usually back
    by then. If it is queued for longer, the pods should not hold their nodes."""


TIMES = Times()


@dataclass(frozen=True)
class PodIdentity:
    """Identity of one start of a pod. ``start`` differs between starts of the same array element."""

    pod: str
    start: str
    job_id: str = ""
    """``<array job>_<element>`` under Slurm, otherwise empty."""
    host: str = ""
    pid: int = 0
    pid_start: int = 0
    """Start time of rank 0 from /proc/PID/stat (field 22). Together with host and pid, it identifies a process
    uniquely."""

    @property
    def name(self) -> str:
        """``<pod>.<start>``, unique in a run."""
        return f"{self.pod}.{self.start}"


@dataclass
class Lease:
    """One lease file, for its holder or for an observer. Operations are steps."""

    path: str
    counter: int = 0
    """The counter last read or written. 0 if there was no file."""
    content: dict[str, Any] = field(default_factory=dict)
    """The content last read or written. Empty if there was no file."""
    renewed_at: float = -math.inf
    """Time just before this process last renewed the lease, on this machine's clock."""
    unchanged_since: float | None = None
    """Time just after the read that first showed the current counter, on this machine's clock."""
    changed: bool = False
    """True if the counter has changed between two reads, so the holder was alive."""

    def publish(self, now: float, content: Mapping[str, Any]) -> Steps[None]:
        """Increments the counter and replaces the file.

        Args:
            now: Time before the call, on this machine's clock. The lease is valid from then.
        """
        new = self.next(content)
        yield Publish(self.path, new)
        self.renewed(now, new)

    def rewrite(self, now: float, content: Mapping[str, Any]) -> Steps[None]:
        """Increments the counter in the existing file. Unlike a rename, this does not change the directory."""
        new = self.next(content)
        yield Rewrite(self.path, new)
        self.renewed(now, new)

    def next(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the file content of the next renewal."""
        return {**content, "counter": self.counter + 1}

    def renewed(self, now: float, content: dict[str, Any]) -> None:
        """Records that this process wrote ``content``."""
        self.counter, self.content = content["counter"], content
        self.renewed_at = self.unchanged_since = now

    def look(self) -> Steps[float]:
        """Reads the lease. Returns the seconds for which its counter has certainly not changed."""
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
        """Returns the age of the counter in seconds, assuming that it has not changed since the last read."""
        return 0.0 if self.unchanged_since is None else now - self.unchanged_since


def process_here(lease: Mapping[str, Any]) -> Identity | None:
    """Returns the process of a pod that runs outside Slurm on this host, dead or alive. Otherwise ``None``."""
    if lease.get("job_id") or lease.get("host") != os.uname().nodename:
        return None
    try:
        return Identity(int(lease["pid"]), int(lease["pid_start"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
