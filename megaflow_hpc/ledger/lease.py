"""A pod's lease on all its blocks, and what it knows of the leases of others. Pure: no file is touched here.

A pod counts up one file; an observer declares it gone when the count, read twice, was the same for longer than
``lease_s`` of the observer's own clock, counted from the *end* of the first reading to the *beginning* of the last one.
*Fence.* A pod commits nothing once its lease is ``commit_s`` old, counted from *before* it was written; a result counts
if the fence is still open *after* it became durable. What is between the two times may be lost to caches of the file
system. *Superseded.* A start that sees a later one of the same element closes its fence for good: Slurm took its node
for lost, and the later one takes its blocks over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from megaflow_hpc.ledger.calls import Clock, Do, Names, Publish, Read, Rewrite, Steps, There
from megaflow_hpc.ledger.ending import OPEN_S
from megaflow_hpc.ledger.names import GONE, LEASES, earlier


@dataclass(frozen=True)
class Times:
    """When a lease is renewed, fenced and expired, in seconds of its age."""

    renew_s: float = 30.0
    commit_s: float = 90.0
    lease_s: float = 180.0
    open_s: float = OPEN_S
    """How long a pod waits for a consumer that does not renew its open lease."""


TIMES = Times()


@dataclass(frozen=True)
class PodIdentity:
    """One start of one pod. ``start`` differs between starts of the same element; together they are unique in a run."""

    pod: str
    start: str
    job_id: str = ""
    """``<array job>_<element>`` under Slurm, empty elsewhere."""
    host: str = ""
    pid: int = 0
    pid_start: int = 0
    """Field 22 of /proc/PID/stat of rank 0: with host and pid it names one process for ever."""

    @property
    def name(self) -> str:
        """``<pod>.<start>``."""
        return f"{self.pod}.{self.start}"


class Lease:
    """The lease of one start of a pod, and what it knows of others' leases; operations are steps for a file system."""

    def __init__(self, identity: PodIdentity, times: Times = TIMES) -> None:
        self.identity, self.times = identity, times
        self.counter = 0
        self.renewed = 0.0
        """This machine's clock before the lease was last counted up."""
        self.renew_s = times.renew_s
        """How often the lease is renewed; often, where it shall show how far the pod is, else as seldom as it may."""
        self.progress: dict[str, Any] = {}
        """What the lease says beside the identity of the pod."""
        self.watched = False
        """Another pod watches the leases of all and marks who is gone: no lease is read here."""
        self.leases: dict[str, dict[str, Any]] = {}
        """What each lease said when it was read last, by ``<pod>.<start>``."""
        self._seen: dict[str, tuple[int, float]] = {}
        self._alive: set[str] = set()

    @property
    def closes_at(self) -> float:
        """When the fence closes, by this machine's clock; minus infinity before the lease was written."""
        return self.renewed + self.times.commit_s if self.counter else -math.inf

    def open_at(self, now: float) -> bool:
        """Tells whether the fence is open: what became durable until ``now`` counts."""
        return now < self.closes_at

    def may_commit(self) -> Steps[bool]:
        """Tells whether the fence is open now."""
        return self.open_at((yield Clock()))

    def committed(self, commit: Callable[[], object]) -> Steps[bool]:
        """Calls ``commit``; True if it counts: the fence was open before, and still is now that all is durable."""
        if not (yield from self.may_commit()):
            return False
        yield Do(commit)
        return (yield from self.may_commit())

    def renew(self, force: bool = False) -> Steps[None]:
        """Counts the lease up when due, or by ``force``. One that is too old stays so: somebody may be taking over."""
        now: float = yield Clock()
        if self.counter and (not self.open_at(now) or (not force and now - self.renewed < self.renew_s)):
            return
        content = {**asdict(self.identity), "counter": self.counter + 1, **self.progress}
        path = f"{LEASES}/{self.identity.name}"
        yield (Rewrite(path, content) if self.counter else Publish(path, content))
        self.counter += 1
        self.renewed = now
        start = self.identity.start
        if start.isdigit() and (yield There(f"{LEASES}/{self.identity.pod}.{int(start) + 1}")):
            self.renewed = -math.inf

    def _look_after(self, owners: Collection[str]) -> Steps[set[str]]:
        """Returns those of ``owners`` that are gone."""
        gone = set((yield Names(GONE))) if owners else set()
        found = set()
        for owner in sorted(owners):
            if owner in gone or self._earlier(owner):
                found.add(owner)
            elif self.watched:
                self._alive.add(owner)
            elif (yield from self._expired(owner)):
                found.add(owner)
        return found

    def _earlier(self, owner: str) -> bool:
        pod, _, start = owner.rpartition(".")
        return pod == self.identity.pod and earlier(start, self.identity.start)

    def _expired(self, owner: str) -> Steps[bool]:
        """Looks at one lease: it has run out where it was the same for long enough, at this look and those before."""
        looked_at: float = yield Clock()
        try:
            lease = yield Read(f"{LEASES}/{owner}")
        except ValueError:
            return False  # half written: it tells nothing
        if lease is not None:
            self.leases[owner] = lease
        counter = int(lease["counter"]) if lease else -1
        seen = self._seen.get(owner)
        if seen is None or seen[0] != counter:
            self._seen[owner] = counter, (yield Clock())
            if seen is not None:
                self._alive.add(owner)
            return False
        return looked_at - seen[1] > self.times.lease_s
