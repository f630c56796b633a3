"""Job ids for campaigns whose pods run on several Slurm clusters.

Each Slurm controller assigns its own job numbers. ``123_4`` is an element on the cluster where the campaign was
submitted. ``123_4@name`` is an element on another cluster. Records, leases, events and file names contain these full
ids, which are unique across clusters. Slurm commands take the number and ``-M name``.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaflow_hpc.rundir.record import JOB_ID
from megaflow_hpc.slurm import site


def named(job_id: str, cluster: str) -> str:
    """Returns the full id: ``123_4@name`` on another cluster, or ``123_4`` if ``cluster`` is empty."""
    return f"{job_id}@{cluster}" if cluster else job_id


def number(job_id: str) -> str:
    """Strips the cluster name: ``123_4@name`` → ``123_4``, the id that the cluster itself uses."""
    return job_id.partition("@")[0]


def cluster_of(job_id: str) -> str:
    """Returns the cluster name: ``123_4@name`` → ``name``. Empty for the local cluster."""
    return job_id.partition("@")[2]


def array_of(job_id: str) -> str:
    """Returns the array id: ``123_4@name`` → ``123@name``."""
    return named(number(job_id).partition("_")[0], cluster_of(job_id))


def by_cluster(job_ids: Iterable[str]) -> dict[str, list[str]]:
    """Groups job ids by cluster and strips the cluster names. Drops invalid ids, because Slurm commands could mistake
    them for options."""
    ids: dict[str, list[str]] = {}
    for job_id in filter(JOB_ID.fullmatch, job_ids):
        ids.setdefault(cluster_of(job_id), []).append(number(job_id))
    return ids


def compressed(numbers: Iterable[str]) -> list[str]:
    """Joins elements of the same array: ``7_1 7_2 7_3 9`` → ``7_[1-3] 9``. Slurm handles each result in a single
    request."""
    wanted = list(dict.fromkeys(numbers))
    elements: dict[str, set[int]] = {}
    for job_id in wanted:
        array, _, index = job_id.partition("_")
        if array not in wanted and index.isdecimal():
            elements.setdefault(array, set()).add(int(index))
    joined = [job_id for job_id in wanted if job_id.partition("_")[0] not in elements]
    for array, indices in elements.items():
        ranges: list[tuple[int, int]] = []
        for n in sorted(indices):
            if ranges and ranges[-1][1] == n - 1:
                ranges[-1] = (ranges[-1][0], n)
            else:
                ranges.append((n, n))
        text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
        joined.append(f"{array}_{text}" if len(indices) == 1 else f"{array}_[{text}]")
    return joined


def scancel(job_ids: Iterable[str], *options: str) -> None:
    """Cancels or signals jobs with one ``scancel`` per cluster, which sends one request per array.

    With options that filter jobs or name a signal, scancel fetches the whole job table instead.

    Raises:
        SiteError: A cluster does not respond or refuses. The clusters before it have already been processed.
    """
    for cluster, numbers in by_cluster(job_ids).items():
        site.ask("scancel", *site.on(cluster), "--quiet", *options, *compressed(numbers))
