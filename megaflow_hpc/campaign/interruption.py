"""A run that is cancelled, and what it needs before it goes on.

That is other requests of Slurm, the blocks of pods that are gone, and failures once more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaflow_hpc.campaign import demand
from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.campaign.local import living_pods
from megaflow_hpc.campaign.planning.draft import wanted, whole_groups
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.ledger import Ledger, read_blocks, write_blocks
from megaflow_hpc.ledger.report import process_here
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import DRAIN, Marks
from megaflow_hpc.rundir.overrides import Changes, override
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.slurm import accounting, site
from megaflow_hpc.slurm.ids import array_of, scancel

LEAVE_S = 15.0
"""Seconds for pods to leave once the campaign is finished."""


@dataclass(frozen=True)
class Cancelled:
    """What there was to cancel."""

    before: str
    """State of the run until then."""
    jobs: list[str]
    """Jobs and arrays that waited or ran; every one that there ever was, where Slurm cannot tell."""
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


def ask_for(requests: Changes, launcher: str, run: RunDir, planned: RunRecord, jobs: Jobs) -> CampaignConfig:
    """Changes what new jobs ask for, and returns the campaign with that; those that only wait are cancelled.

    Raises:
        ConfigError: Slurm does not run this campaign, or some of its pods run.
        SiteError: Slurm does not say which pods there are.
    """
    if launcher != "slurm":
        raise ConfigError("--time, --mem and --partition are asked of Slurm, which does not run this campaign")
    pods, known = jobs.live_pods(0), jobs.ids()
    end = time.monotonic() + LEAVE_S
    while Marks(run).finished and pods and time.monotonic() < end:  # they are just leaving
        time.sleep(1.0)
        pods = jobs.live_pods(0)
    if pods is None and known:
        raise SiteError(f"{run}: Slurm does not say which pods there are; nothing was changed")
    if running := [pod.id for pod in pods or () if pod.state != "PENDING"]:
        raise ConfigError(
            f"{run}: {len(running)} pods run (among them {running[0]}) and keep what they have asked for; "
            f"stop them first (megaflow-hpc cancel {run}), nothing that is stored is lost"
        )

    def check(changed: CampaignConfig) -> None:
        site.check_site(changed, lambda key: f"{run}: {key}")
        demand.check_resources(changed, planned.server_groups, lambda key: f"{run}: {key}")

    config = override(run, planned.config, requests, check)
    if pods:
        scancel(known)
        jobs.until_gone()
    return config


def mark_gone(ledger: Ledger) -> None:
    """Frees the blocks of pods that are provably no more."""
    leases, gone = ledger.leases(), ledger.gone()
    jobs = sorted({array_of(lease["job_id"]) for lease in leases.values() if lease["job_id"]})
    live = {job.id for job in accounting.live_jobs(jobs).values() if job.live} if jobs else set()
    for name, lease in leases.items():
        if name in gone:
            continue
        process = process_here(lease)
        if lease["job_id"] not in live if lease["job_id"] else process is not None and not process.alive():
            ledger.mark_gone(name)


def repeat(run: RunDir, ledger: Ledger, config: CampaignConfig, only: Sequence[str]) -> None:
    """Appends blocks with the rollouts that failed (of those, the ones that ``only`` names)."""
    from megaflow_hpc.trajectories.journal.winners import index

    winners = index(run, ledger.seals()).winners
    again = {entry.id for entry in winners if entry.status in ("failed", "cancelled")}
    done = ledger.view().done
    blocks = read_blocks(run)
    # A block that is not done yet will run its failures again by itself.
    again -= {rollout.id for block in blocks if block.number not in done for rollout in block.rollouts}
    rollouts = {
        rollout.id: rollout
        for block in blocks
        for rollout in block.rollouts
        if rollout.id in again and wanted(rollout, only)
    }
    if rollouts:
        whole = whole_groups(config)
        write_blocks(run, list(rollouts.values()), config.slurm.pods.total, whole=whole)
