"""Names of jobs where a campaign has pods at several Slurm clusters.

Numbers are given out by each controller for itself, so ``123_4`` is an element at the cluster where the campaign was
submitted and ``123_4@name`` one at another: in records, leases, events and names of files. Slurm's commands take the
number and ``-M name``; one cluster's answer is never used for another's job, since both are kept by their whole names.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaflow_hpc.slurm import site


def named(job_id: str, cluster: str) -> str:
    """``123_4`` at a cluster; at our own, which has no name here, as it is."""
    return f"{job_id}@{cluster}" if cluster else job_id


def number(job_id: str) -> str:
    """``123_4`` of ``123_4@name``: what the cluster itself calls it."""
    return job_id.partition("@")[0]


def cluster_of(job_id: str) -> str:
    return job_id.partition("@")[2]


def array_of(job_id: str) -> str:
    """``123@name`` of ``123_4@name``."""
    return named(number(job_id).partition("_")[0], cluster_of(job_id))


def by_cluster(job_ids: Iterable[str]) -> dict[str, list[str]]:
    """Cluster → numbers of its jobs."""
    found: dict[str, list[str]] = {}
    for job_id in job_ids:
        found.setdefault(cluster_of(job_id), []).append(number(job_id))
    return found


def on(cluster: str) -> tuple[str, ...]:
    """What a Slurm command is told to ask that cluster."""
    return ("-M", cluster) if cluster else ()


def scancel(job_ids: Iterable[str], *options: str) -> None:
    """One ``scancel`` per cluster.

    Raises:
        SiteError: a cluster does not answer, or refuses; those named before it were asked.
    """
    for cluster, numbers in by_cluster(job_ids).items():
        site.ask("scancel", *on(cluster), "--quiet", *options, *numbers)
