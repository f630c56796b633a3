"""Summarises many runs, from a few small files of each and one Slurm query per owner.

Reads only the head of run.json, the flags and the leases of each run. Leases contain the number of stored rollouts, so
listing a thousand runs takes seconds. Measuring sizes requires walking the directories. A limit on visited entries
applies to all runs together.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.accounts import progress_of, stored_by
from megaflow_hpc.ledger.lease import process_here
from megaflow_hpc.monitor.state import lives, run_state
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import read_head
from megaflow_hpc.slurm import accounting, site
from megaflow_hpc.slurm.accounting import JobState
from megaflow_hpc.slurm.ids import array_of

SIZED_ENTRIES = 20_000
"""Default number of files and directories to visit in order to measure all runs of a list."""


@dataclass
class Glance:
    """Summary of a run for a list of runs."""

    path: Path
    name: str
    """The campaign's name."""
    state: str
    """State as returned by :func:`~megaflow_hpc.monitor.state.run_state`, or ``broken`` if files are damaged."""
    done: int | None
    """Number of stored rollouts, as reported by the pods. ``None`` if unknown."""
    total: int | None
    planned_at: float
    """Time of planning, in Unix seconds."""
    bytes: int | None = None
    """Size of the run directory in bytes. ``None`` if not measured."""
    cause: str = ""
    """Reason for the state ``broken`` or ``unknown``."""


def glances(paths: Iterable[Path]) -> list[Glance]:
    """Reads run directories in the given order. Accepts directories that are damaged, incomplete or concurrently
    deleted."""
    looks = [_Look(path) for path in paths]
    open_ = [look for look in looks if not look.settled]
    by_owner: dict[int, list[_Look]] = {}
    for look in open_:
        by_owner.setdefault(look.owner, []).append(look)
    for owner, of_owner in by_owner.items():  # squeue is queried for the jobs of one user
        live, cause = _live(sorted({job for look in of_owner for job in look.jobs}), owner)
        for look in of_owner:
            states = None
            if live is not None:
                states = [state for job in look.jobs for state in live.get(job, ())]
            look.decide(states, cause)
    return [look.glance for look in looks]


def measure(glances: Sequence[Glance], most: int | None = SIZED_ENTRIES) -> None:
    """Sets :attr:`Glance.bytes` of runs, in order. Stops after visiting ``most`` files and directories."""
    looked = 0
    for glance in glances:
        size, waiting = 0, [str(glance.path)]
        while waiting and (most is None or looked <= most):
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        looked += 1
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        else:
                            size += entry.stat(follow_symlinks=False).st_size
            except OSError:  # deleted in the meantime, or unreadable
                continue
        if waiting:
            return
        glance.bytes = size


class _Look:
    """Reads a run's files and determines its state."""

    def __init__(self, path: Path) -> None:
        run, marks = RunDir(path), Marks(RunDir(path))
        self.glance = Glance(path, "", "broken", None, None, _time_of(run))
        self.settled = True
        self.owner = os.getuid()
        self.jobs: list[str] = []
        self._pods: list[dict[str, Any]] = []
        """Leases of pods for which the ledger has no ``gone`` record."""
        self._started = self._serves = self._waits = False
        try:
            self.owner = path.stat().st_uid
            head = read_head(run)
            self._serves = head.campaign.pool is not None and not head.total and bool(EndpointFiles(run).serving())
            self.glance.name, self.glance.total = head.campaign.name, head.total
            ledger = Ledger(run)
            self.glance.total += sum(ledger.rollouts_added(added) for added in ledger.added())
            if marks.finished:
                self.glance.state, self.glance.done = "finished", self.glance.total
                return
            leases, gone = ledger.leases(), ledger.gone()
            accounts = ledger.accounts(leases)
            past = sum(facts["stored"] for name, facts in accounts.items() if name not in leases)
            done = sum(stored_by(run, name, lease) for name, lease in leases.items() if name in accounts)
            self.glance.done = min(past + done, self.glance.total)
            if marks.cancelled:
                self.glance.state = "cancelled"
                return
            self._pods = [lease for name, lease in leases.items() if name not in gone]
            recorded = {path.stem for path in run.jobs.glob("[0-9]*.json")}
            self.jobs = sorted(recorded | {array_of(str(pod["job_id"])) for pod in self._pods if pod.get("job_id")})
            self._started, self.settled = bool(accounts or marks.unstarted()), False
            self._waits = bool(marks.open) and self.glance.done >= self.glance.total
        except (ConfigError, OSError, ValueError, TypeError, LookupError) as error:
            self.glance.state, self.glance.cause = "broken", str(error)

    def decide(self, live: Sequence[JobState] | None, cause: str) -> None:
        """Sets the state from the jobs that Slurm still has.

        Args:
            live: Live jobs of the run. ``None`` if unknown.
            cause: Reason why they are unknown.
        """
        jobs = None if live is None else {state.id for state in live if not state.waits}
        self.glance.state = run_state(
            serves=self._serves,
            alive=any(_lives(pod, jobs) for pod in self._pods),
            waits=self._waits,
            submitted=bool(self.jobs),
            queued=None if live is None or not self.jobs else bool(live),
            started=self._started,
        )
        self.glance.cause = cause if self.glance.state == "unknown" else ""


def _lives(lease: dict[str, Any], jobs: set[str] | None) -> bool:
    progress, process = progress_of(lease), process_here(lease)
    return lives(
        ended=bool(lease.get("ended")),
        runs=lease["job_id"] in jobs if jobs is not None and lease.get("job_id") else None,
        process=process.alive() if process else None,
        silent_s=time.time() - progress.t if progress else math.inf,
    )


def _live(jobs: Sequence[str], owner: int) -> tuple[dict[str, list[JobState]] | None, str]:
    """Returns the elements that Slurm still has, by job or array. If this is unknown, returns ``None`` and the
    reason."""
    if not jobs:
        return {}, ""
    if not site.has_slurm():
        return None, "its jobs run on Slurm, which is not available here"
    try:
        answer = accounting.live_jobs(jobs, owner)
    except SiteError as error:
        return None, str(error)
    states: dict[str, list[JobState]] = {}
    for state in answer.values():
        if state.live:
            states.setdefault(array_of(state.id), []).append(state)
    return states, ""


def _time_of(run: RunDir) -> float:
    for path in (run.run_json, run.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
