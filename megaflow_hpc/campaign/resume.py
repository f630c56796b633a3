"""Prepares to resume a stopped run: changes job requests, frees the blocks of dead pods and repeats failed rollouts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megaflow_hpc.campaign import job_requests
from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.campaign.planning.draft import wanted, whole_groups
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.ledger import Ledger, read_blocks, write_blocks
from megaflow_hpc.ledger.lease import process_here
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.overrides import Changes, override
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.slurm import accounting
from megaflow_hpc.slurm.ids import array_of, scancel

LEAVE_S = 15.0
"""Seconds that pods get to exit after the campaign has finished."""


def ask_for(requests: Changes, launcher: str, run: RunDir, planned: RunRecord, jobs: Jobs) -> CampaignConfig:
    """Changes the Slurm requests of future jobs and cancels queued jobs. Returns the changed campaign.

    Raises:
        ConfigError: The campaign does not run on Slurm, or some of its pods are running.
        SiteError: Slurm does not report which pods exist.
    """
    if launcher != "slurm":
        raise ConfigError("--time, --mem and --partition are requests to Slurm, which does not run this campaign")
    pods, jobs_submitted = jobs.live_pods(0), jobs.ids()
    end = time.monotonic() + LEAVE_S
    while Marks(run).finished and pods and time.monotonic() < end:  # pods are leaving
        time.sleep(3.0)
        pods = jobs.live_pods(0)
    if pods is None and jobs_submitted:
        raise SiteError(f"{run}: Slurm does not report which pods exist; nothing was changed")
    if running := [pod.id for pod in pods or () if not pod.waits]:
        raise ConfigError(
            f"{run}: {len(running)} pods are running (among them {running[0]}) and keep their requests; "
            f"stop them first (megaflow-hpc cancel {run}; stored results are kept)"
        )

    def check(changed: CampaignConfig) -> None:
        job_requests.check(changed, planned.server_groups, lambda key: f"{run}: {key}")

    config = override(run, planned.config, requests, check)
    if pods:
        scancel(jobs_submitted)
        jobs.until_gone()
    return config


def mark_gone(ledger: Ledger) -> None:
    """Frees the blocks of pods that are known to have ended."""
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
    """Adds blocks that repeat the failed rollouts matching ``only``."""
    from megaflow_hpc.trajectories.journal.winners import index

    winners = index(run, ledger.seals()).winners
    again = {entry.id for entry in winners if entry.status in ("failed", "cancelled")}
    done = ledger.done()
    blocks = read_blocks(run)
    # A pod that takes over an unfinished block repeats the block's failures.
    again -= {rollout.id for block in blocks if block.number not in done for rollout in block.rollouts}
    rollouts = {
        rollout.id: rollout
        for block in blocks
        for rollout in block.rollouts
        if rollout.id in again and wanted(rollout, only)
    }
    if rollouts:
        in_whole_groups = whole_groups(config)
        write_blocks(run, list(rollouts.values()), config.slurm.pods.total, whole=in_whole_groups)
