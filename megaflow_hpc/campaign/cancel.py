"""Cancels a run: its jobs, and its pods on this host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.campaign.local import living_pods
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import DRAIN, Marks
from megaflow_hpc.slurm import site
from megaflow_hpc.slurm.ids import array_of


@dataclass(frozen=True)
class Cancelled:
    """The jobs and pods that were cancelled."""

    before: str
    """State of the run until then."""
    jobs: list[str]
    """Jobs and arrays that waited or ran; all of the run's if Slurm cannot tell."""
    pods: list[str]
    """Pods on this host, outside of Slurm."""


def cancel(
    run: RunDir,
    ledger: Ledger,
    jobs: Jobs,
    is_pool: bool,
    before: str,
    live: set[str] | None,
    stop: Callable[[], None] | None,
) -> Cancelled:
    """Cancels every job of a run, and drains its pods on this host.

    Args:
        before: state of the run until now.
        live: elements that Slurm still has; ``None`` if it cannot tell.
        stop: ends the pod of this process, if it has one.

    Raises:
        SiteError: Slurm has its jobs, and is not here or does not answer.
    """
    known, leases = set(jobs.ids()), ledger.leases().values()
    pods, local = living_pods(leases), bool(leases) and not known
    if before != "finished":
        Marks(run).cancel()
        if is_pool:
            EnginePool(run.path).close()
    if stop is not None:
        stop()
    for directory in pods.values():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            write_atomic(directory / DRAIN, "stopped")
    ids = jobs.cancel() if known or not (local or before == "finished") else []
    if ids and not site.has_slurm():
        raise SiteError(f"jobs {' '.join(ids)}: are Slurm's, which is not here; cancel them where sbatch is")
    had = set(ids) if live is None else {array_of(element) for element in live} | (set(ids) - known)
    return Cancelled(before, sorted(had), sorted(pods))
