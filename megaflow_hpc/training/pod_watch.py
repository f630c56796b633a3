"""Whether anybody is left who could sample what a trainer waits for.

A pod that lives renews its lease. Where none has done so for long, the site is asked whether pods run or are queued, by
the command that whoever started the trainer names: a trainer itself does not speak to Slurm. Where none is named, it
waits on.
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

LOOK_S = 30.0
"""Seconds between two looks at leases, and between two questions to the site."""
READS_PER_S = 10
"""Leases that are read in a second: those of many pods are looked at less often."""
GIVE_UP_S = 900.0
"""Seconds after which a trainer ends whose pods are gone: whoever watches the campaign may start some before."""
ASK = "MEGAFLOW_ASK_PODS"
"""Variable with the command that prints how many pods run or are queued, and fails where nobody can tell."""
QUEUED = "no pod is there yet; some are queued or starting"
ANSWER_S = 120.0
"""Timeout of that command in seconds."""


def ask_site() -> int | None:
    """Returns how many pods run or are queued; ``None`` where nobody can tell, as for a trainer started by hand."""
    if not (command := os.environ.get(ASK, "")):
        return None
    try:
        return int(subprocess.run(shlex.split(command), capture_output=True, timeout=ANSWER_S, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


class PodWatch:
    """Looks after the pods of one run for a trainer that waits.

    Args:
        ask: returns how many pods run or are queued; ``None`` where nobody can tell.
        clock: seconds.
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
        """Counter of each lease at the last look, by ``<pod>.<start>``."""
        self._next_at = self._alive_at = clock()
        """When to look again, and when a pod was last known to live."""
        self._gone_at: float | None = None
        """Since when none lives and none is queued."""
        self._said = ""

    def begin(self) -> None:
        """Begins to wait anew: a pod lived until now, as far as it matters."""
        self._next_at = self._alive_at = self._clock()
        self._gone_at, self._said = None, ""

    def look(self) -> str:
        """Returns what is to be said of pods that are gone; empty while one lives. Cheap to call often.

        Raises:
            StarvedError: for :data:`GIVE_UP_S` none has lived or been queued.
            OSError: the run directory does not answer.
        """
        now = self._clock()
        if now >= self._next_at:
            self._said = self._found(now)
            self._next_at = now + max(LOOK_S, len(self._seen) / READS_PER_S)
        return self._said

    def _found(self, now: float) -> str:
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
            return "no pod is there, and nobody can tell how many are queued" if coming is None else QUEUED
        self._gone_at = self._gone_at or now
        silent = now - self._gone_at
        remedy = f"start some with: megaflow-hpc resume {self._run}"
        if silent >= GIVE_UP_S:
            raise StarvedError(
                f"{self._run}: for {silent / 60:.0f} minutes no pod was there and none was queued, so no rollout can "
                f"come; {remedy}, and training goes on from its last checkpoint"
            )
        return f"no pod is there and none is queued; {remedy}; this trainer ends in {(GIVE_UP_S - silent) / 60:.0f} min"
