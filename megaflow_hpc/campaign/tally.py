"""What a run has used and what it has stored: by Slurm's accounting and by its trajectories, not by what pods said."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.monitor.training import TrainerJob
from megaflow_hpc.rundir.events import RolloutEvent, rounded, shown
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm.accounting import efficiencies
from megaflow_hpc.slurm.ids import array_of

if TYPE_CHECKING:
    from megaflow_hpc.monitor.usage import JobUse


def seen(monitor: Monitor, jobs: Jobs, trainers: Mapping[str, TrainerJob] | None, age_s: float) -> dict[str, Any]:
    """Returns what a run's files and Slurm tell of it.

    Args:
        age_s: how old Slurm's answer may be.
    """
    live = jobs.live(age_s)
    pending = [job for job, state in (live or {}).items() if state.state == "PENDING"]
    return monitor.status(live, pending, jobs.asked_at, trainers)


def usage(run: RunDir, uses: list[JobUse], monitor: Monitor) -> dict[str, float]:
    """Returns core-seconds and GPU-seconds that jobs held, and how many of them were idle."""
    from megaflow_hpc.monitor.usage import totals
    from megaflow_hpc.trajectories import open_trajectories

    now = time.time()
    with open_trajectories(run.path) as store:
        ran = [(a.job_id, (a.started_at, a.finished_at)) for t in store for a in t.attempts]
    monitor.refresh()
    ran += [(pod, (began_at, now)) for pod, began_at in monitor.at_work()]
    return totals(uses, ran)


def job_uses(role_of: Mapping[str, str], kept: Path) -> list[JobUse]:
    """Returns every start of every job: what it held, and what it used of that; none without jobs.

    Args:
        role_of: array → what it is of the run.
        kept: file in which what is final is kept.

    Raises:
        SiteError: the site keeps no accounting, or it does not answer.
    """
    from megaflow_hpc.monitor.usage import JobUse

    now = time.time()
    return [
        JobUse(
            (one.use.started_at, one.use.ended_at or now),
            one.use.cores,
            one.use.gpus,
            one.use.id,
            role_of.get(array_of(one.use.id), "pods"),
            one.state,
            one.cpu_s if one.use.ended_at and one.cpu_s else None,  # none at all: Slurm gathers nothing
            one.memory_asked_mb,
            one.memory_peak_mb,
        )
        for one in (efficiencies(role_of, kept) if role_of else ())
    ]


def recount(run: RunDir, monitor: Monitor) -> None:
    """Lets what is stored decide: the event files are flushed, not fsynced, and know nothing of seals."""
    from megaflow_hpc.trajectories import open_trajectories

    with open_trajectories(run.path) as store:
        monitor.settle(
            RolloutEvent(
                id=t.id,
                status=t.status,
                kind=t.error_kind,
                error=shown(t.error),
                reward=None if math.isnan(t.reward) else t.reward,
                seconds=round(t.finished_at - t.started_at, 2),
                turns=len(t.turns),
                cpu_s=rounded(t.cpu_s, 2),
                memory_peak_mb=rounded(t.memory_peak_mb, 1),
                disk_peak_mb=rounded(t.disk_peak_mb, 1),
            )
            for t in store
        )
