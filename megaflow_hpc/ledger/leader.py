"""Leadership: one process of a campaign does a job for all.

The leader holds the lease ``RUN/ledger/<role>.json``, whose file also carries what it reports. Another process takes
the lease once it has expired. If two processes take it at the same moment, the later writer keeps it, and the other
process notices that at its next look. So the job must bear being done twice.
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
"""Role: releases held elements of the engine array when there is work for them."""
COORDINATOR = "coordinator"
"""Role: the pod that surveys the ledger for all."""
RENEW_S = 30.0
STALE_S = 100.0


class Leader:
    """One role, as a candidate or an observer sees it.

    Args:
        role: names the file.
        name: name of the candidate, unique in the run. Empty for an observer.
        clock: seconds of a clock that never jumps.
    """

    def __init__(self, run: RunDir, role: str, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._name, self._clock = Files(run, clock), name, clock
        self._lease = Lease(f"ledger/{role}.json")

    @property
    def report(self) -> dict[str, Any]:
        """The leader's report at the last look."""
        return self._lease.content

    def holder(self) -> str:
        """Returns the leader's name, empty without a leader. A lease counts from the first look until it is stale."""
        try:
            unchanged_s = self._files.carry_out(self._lease.look())
        except OSError:
            return ""
        return str(self.report.get("holder", "")) if unchanged_s < STALE_S else ""

    def confirmed(self) -> bool:
        """Tells whether the lease was renewed since this object was made, and is not stale."""
        return bool(self.holder()) and self._lease.changed

    def hold(self, report: Mapping[str, Any] | None = None) -> bool:
        """Takes or renews the lease. Call it about every :data:`RENEW_S` seconds.

        Args:
            report: further content of the file for its readers.

        Returns:
            Whether this process leads.

        Raises:
            OSError: the file cannot be written.
        """
        if self.holder() not in ("", self._name):
            return False
        lease, now = self._lease, self._clock()
        content = {**(report or {}), "holder": self._name}
        if lease.content:
            self._files.carry_out(lease.publish(now, content))
            return True
        # Many processes may notice at the same moment that nobody leads. One of them gets the file's name.
        content = lease.next(content)
        if not self._files.answer(Link(lease.path, content, f"leader.{secrets.token_hex(8)}")):
            return False
        lease.renewed(now, content)
        return True

    def leave(self) -> None:
        """Lets another process lead at once. Does nothing if this process does not lead."""
        if self.holder() == self._name:
            self._files.answer(Remove(self._lease.path))
