"""Leases: files with a counter that the holder counts up and that observers read. Pure: no file is touched here.

=========================== =============== ================================ =======================
file under ``RUN/ledger``   holder          meaning                          expires after
=========================== =============== ================================ =======================
``leases/<pod>.<start>``    a pod           works on the blocks it claimed   :attr:`Times.lease_s`
``open/<consumer>``         a consumer      may add blocks                   :attr:`Times.open_s`
``<role>.json``             a process       does a job for all pods          ``leader.STALE_S``
=========================== =============== ================================ =======================

Clocks of two machines are never compared. An observer knows from its own clock for how long a counter has not changed:
from the *end* of the reading that first showed the counter to the *beginning* of the last reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.ledger.calls import Clock, Publish, Read, Rewrite, Steps


@dataclass(frozen=True)
class Times:
    """Ages of leases in seconds."""

    renew_s: float = 30.0
    """A pod renews its lease."""
    commit_s: float = 90.0
    """The fence closes: a pod commits nothing more."""
    lease_s: float = 180.0
    """Another pod takes over. The time since ``commit_s`` may be lost to caches of the file system."""
    open_s: float = 900.0
    """Pods no longer wait for a consumer. A trainer that restarts or changes its allocation is back by then. If Slurm
    lets it wait for longer, holding nodes is not worth it."""


TIMES = Times()


@dataclass(frozen=True)
class PodIdentity:
    """Identifies one start of one pod. ``start`` differs between starts of the same element."""

    pod: str
    start: str
    job_id: str = ""
    """``<array job>_<element>`` under Slurm, empty elsewhere."""
    host: str = ""
    pid: int = 0
    pid_start: int = 0
    """Field 22 of /proc/PID/stat of rank 0. With host and pid it identifies one process for ever."""

    @property
    def name(self) -> str:
        """``<pod>.<start>``, unique in a run."""
        return f"{self.pod}.{self.start}"


@dataclass
class Lease:
    """One lease file, as its holder or an observer uses it. Operations are steps for a file system."""

    path: str
    counter: int = 0
    """The counter that was last read or written. 0 if there was no file."""
    content: dict[str, Any] = field(default_factory=dict)
    """The content that was last read or written. Empty if there was no file."""
    renewed_at: float = -math.inf
    """This machine's clock before this process last renewed the lease."""
    unchanged_since: float | None = None
    """This machine's clock after the reading that first showed the counter."""
    changed: bool = False
    """Some reading showed another counter than the one before: the holder was alive in between."""

    def publish(self, now: float, content: Mapping[str, Any]) -> Steps[None]:
        """Counts the lease up and replaces its file.

        Args:
            now: this machine's clock. It must be read before, because the lease counts from then.
        """
        new = self.next(content)
        yield Publish(self.path, new)
        self.renewed(now, new)

    def rewrite(self, now: float, content: Mapping[str, Any]) -> Steps[None]:
        """Counts the lease up in its file, which must exist. No directory changes."""
        new = self.next(content)
        yield Rewrite(self.path, new)
        self.renewed(now, new)

    def next(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of the file after the next renewal."""
        return {**content, "counter": self.counter + 1}

    def renewed(self, now: float, content: dict[str, Any]) -> None:
        """Records that this process wrote ``content``."""
        self.counter, self.content = content["counter"], content
        self.renewed_at = self.unchanged_since = now

    def look(self) -> Steps[float]:
        """Reads the lease. Returns for how many seconds its counter is known not to have changed."""
        began: float = yield Clock()
        try:
            content: dict[str, Any] | None = yield Read(self.path)
        except ValueError:
            return 0.0  # its holder is writing it
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
        """Returns for how many seconds the counter has not changed, if it has not changed since the last look."""
        return 0.0 if self.unchanged_since is None else now - self.unchanged_since
