"""Reads the limits on this user's jobs: array size, association and QOS limits, and trackable resources (TRES).

Resources have Slurm's names: ``cpu``, ``node``, ``mem`` (in MB), ``gres/gpu``, ``gres/gpu:a100``. A limit applies to
one job, or to all running jobs of a user, an account, an association or a QOS. If the same limit is set in several
places, Slurm applies the first in this order: the partition's QOS, the job's QOS, the association
(https://slurm.schedmd.com/resource_limits.html).

Associations and QOS take one ``sacctmgr`` query each. Only the array size is known if the site has no accounting or
does not enforce limits, or if slurmdbd is down. Slurm enforces all limits itself. Checking them in advance prevents
campaigns that Slurm would reject half-way or keep pending forever.
"""

from __future__ import annotations

import contextlib
import getpass
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megaflow_hpc.config.slurm import megabytes
from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm import site

Amounts = dict[str, int]
"""Maps each resource to its amount. Memory is in MB."""

PER_JOB = "MaxTRESPerJob"
LIMITS = {"maxtres": PER_JOB, "maxtrespu": "MaxTRESPerUser", "maxtrespa": "MaxTRESPerAccount", "grptres": "GrpTRES"}
"""Maps the name of each limit in sacctmgr's ``format`` option to its name in Slurm's documentation."""


class Cap(NamedTuple):
    """A limit on one resource."""

    limit: str
    """Name of the limit, one of the values of :data:`LIMITS`."""
    resource: str
    value: int
    of: str
    """Owner of the limit: ``QOS NAME`` or ``account NAME``."""

    def __str__(self) -> str:
        return f"{self.of} allows {self.resource}={self.value} ({self.limit})"


def amounts(text: str) -> Amounts:
    """Parses resources such as ``cpu=64,gres/gpu=4,mem=100G`` from sacctmgr's output. Skips values that are not
    numbers, because they mean unlimited."""
    parsed: Amounts = {}
    for resource, _, value in (part.partition("=") for part in text.split(",")):
        with contextlib.suppress(ValueError):
            parsed[resource] = megabytes(value) if resource == "mem" else int(value)
    return parsed


def caps(rows: Iterable[tuple[str, Mapping[str, str]]]) -> list[Cap]:
    """Returns the limits in effect, at most one for each resource and kind of limit.

    Args:
        rows: Owners of limits with their sacctmgr fields, in order of precedence.
    """
    by_scope: dict[tuple[str, str], Cap] = {}
    for of, row in rows:
        for field, limit in LIMITS.items():
            for resource, value in amounts(row.get(field, "")).items():
                by_scope.setdefault((limit, resource), Cap(limit, resource, value, of))
    return list(by_scope.values())


def asked(options: Mapping[str, Any]) -> Amounts:
    """Returns the minimum resources that a job with these sbatch options requests."""
    options_given = _given(options)
    nodes = _number(options_given, "nodes", 1)
    tasks = _number(options_given, "ntasks", nodes * _number(options_given, "ntasks-per-node", 1))
    request = {"node": nodes, "cpu": tasks * _number(options_given, "cpus-per-task", 1)}
    with contextlib.suppress(ValueError):
        if "mem" in options_given:
            request["mem"] = megabytes(options_given["mem"]) * nodes
        elif "mem-per-cpu" in options_given:
            request["mem"] = megabytes(options_given["mem-per-cpu"]) * request["cpu"]
    per_node = options_given.get("gres", "").split(",")
    if "gpus-per-node" in options_given:
        per_node.append(f"gpu:{options_given['gpus-per-node']}")
    for text in per_node:
        for resource, count in _gres(text).items():
            request[resource] = request.get(resource, 0) + count * nodes
    for name, times in (("gpus", 1), ("gpus-per-task", tasks)):
        text = f"gpu:{options_given[name]}" if name in options_given else ""
        for resource, count in _gres(text).items():
            request[resource] = max(request.get(resource, 0), count * times)
    return request


def gpu_requests(options: Mapping[str, Any]) -> dict[str, float]:
    """Returns the number of GPUs per node that each GPU option requests, by option name. If the values differ, the
    options contradict each other."""
    given = _given(options)
    nodes = _number(given, "nodes", 1)
    tasks = _number(given, "ntasks-per-node", 0) or _number(given, "ntasks", nodes) / nodes
    factors = {"gpus-per-node": 1.0, "gpus-per-task": tasks, "gpus": 1 / nodes}
    requests = {name: _gpus(f"gpu:{given[name]}") * times for name, times in factors.items() if name in given}
    if any(part.strip().removeprefix("gres/").startswith("gpu") for part in given.get("gres", "").split(",")):
        requests["gres"] = float(_gpus(given["gres"]))
    return requests


def _gpus(text: str) -> int:
    """Returns the total number of GPUs of all types in a list such as ``gpu:a100:2,gpu:h100:1,license:3``."""
    return sum(_gres(part).get("gres/gpu", 0) for part in text.split(","))


def shared(amounts: Amounts, limits: Iterable[Cap]) -> Amounts:
    """Returns the resources of a job that count towards limits shared by several jobs."""
    counted = {cap.resource for cap in limits if cap.limit != PER_JOB}
    return {resource: count for resource, count in amounts.items() if resource in counted}


def _given(options: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items() if value not in (None, False)}


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    """Returns the first number in the option's value, such as 2 for ``2-4`` nodes, or ``default`` if there is none."""
    match = re.match(r"\d+", options.get(name, ""))
    return int(match[0]) if match else default


def _gres(text: str) -> Amounts:
    """Parses ``gpu:4`` or ``gpu:a100:4``. The latter counts towards both ``gres/gpu`` and ``gres/gpu:a100``. ``gpu``
    alone counts as 1."""
    name, _, rest = text.strip().removeprefix("gres/").removeprefix("gres:").partition(":")
    kind, _, count = rest.rpartition(":")
    if rest and not count.isdigit():
        kind, count = count, "1"
    if not name:
        return {}
    number = int(count or 1)
    amounts = {f"gres/{name}": number}
    if kind:
        amounts[f"gres/{name}:{kind}"] = number
    return amounts


def impossible(limits: Iterable[Cap], job: Amounts) -> Cap | None:
    """Returns the limit that prevents even a single job with these resources from running. ``None`` if there is no such
    limit."""
    over = [cap for cap in limits if job.get(cap.resource, 0) > cap.value]
    return max(over, key=lambda cap: job[cap.resource] / max(1, cap.value), default=None)


def at_once(limits: Iterable[Cap], job: Amounts, others: Iterable[Amounts] = ()) -> tuple[int, Cap] | None:
    """Returns how many jobs with these resources can run at the same time as ``others``, and the limit that decides.
    ``None`` if there is no limit."""
    others = list(others)
    counts = []
    for cap in limits:
        each = job.get(cap.resource, 0)
        if cap.limit != PER_JOB and each:
            left = cap.value - sum(other.get(cap.resource, 0) for other in others)
            counts.append((max(0, left) // each, cap))
    return min(counts, key=lambda each: each[0], default=None)


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
    """Description of the limit behind ``submit``, for messages."""
    caps: tuple[Cap, ...] = ()
    """Limits on resources."""

    @property
    def room(self) -> int | None:
        """Number of jobs that can still be queued. ``None`` means no limit."""
        return None if self.submit is None else max(0, self.submit - self.queued)


REQUESTS_OF_A_REQUEUE = 3
"""Number of requests that a pod sends to slurmctld between two starts: the requeue, a query of its restart count, and
the job step."""
BUCKET, REFILL_PER_S = 100.0, 20.0
"""Request budget for a site without rate limits (``rl_enable``): number of requests in one burst, and requests per
second thereafter."""
MAX_WINDOW_SHARE = 0.1
"""Maximum share of the walltime over which pods spread their drains. A pod gives up at most this part of its
walltime."""


def request_rate() -> tuple[float, float]:
    """Returns the size of a burst of requests that this user may send to slurmctld, and the requests per second
    thereafter.

    slurmctld limits each user with a token bucket if ``SlurmctldParameters`` includes ``rl_enable`` (Slurm 23.02 and
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
    """Returns the period in seconds over which pods spread their drains. Each pod drains in a different second.

    Pods that drain at the same time would exceed the user's request rate. At two requests per second, a thousand pods
    need 25 minutes. Returns 0 if the site can handle all requests at once, or if the walltime is unknown or unlimited.

    Args:
        pods: Number of pods.
        walltime_s: Walltime of a pod in seconds. ``None`` if unknown.

    Raises:
        SiteError: The controller does not respond.
    """
    if walltime_s is None or math.isinf(walltime_s):
        return 0
    burst, per_s = request_rate()
    beyond = max(0.0, REQUESTS_OF_A_REQUEUE * pods - burst)
    return int(min(math.ceil(beyond / per_s), walltime_s * MAX_WINDOW_SHARE))


def chunks(count: int, size: int) -> list[int]:
    """Splits ``count`` elements into roughly equal arrays of at most ``size`` elements."""
    arrays = -(-count // max(1, size))
    return [count * (n + 1) // arrays - count * n // arrays for n in range(arrays)]


def allowance(options: Mapping[str, Any]) -> Allowance:
    """Returns the limits for jobs with these sbatch options. Considers only ``account``, ``qos`` and ``partition``.

    Raises:
        SiteError: The controller does not respond.
    """
    array_size = site.max_array_size()
    try:
        rows = _rows(options)
    except SiteError:  # no accounting, or slurmdbd is down: sbatch will report what Slurm rejects
        return Allowance(array_size)
    resource_limits = tuple(caps(rows))
    submits, jobs_running = _job_limits(rows, "submit"), _job_limits(rows, "jobs")
    running = min((value for value, _ in jobs_running), default=None)
    if not submits:
        return Allowance(array_size, running=running, caps=resource_limits)
    jobs = Counter[str]()
    output = site.ask("squeue", "--local", "-h", "-r", "-u", getpass.getuser(), "-o", "QOS %q|account %a")
    for line in output.splitlines():
        jobs.update(line.split("|"))
    value, of = min(submits, key=lambda limit: limit[0] - jobs[limit[1]])
    return Allowance(array_size, value, jobs[of], running, f"{of} allows {value}", resource_limits)


def resource_caps(options: Mapping[str, Any]) -> tuple[Cap, ...]:
    """Returns the resource limits for jobs with these sbatch options. Empty if accounting is unavailable."""
    try:
        return tuple(caps(_rows(options)))
    except SiteError:
        return ()


def longest_walltime(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the longest allowed walltime in Slurm's format, and the owner of that limit. ``None`` if no limit is
    known."""
    try:
        rows = _rows(options)
    except SiteError:
        return None
    for of, row in rows:
        if row.get("maxwall"):
            return row["maxwall"], of
    return None


def _rows(options: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Returns the limit owners with their sacctmgr fields, in order of precedence.

    Raises:
        SiteError: The site has no accounting, or it does not respond.
    """
    if not site.enforces_limits():
        return []
    account = _association(options)
    own = job_qos(options)
    named = str(options.get("partition") or "")
    # A limit of one partition may not apply to another.
    of_partition = [] if "," in named else sorted(site.partition_qos(named) - {own})
    first_own = "OverPartQOS" in qos(own).get("flags", "").split(",")
    names = [own, *of_partition] if first_own else [*of_partition, own]
    return [*((f"QOS {name}", qos(name)) for name in names if name), (f"account {account['account']}", account)]


def job_qos(options: Mapping[str, Any]) -> str:
    """Returns the QOS of a job with these sbatch options: the requested one, or the default of the user's association.

    Raises:
        SiteError: The site has no accounting, or it does not respond.
    """
    return str(options.get("qos") or _association(options)["qos"])


def _association(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the association that Slurm uses for a job: its default QOS and its limits, under sacctmgr's field
    names."""
    fields = ("cluster", "account", "user", "partition", *_JOBS, "maxtres", "grptres", "maxwall")
    output = site.sacctmgr("assoc", f"user={getpass.getuser()}", f"format={','.join(fields)},defaultqos")
    cluster = site.cluster_name()
    rows = [dict(zip((*fields, "qos"), line.split("|"), strict=True)) for line in output.splitlines()]
    rows = [row for row in rows if row["cluster"] == cluster]
    if not rows:
        return {"qos": "normal", "account": ""}
    wanted = str(options.get("account") or "")
    if not wanted and len({row["account"] for row in rows}) > 1:
        wanted = next(iter(site.accounts()), "")  # the default account
    ours = [row for row in rows if row["account"] == wanted] or rows
    named = str(options.get("partition") or "")
    for partitions in ([named], [""], named.split(",")):  # Slurm prefers an association with the job's partition
        if found := [row for row in ours if row["partition"] in partitions]:
            return found[0]
    return ours[0]


_QOS_JOBS = ("maxjobspu", "maxsubmitpu", "maxjobspa", "maxsubmitpa", "grpjobs", "grpsubmit")
_JOBS = ("maxjobs", "maxsubmitjobs", "grpjobs", "grpsubmitjobs")


def qos(name: str) -> dict[str, str]:
    """Returns the limits and flags of a QOS, under sacctmgr's field names. Empty if the QOS does not exist.

    Raises:
        SiteError: The site has no accounting, or it does not respond.
    """
    fields = ("name", "flags", *_QOS_JOBS, *LIMITS, "maxwall")
    for line in site.sacctmgr("qos", f"format={','.join(fields)}").splitlines():  # one cached query for all QOS
        row = line.split("|")
        if row[0] == name:
            return dict(zip(fields, row, strict=True))
    return {}


def _job_limits(rows: Iterable[tuple[str, Mapping[str, str]]], kind: str) -> list[tuple[int, str]]:
    """Returns the limits on the number of jobs, each with its owner, ``QOS …`` or ``account …``.

    Args:
        kind: ``submit`` for limits on pending and running jobs, ``jobs`` for limits on running jobs.
    """
    fields = [field for field in (*_QOS_JOBS, *_JOBS) if ("submit" in field) == (kind == "submit")]
    return [(int(row[field]), of) for of, row in rows for field in fields if row.get(field, "").isdigit()]
