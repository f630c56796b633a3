"""A chore that one process of a campaign does for all: who does it, and whether anybody does.

``RUN/ledger/<chore>.json`` holds a name and a counter. The holder renews it; anybody else takes it over once the
counter, opened afresh, has not changed for :data:`STALE_S` of the looker's own clock. Of two who take it at the same
moment the later writer keeps it, and the other sees that at its next look: the chore must bear being done twice.
"""

from __future__ import annotations

import json
import time

from megaflow_hpc.rundir.layout import RunDir, write_json

SCALER = "scaler"
"""Lets engine servers go that are held, when there is work for them."""
RENEW_S = 30.0
STALE_S = 100.0


class Duty:
    """
    Args:
        holder: Who we are; empty for somebody who only looks.
    """

    def __init__(self, run: RunDir, chore: str, holder: str = "") -> None:
        self._file, self._me = run.ledger / f"{chore}.json", holder
        self._count = 0
        self._seen = ("", 0)
        self._since = time.monotonic()
        self._changes = -1

    def holder(self) -> str:
        """Who does it; empty where nobody does. A name that is there at the first look counts until it is stale."""
        try:
            found = json.loads(self._file.read_text())
            seen = (str(found["holder"]), int(found["count"]))
        except (OSError, ValueError, KeyError, TypeError):
            seen = ("", 0)
        if seen != self._seen or self._changes < 0:
            self._seen, self._since = seen, time.monotonic()
            self._changes += 1
        return seen[0] if time.monotonic() - self._since < STALE_S else ""

    def proved(self) -> bool:
        """Whether somebody has renewed it before our eyes, and not long ago."""
        return bool(self.holder()) and self._changes > 0

    def hold(self) -> bool:
        """Takes or renews the chore; whether it is ours. To be called every :data:`RENEW_S` seconds or so."""
        if self.holder() not in ("", self._me):
            return False
        self._count = max(self._count, self._seen[1]) + 1
        write_json(self._file, {"holder": self._me, "count": self._count})
        self._seen, self._since = (self._me, self._count), time.monotonic()
        return True

    def leave(self) -> None:
        """Lets somebody else take it at once."""
        if self.holder() == self._me:
            self._file.unlink(missing_ok=True)
