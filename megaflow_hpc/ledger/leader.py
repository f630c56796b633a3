"""Leader election: one process of a campaign does a job on behalf of all.

The leader holds the lease ``RUN/ledger/<role>.json``, which also contains the leader's report. Another process may take
the lease once it has expired. If two processes take it at the same moment, the later write wins, and the loser notices
at its next poll. The job must therefore tolerate being done twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from megaflow_hpc.ledger.calls import Link, Remove
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.ledger.lease import Lease
from megaflow_hpc.rundir.layout import RunDir

SCALER = "scaler"
"""Role that releases held elements of the engine array when there is work for them."""
COORDINATOR = "coordinator"
"""Role of the pod that surveys the ledger for all pods."""
RENEW_S = 30.0
STALE_S = 100.0


class Leader:
    """Leader election for one role, used by candidates and observers.

    Args:
        role: Names the lease file.
        name: Name of the candidate, unique in the run. Empty for an observer.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, run: RunDir, role: str, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._name, self._clock = Files(run, clock), name, clock
        self._lease = Lease(f"ledger/{role}.json")

    @property
    def report(self) -> dict[str, Any]:
        """The leader's report as of the last poll."""
        return self._lease.content

    def holder(self) -> str:
        """Returns the leader's name, or an empty string. A lease seen for the first time counts as fresh."""
        try:
            unchanged_s = self._files.carry_out(self._lease.look())
        except OSError:
            return ""
        return str(self.report.get("holder", "")) if unchanged_s < STALE_S else ""

    def confirmed(self) -> bool:
        """Returns whether the lease is fresh and was seen to be renewed by this object."""
        return bool(self.holder()) and self._lease.changed

    def hold(self, report: Mapping[str, Any] | None = None) -> bool:
        """Takes or renews the lease. Call it about every :data:`RENEW_S` seconds.

        Args:
            report: Additional content of the lease file, for its readers.

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
        # Several processes may notice the missing leader at the same moment. Only one of them can link the file.
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
