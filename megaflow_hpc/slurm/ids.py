"""Names of jobs where a campaign has pods at several Slurm clusters.

Numbers are given out by each controller for itself, so ``123_4`` is an element at the cluster where the campaign was
submitted and ``123_4@name`` one at another: in records, leases, events and names of files. Slurm's commands take the
number and ``-M name``; one cluster's answer is never used for another's job, since both are kept by their whole names.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaflow_hpc.rundir.record import JOB_ID
from megaflow_hpc.slurm import site


def named(job_id: str, cluster: str) -> str:
    """Returns ``123_4@name`` for ``123_4`` at another cluster; ``123_4`` at our own, whose name is empty."""
    return f"{job_id}@{cluster}" if cluster else job_id


def number(job_id: str) -> str:
    """Returns ``123_4`` of ``123_4@name``: the cluster's own id."""
    return job_id.partition("@")[0]


def cluster_of(job_id: str) -> str:
    """Returns ``name`` of ``123_4@name``; empty for our own cluster."""
    return job_id.partition("@")[2]


def array_of(job_id: str) -> str:
    """Returns ``123@name`` of ``123_4@name``."""
    return named(number(job_id).partition("_")[0], cluster_of(job_id))


def by_cluster(job_ids: Iterable[str]) -> dict[str, list[str]]:
    """Returns the own ids of each cluster's jobs; what is no id, and would be an option to a command, is left out."""
    found: dict[str, list[str]] = {}
    for job_id in filter(JOB_ID.fullmatch, job_ids):
        found.setdefault(cluster_of(job_id), []).append(number(job_id))
    return found


def on(cluster: str) -> tuple[str, ...]:
    """Returns the options by which a Slurm command asks a cluster."""
    return ("-M", cluster) if cluster else ()


def scancel(job_ids: Iterable[str], *options: str) -> None:
    """Cancels jobs, by one ``scancel`` per cluster.

    Raises:
        SiteError: A cluster does not answer, or refuses; those before it were asked.
    """
    for cluster, numbers in by_cluster(job_ids).items():
        site.ask("scancel", *on(cluster), "--quiet", *options, *numbers)
