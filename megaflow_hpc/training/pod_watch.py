"""Detects whether any pod is left to produce the rollouts that a trainer waits for.

A live pod renews its lease. If no lease has been renewed for a while, the trainer asks the site whether pods are
running or queued. It runs a command from its environment, because a trainer does not talk to Slurm itself. Without a
command, the trainer keeps waiting.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable

from megaflow_hpc.errors import StarvedError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.rundir.layout import RunDir

POLL_INTERVAL_S = 30.0
"""Seconds between polls of the leases, and between queries to the site."""
MAX_READS_PER_S = 10
"""Maximum number of leases to read per second. A run with many pods is polled less often."""
GIVE_UP_S = 900.0
"""Seconds without pods after which a trainer gives up. Until then, the user or ``watch`` may start new pods."""
ASK_VARIABLE = "MEGAFLOW_ASK_PODS"
"""Environment variable naming a command that prints the number of running and queued pods, or fails if that is
unknown."""
QUEUED = "no pod runs yet; some are queued or starting"
ASK_TIMEOUT_S = 120.0
"""Timeout of the command in seconds."""


def ask_site() -> int | None:
    """Returns the number of running and queued pods, or ``None`` if unknown, as for a manually started trainer."""
    command = os.environ.get(ASK_VARIABLE, "")
    if not command:
        return None
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, timeout=ASK_TIMEOUT_S, check=True)
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


class PodWatch:
    """Watches the pods of a run on behalf of a waiting trainer.

    Args:
        run: the run directory.
        ask: returns the number of running and queued pods, or ``None`` if unknown.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        run: RunDir,
        ask: Callable[[], int | None] = ask_site,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._ask, self._clock = run, ask, clock
        self._ledger = Ledger(run)
        self._seen: dict[str, object] = {}
        """``<pod>.<start>`` → lease counter at the last poll."""
        self._next_at = self._alive_at = clock()
        """When to poll next, and when a pod was last known to be alive."""
        self._gone_at: float | None = None
        """When pods were first found to be missing; ``None`` if they are not."""
        self._said = ""

    def begin(self) -> None:
        """Starts a new wait. Assumes that a pod is alive now."""
        self._next_at = self._alive_at = self._clock()
        self._gone_at, self._said = None, ""

    def look(self) -> str:
        """Returns a message if pods are missing, or an empty string if any is alive. Cheap enough to call often.

        Raises:
            StarvedError: no pod has been running or queued for :data:`GIVE_UP_S`.
            OSError: the run directory is unavailable.
        """
        now = self._clock()
        if now >= self._next_at:
            self._said = self._describe_absence(now)
            self._next_at = now + max(POLL_INTERVAL_S, len(self._seen) / MAX_READS_PER_S)
        return self._said

    def _describe_absence(self, now: float) -> str:
        leases = {name: lease.get("counter") for name, lease in self._ledger.leases().items() if not lease.get("ended")}
        if any(self._seen.get(name) != counter for name, counter in leases.items()):
            self._alive_at = now
        self._seen = dict(leases)
        if now - self._alive_at <= TIMES.lease_s:
            self._gone_at = None
            return ""
        coming = self._ask()
        if coming != 0:
            self._gone_at = None
            return "no pod runs, and the number of queued pods is unknown" if coming is None else QUEUED
        self._gone_at = self._gone_at or now
        silent = now - self._gone_at
        remedy = f"start some with: megaflow-hpc resume {self._run}"
        if silent >= GIVE_UP_S:
            raise StarvedError(
                f"{self._run}: for {silent / 60:.0f} minutes no pod ran and none was queued, so no rollout can "
                f"arrive; {remedy}, and training continues from its last checkpoint"
            )
        return f"no pod runs and none is queued; {remedy}; this trainer ends in {(GIVE_UP_S - silent) / 60:.0f} min"
