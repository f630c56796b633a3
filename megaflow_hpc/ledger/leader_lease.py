"""One process of a campaign does a job for all: who leads, and whether anybody does.

``RUN/ledger/<role>.json`` holds a name and a counter, which the leader renews, and whatever it reports. Anybody else
takes the lease over once the counter, opened afresh, has not changed for :data:`STALE_S` of the observer's own clock.
Of two who take it at the same moment the later writer keeps it, and the other sees that at its next look: the job must
bear being done twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.layout import RunDir

SCALER = "scaler"
"""Role: releases held elements of the engine array when there is work for them."""
COORDINATOR = "coordinator"
"""Role: the pod that surveys the ledger for all."""
RENEW_S = 30.0
STALE_S = 100.0


class LeaderLease:
    """The lease of one role, as one who may lead sees it, or an observer.

    Args:
        role: names the file.
        name: who we are, unique in the run; empty for an observer.
        clock: seconds of a clock that never jumps.
    """

    def __init__(self, run: RunDir, role: str, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._name, self._clock = run.ledger / f"{role}.json", name, clock
        self._count = 0
        self._seen = ("", 0)
        self._since = clock()
        self._changes = -1
        self.report: dict[str, Any] = {}
        """What the leader reported, at the last look."""

    def holder(self) -> str:
        """Returns the leader's name, empty where nobody leads. One found at the first look counts until it is stale."""
        try:
            self.report = json.loads(read_regular(self._file))
            seen = (str(self.report["holder"]), int(self.report["count"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self.report, seen = {}, ("", 0)
        if seen != self._seen or self._changes < 0:
            self._seen, self._since = seen, self._clock()
            self._changes += 1
        return seen[0] if self._clock() - self._since < STALE_S else ""

    def confirmed(self) -> bool:
        """Tells whether somebody renewed the lease since this object was made, and not long ago."""
        return bool(self.holder()) and self._changes > 0

    def hold(self, report: Mapping[str, Any] | None = None) -> bool:
        """Takes or renews the lease; call it every :data:`RENEW_S` seconds or so.

        Args:
            report: further content of the file, for those who read it.

        Returns:
            Whether we lead.

        Raises:
            OSError: the file cannot be written.
        """
        if self.holder() not in ("", self._name):
            return False
        self._count = max(self._count, self._seen[1]) + 1
        self.report = {**(report or {}), "holder": self._name, "count": self._count}
        try:
            write_json(self._file, self.report, exclusive=not self._seen[0])
        except FileExistsError:  # many may find at the same moment that nobody leads
            return False
        self._seen, self._since = (self._name, self._count), self._clock()
        return True

    def leave(self) -> None:
        """Lets somebody else take the lease at once; does nothing where it is not ours."""
        if self.holder() == self._name:
            self._file.unlink(missing_ok=True)
