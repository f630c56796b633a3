"""Reads how many jobs Slurm lets this user queue and run at once: array size, association and QOS limits.

Associations and QOS take one ``sacctmgr`` query each. Only the array size is known if a site has no accounting, does
not enforce limits, or its slurmdbd is down. Slurm enforces all limits itself. Checking them in advance keeps a campaign
from being rejected half-way or pending forever.
"""

from __future__ import annotations

import getpass
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm import resources, site
from megaflow_hpc.slurm.resources import Cap


@dataclass(frozen=True)
class Allowance:
    """How many more jobs this user may queue and run. ``None`` means no limit."""

    array_size: int = 1001
    """Maximum number of elements in one array (MaxArraySize)."""
    submit: int | None = None
    """Maximum number of pending and running jobs under the tightest limit. Each array element counts as one job."""
    queued: int = 0
    """Number of jobs that currently count towards ``submit``."""
    running: int | None = None
    """Maximum number of running jobs."""
    why: str = ""
    """The limit behind ``submit``, used in messages."""
    caps: tuple[Cap, ...] = ()
    """Resource limits."""

    @property
    def room(self) -> int | None:
        """Number of jobs that can still be queued. ``None`` means no limit."""
        return None if self.submit is None else max(0, self.submit - self.queued)


REQUESTS_OF_A_REQUEUE = 3
"""Requests that a pod sends to slurmctld between two starts: the requeue, a query of its restart count, and the job
step."""
BUCKET, REFILL_PER_S = 100.0, 20.0
"""Assumed requests of a user that a site accepts in a burst, and then per second, if it sets no limit
(``rl_enable``)."""
LARGEST_PART = 10
"""The walltime divided by this is the most that a pod gives up so that pods drain one after another."""


def request_rate() -> tuple[float, float]:
    """Returns how many requests this user may send in a burst, and then per second.

    slurmctld has a token bucket for each user if ``SlurmctldParameters`` includes ``rl_enable`` (Slurm 23.02 and
    later).

    Raises:
        SiteError: The controller does not respond.
    """
    words = site.configuration().get("SlurmctldParameters", "").lower().split(",")
    if "rl_enable" not in words:
        return BUCKET, REFILL_PER_S
    values = dict(word.partition("=")[::2] for word in words)

    def value(name: str, default: int) -> int:
        text = values.get(f"rl_{name}", "")
        return int(text) if text.isdecimal() and int(text) else default

    return value("bucket_size", 30), value("refill_rate", 2) / value("refill_period", 1)


def requeue_window_s(pods: int, walltime_s: float | None) -> int:
    """Returns the period, in seconds, over which pods spread their drains, each at its own second.

    Pods that drained together would exceed a user's request rate. At two requests a second, a thousand pods need 25
    minutes. 0 if the site can handle all of them at once, or if the walltime is unknown or unlimited.

    Raises:
        SiteError: The controller does not respond.
    """
    if walltime_s is None or math.isinf(walltime_s):
        return 0
    burst, per_s = request_rate()
    beyond = max(0.0, REQUESTS_OF_A_REQUEUE * pods - burst)
    return int(min(math.ceil(beyond / per_s), walltime_s / LARGEST_PART))


def chunks(count: int, size: int) -> list[int]:
    """Splits ``count`` elements into roughly equal arrays of at most ``size`` elements."""
    arrays = -(-count // max(1, size))
    return [count * (n + 1) // arrays - count * n // arrays for n in range(arrays)]


def allowance(options: Mapping[str, Any]) -> Allowance:
    """Returns the limits for jobs with these sbatch options (only ``account``, ``qos`` and ``partition`` matter).

    Raises:
        SiteError: The controller does not respond.
    """
    array_size = site.max_array_size()
    user = getpass.getuser()
    try:
        rows = _rows(user, options)
    except SiteError:  # no accounting, or slurmdbd is down: sbatch will report what Slurm rejects
        return Allowance(array_size)
    caps = _caps(rows, options)
    limits = [limit for of, row in rows for limit in _job_limits(row, of)]
    submits = [limit for limit in limits if limit.kind == "submit"]
    running = min((limit.value for limit in limits if limit.kind == "jobs"), default=None)
    if not submits:
        return Allowance(array_size, running=running, caps=caps)
    jobs = Counter[str]()
    for line in site.ask("squeue", "--local", "-h", "-r", "-u", user, "-o", "QOS %q|account %a").splitlines():
        jobs.update(line.split("|"))
    narrow = min(submits, key=lambda limit: limit.value - jobs[limit.of])
    return Allowance(array_size, narrow.value, jobs[narrow.of], running, f"{narrow.of} allows {narrow.value}", caps)


def resource_caps(options: Mapping[str, Any]) -> tuple[Cap, ...]:
    """Returns the resource limits for jobs with these sbatch options. Empty if accounting is not available."""
    try:
        return _caps(_rows(getpass.getuser(), options), options)
    except SiteError:
        return ()


def longest_walltime(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the longest allowed walltime in Slurm's format, and the owner of the limit. ``None`` if no limit is
    known."""
    try:
        rows = _rows(getpass.getuser(), options)
    except SiteError:
        return None
    for of, row in rows:
        if row.get("maxwall"):
            return row["maxwall"], of
    return None


def _caps(rows: Sequence[tuple[str, Mapping[str, str]]], options: Mapping[str, Any]) -> tuple[Cap, ...]:
    if "," in str(options.get("partition") or ""):  # a limit of one partition may not apply to another
        rows = rows[-2:]
    return tuple(resources.caps(rows))


class Limit(NamedTuple):
    """A limit on the number of jobs."""

    kind: str
    """``submit`` or ``jobs``."""
    value: int
    of: str
    """Owner of the limit, ``QOS …`` or ``account …``, whose jobs are counted."""


def _rows(user: str, options: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Returns the limit owners with their sacctmgr fields, in order of precedence.

    Raises:
        SiteError: The site has no accounting, or it does not respond.
    """
    if not site.enforces_limits():
        return []
    account = _association(user, options)
    own = str(options.get("qos") or account["qos"])
    names = [*sorted(site.partition_qos(str(options.get("partition") or "")) - {own}), own]
    return [*((f"QOS {name}", qos(name)) for name in names if name), (f"account {account['account']}", account)]


def _association(user: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the user's association: its default QOS, and its limits under sacctmgr's names."""
    fields = ("cluster", "account", "user", "partition", *_JOBS, "maxtres", "grptres", "maxwall")
    output = site.sacctmgr("assoc", f"user={user}", f"format={','.join(fields)},defaultqos")
    cluster = site.cluster_name()
    rows = [dict(zip((*fields, "qos"), line.split("|"), strict=True)) for line in output.splitlines()]
    rows = [row for row in rows if row["cluster"] == cluster]
    if not rows:
        return {"qos": "normal", "account": ""}
    wanted = str(options.get("account") or os.environ.get("SBATCH_ACCOUNT") or "")
    ours = [row for row in rows if row["account"] == wanted] or rows
    partitions = str(options.get("partition") or "").split(",")
    ours = [row for row in ours if row["partition"] in ("", *partitions)] or ours
    return ours[0]


_QOS_JOBS = ("maxjobspu", "maxsubmitpu", "maxjobspa", "maxsubmitpa", "grpjobs", "grpsubmit")
_JOBS = ("maxjobs", "maxsubmitjobs", "grpjobs", "grpsubmitjobs")


def qos(name: str) -> dict[str, str]:
    """Returns the limits and flags of a QOS under sacctmgr's names. Empty if the QOS does not exist.

    Raises:
        SiteError: The site has no accounting, or it does not respond.
    """
    fields = ("name", "flags", *_QOS_JOBS, *resources.LIMITS, "maxwall")
    for line in site.sacctmgr("qos", f"format={','.join(fields)}").splitlines():  # one cached query for all QOS
        row = line.split("|")
        if row[0] == name:
            return dict(zip(fields, row, strict=True))
    return {}


def _job_limits(row: Mapping[str, str], name: str) -> list[Limit]:
    return [
        Limit("submit" if "submit" in field else "jobs", int(row[field]), name)
        for field in (*_QOS_JOBS, *_JOBS)
        if row.get(field, "").isdigit()
    ]
