"""Elects a leader: one process of a campaign that does a job on behalf of all.

The leader holds the lease ``RUN/ledger/<role>.json``, which also contains the leader's report. Another process may take
the lease once it has expired. If two processes take it at the same moment, the later write wins, and the loser notices
at its next poll. The job must therefore tolerate being done twice.

One such leader is the coordinator, the pod that surveys the ledger for all pods. Its report is a :class:`Report`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from megaflow_hpc.ledger.accounts import Progress
from megaflow_hpc.ledger.calls import Link, Remove
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.ledger.lease import Lease
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import Asked

SCALER = "scaler"
"""Role of the process that releases held elements of the engine array when there is work for them."""
COORDINATOR = "coordinator"
"""Role of the pod that surveys the ledger for all pods."""
RENEW_S = 30.0
"""Seconds between two renewals of the lease."""
STALE_S = 100.0
"""The lease expires after this many seconds without a renewal."""


class Leader:
    """Leader election for one role. Used by candidates and observers.

    Args:
        role: Name of the role, which is also the name of the lease file.
        name: Name of the candidate, unique in the run. Empty for an observer.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, run: RunDir, role: str, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._name, self._clock = Files(run, clock), name, clock
        self._lease = Lease(f"ledger/{role}.json")

    @property
    def report(self) -> dict[str, Any]:
        """The leader's report at the last poll."""
        return self._lease.content

    def holder(self) -> str:
        """Reads the lease and returns the leader's name. Returns an empty string if there is no leader. A lease that is
        first seen counts as just renewed."""
        try:
            unchanged_s = self._files.carry_out(self._lease.look())
        except OSError:
            return ""
        return str(self.report.get("holder", "")) if unchanged_s < STALE_S else ""

    def confirmed(self) -> bool:
        """Returns whether the lease is fresh and this object has seen a renewal of it."""
        return bool(self.holder()) and self._lease.changed

    def hold(self, report: Mapping[str, Any] | None = None) -> bool:
        """Takes or renews the lease. Call it about every :data:`RENEW_S` seconds.

        Args:
            report: Additional content of the lease file.

        Returns:
            True if this process is the leader.

        Raises:
            OSError: The file cannot be written.
        """
        if self.holder() not in ("", self._name):
            return False
        lease, now = self._lease, self._clock()
        content = {**(report or {}), "holder": self._name}
        if lease.content:
            self._files.carry_out(lease.publish(now, content))
            return True
        # Several processes may find at the same moment that there is no leader. Only one of them can link the file.
        content = lease.next(content)
        if not self._files.answer(Link(lease.path, content, f"leader.{secrets.token_hex(8)}")):
            return False
        lease.renewed(now, content)
        return True

    def leave(self) -> None:
        """Resigns, so that another process can take over immediately. Does nothing if this process is not the
        leader."""
        if self.holder() == self._name:
            self._files.answer(Remove(self._lease.path))


FEW = 8
"""With at most this many pods, every pod scans the ledger itself and there is no coordinator."""


@dataclass(frozen=True)
class Survey:
    """State of the ledger, as surveyed by one pod for all pods."""

    open: int
    """Number of blocks that are not done."""
    claimable: int
    """Number of open blocks that are free or released, or whose holder is gone."""
    orphans: list[tuple[int, int, str]] = field(default_factory=list)
    """Blocks that can be taken over, because their holder is gone or has restarted, as (block, epoch, holder
    ``<pod>.<start>``). With this list, a pod can take over a block without reading all claims."""
    opened: bool = False
    """True if any consumer may add blocks."""
    awaited: bool = False
    """True if any consumer that may add blocks has an unexpired lease."""


class Report(msgspec.Struct, kw_only=True):
    """The coordinator's report, published in ``RUN/ledger/coordinator.json``."""

    pods: int = 0
    """Number of pods that are renewing their leases."""
    survey: Survey | None = None
    generation: str = ""
    """Digest of the published list of engines, which changes with it."""
    exceeded: str = ""
    """Description of the campaign limit that was exceeded. Empty if none was."""
    progress: dict[str, Progress] = msgspec.field(default_factory=dict)
    """Progress of every pod that has not ended, by ``<pod>.<start>``."""
    asked: Asked = Asked()
    """Rollouts that viewers have requested."""


def reported(leader: Leader) -> Report:
    """Returns the coordinator's report at the last poll. Returns an empty report if it is invalid or of another
    version."""
    try:
        return msgspec.convert(leader.report, Report)
    except ValueError:  # also raised for lone surrogates
        return Report()
