"""Name jobs of campaigns whose pods run on several Slurm clusters.

Each controller numbers its own jobs. ``123_4`` is an element on the cluster where the campaign was submitted;
``123_4@name`` is an element on another cluster. Records, leases, events and file names use these full names. Slurm
commands take the number and ``-M name``. Full names keep the answers of different clusters apart.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaflow_hpc.rundir.record import JOB_ID
from megaflow_hpc.slurm import site


def named(job_id: str, cluster: str) -> str:
    """Returns ``123_4@name`` for ``123_4`` on another cluster, and ``123_4`` for our own cluster, whose name is
    empty."""
    return f"{job_id}@{cluster}" if cluster else job_id


def number(job_id: str) -> str:
    """Returns ``123_4`` of ``123_4@name``, the id that the cluster itself uses."""
    return job_id.partition("@")[0]


def cluster_of(job_id: str) -> str:
    """Returns ``name`` of ``123_4@name``. Empty for our own cluster."""
    return job_id.partition("@")[2]


def array_of(job_id: str) -> str:
    """Returns ``123@name`` of ``123_4@name``."""
    return named(number(job_id).partition("_")[0], cluster_of(job_id))


def by_cluster(job_ids: Iterable[str]) -> dict[str, list[str]]:
    """Groups job ids by cluster, without the cluster's name. Invalid ids are dropped, since a command could take them
    as options."""
    ids: dict[str, list[str]] = {}
    for job_id in filter(JOB_ID.fullmatch, job_ids):
        ids.setdefault(cluster_of(job_id), []).append(number(job_id))
    return ids


def scancel(job_ids: Iterable[str], *options: str) -> None:
    """Cancels jobs with one ``scancel`` per cluster.

    Raises:
        SiteError: A cluster does not answer or refuses. Clusters before it have already been asked.
    """
    for cluster, numbers in by_cluster(job_ids).items():
        site.ask("scancel", *site.on(cluster), "--quiet", *options, *numbers)
