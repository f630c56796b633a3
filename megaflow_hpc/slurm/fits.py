"""Checks whether a partition can ever run a job, and chooses a walltime if the campaign sets none.

The checks cover the walltime, the number of nodes and the resources of a single node. Without them, Slurm would keep an
impossible job pending forever (PartitionTimeLimit, PartitionConfig), or reject it without naming the campaign key. The
checks name the key and the limit.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.slurm import limits, site
from megaflow_hpc.slurm.script import Job
from megaflow_hpc.slurm.site import Partition


def seconds(time: str | int | None) -> float | None:
    """Converts a walltime in any Slurm format to seconds. Returns infinity if unlimited, ``None`` if missing or
    invalid.

    In sbatch's ``--time`` format, ``30`` and ``30:00`` mean 30 minutes, ``1:30:00`` means 90 minutes, and ``2-0`` means
    two days.
    """
    text = str(time if time is not None else "").strip()
    if text.lower() in ("infinite", "unlimited"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:  # minutes[:seconds]
        numbers.insert(0, 0)
    hours, minutes, secs = (*numbers, 0, 0)[:3]  # [days-]hours[:minutes[:seconds]]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs)


def partitions_of(options: Mapping[str, Any], cluster: str = "") -> list[Partition]:
    """Returns the partitions that Slurm may choose for a job with these sbatch options.

    Args:
        cluster: Name of the cluster. Empty for this cluster.

    Raises:
        SiteError: The controller does not respond.
    """
    partitions = site.partitions(cluster) if cluster else site.partitions()  # "" would be cached separately
    names = str(options.get("partition") or "")
    if not names:
        return [partition for partition in partitions.values() if partition.default]
    return [partitions[name] for name in names.split(",") if name in partitions]


def timed(job: Job, unasked_s: float | None = None) -> Job:
    """Returns the job with its walltime filled in (:func:`asked_time`).

    The pod and the engines of a heterogeneous job share the shortest of their walltimes. A job for another cluster is
    returned unchanged, because that cluster's limits are unknown.

    Args:
        unasked_s: Seconds to request instead of the partition's default.
    """
    options = {name: value for name, value in job.options.items() if value is not None}
    if job.cluster or "time" in options:
        return job
    parts = [options, *({**options, **engine} for engine in job.engines)]
    asked = [asked_time(part, unasked_s) for part in parts]
    times = [time for time in asked if time is not None]
    if not times:
        return job
    return replace(job, options={**job.options, "time": min(times, key=_limit_s)})


def asked_time(options: Mapping[str, Any], unasked_s: float | None = None) -> str | None:
    """Returns the walltime to request for a job with these options, in Slurm's format, or ``None`` to request none.

    A walltime in the options is returned unchanged. Otherwise the partition's default applies, if it is within the
    limits. If it is not, the longest walltime that partition, account and QOS allow is requested. Without that, Slurm
    would reject the job (DenyOnLimit) or keep it pending forever.

    Args:
        unasked_s: Seconds to request instead of the partition's default.
    """
    if options.get("time") is not None:
        return str(options["time"])
    wanted_s, longest = unasked_s, math.inf
    if site.has_slurm():
        with contextlib.suppress(SiteError):  # Slurm does not respond; sbatch will report it
            longest = longest_s(options)
            wanted_s = max(_defaults_s(options), default=None) if unasked_s is None else unasked_s
    if wanted_s is None or (unasked_s is None and wanted_s <= longest):
        return None
    return str(max(1, int(min(wanted_s, longest) // 60)))


def walltime_s(options: Mapping[str, Any]) -> float | None:
    """Returns the walltime in seconds of a job with these options: the requested one, or else the partition's default.

    ``None`` if unknown, infinity if unlimited.
    """
    requested = asked_time(options)
    return min(_defaults_s(options), default=None) if requested is None else seconds(requested)


def not_requeued(options: Mapping[str, Any]) -> str:
    """Explains why Slurm would not requeue a job with these options. Empty if it would.

    Raises:
        SiteError: The controller does not respond.
    """
    if options.get("no-requeue") not in (None, False):
        return "no-requeue is among its options"
    if options.get("requeue") in (None, False) and site.configuration().get("JobRequeue") == "0":
        return "the site requeues only jobs that request it (JobRequeue=0), and its options do not"
    return ""


def _defaults_s(options: Mapping[str, Any]) -> list[float]:
    """Returns the known default walltimes of the job's partitions, in seconds."""
    defaults = site.default_times()
    times = [seconds(defaults.get(partition.name)) or seconds(partition.time) for partition in partitions_of(options)]
    return [time for time in times if time is not None]


def longest_s(options: Mapping[str, Any]) -> float:
    """Returns the longest walltime in seconds that the partition, the account and the QOS allow. Returns infinity if
    there is no limit.

    Raises:
        SiteError: The controller does not respond.
    """
    limits_s = [_limit_s(partition.time) for partition in partitions_of(options)]
    longest = [] if not limits_s or _may_exceed(options) else [max(limits_s)]
    if most := limits.longest_walltime(options):
        longest.append(_limit_s(most[0]))
    return min(longest, default=math.inf)


def refusals(key: str, options: Mapping[str, Any]) -> list[str]:
    """Explains why a job can never run, one line per problem. Empty if it can run.

    Partitions are checked only if the job names them. Otherwise the site may choose a partition by QOS, constraint or
    submit plug-in (see :func:`doubts`).

    Args:
        key: The job's section in the campaign file, such as ``slurm.pods``.
        options: The job's sbatch options, under sbatch's own names.
    """
    reasons = _partition_refusals(key, options) if options.get("partition") else []
    wanted = seconds(options.get("time"))
    most_time = None if wanted is None else limits.longest_walltime(options)
    if wanted is not None and most_time is not None:
        text, of = most_time
        if wanted > _limit_s(text):
            reasons.append(f"{key}.time: {options['time']} is longer than {of} allows (MaxWall {text}); ask for less")
    return reasons


def doubts(key: str, options: Mapping[str, Any]) -> list[str]:
    """Explains why the default partition cannot run a job that names no partition, one line per problem.

    These are only warnings, because the site may choose another partition. Takes the same arguments as
    :func:`refusals`.
    """
    if options.get("partition"):
        return []
    unnamed = "no partition is named, and the site may choose one other than its default"
    return [f"{line} ({unnamed})" for line in _partition_refusals(key, options)]


def _partition_refusals(key: str, options: Mapping[str, Any]) -> list[str]:
    """Explains why none of a job's partitions can run it. Empty if at least one can."""
    partitions = partitions_of(options)
    if not partitions:
        return []
    job = limits.asked(options)
    reasons = []
    names = " or ".join(partition.name for partition in partitions)
    wanted = seconds(options.get("time"))
    limit = max((partition.time for partition in partitions), key=_limit_s)
    if wanted is not None and wanted > _limit_s(limit) and not _may_exceed(options):
        reasons.append(f"{key}.time: {options['time']} is longer than partition {names} allows ({limit}); ask for less")
    nodes = job["node"]
    memory = job.get("mem", 0) // max(1, nodes)
    cpus = math.ceil(job["cpu"] / max(1, nodes))
    if nodes > (most := max(p.nodes for p in partitions)):
        reasons.append(f"{key}.nodes: {nodes} nodes, but partition {names} has {most}; ask for fewer")
    if memory > (most := max(p.memory_mb for p in partitions)):
        request = f"{memory / 1024:.4g}G on each node"
        reasons.append(f"{key}.mem: {request}, but a node of partition {names} has {most / 1024:.4g}G; ask for less")
    gpu_refusals = _gpu_refusals(key, options, job, partitions)
    # By default, each GPU brings its share of the node's CPUs: then too many GPUs are the only mistake.
    if cpus > (most := max(p.cpus for p in partitions)) and not gpu_refusals:
        keys = "ranks_per_node and cpus_per_rank" if key.startswith("slurm.pods") else "cpus-per-gpu"
        keys = "cpus" if key == "slurm.gather" else keys
        reasons.append(
            f"{key}.{keys}: {cpus} CPUs on each node, and one of partition {names} has {most}; ask for fewer"
        )
    return [*reasons, *gpu_refusals]


def _gpu_refusals(key: str, options: Mapping[str, Any], job: limits.Amounts, partitions: list[Partition]) -> list[str]:
    """Explains why no node of the partitions has the requested GPUs. Empty if at least one node has them."""
    if not job.get("gres/gpu"):
        return []
    names = " or ".join(partition.name for partition in partitions)
    most = max(partition.gpus for partition in partitions)
    if not most:
        having = sorted(p.name for p in site.partitions().values() if p.gpus)
        there = f"those with GPUs are {', '.join(having)}" if having else "no partition here has any"
        return [f"{key}.partition: requests GPUs, but partition {names} has none; {there}"]
    each = job["gres/gpu"] // job["node"]
    if each > most and not {"gpus", "gpus-per-task"} & options.keys():  # these options do not state a number per node
        return [f"{key}.partition: {each} GPUs per node, but a node of partition {names} has {most}; request fewer"]
    for resource, count in job.items():
        kind = resource.removeprefix("gres/gpu:")
        if kind == resource:
            continue
        types = {kind for partition in partitions for kind in partition.gpu_types}
        of_type = max(partition.gpu_types.get(kind, 0) for partition in partitions)
        if not of_type:
            there = f"types {', '.join(sorted(types))}" if types else "no types"
            return [
                f"{key}.partition: requests GPUs of type {kind!r}, but partition {names} has {there}; change gpu_type"
            ]
        if count // job["node"] > of_type:
            each = count // job["node"]
            return [f"{key}.partition: {each} {kind} GPUs per node, but a node of partition {names} has {of_type}"]
    return []


SHARED_WITH_OWN_JOBS = ("user", "mcs", "topo", "no", "0", "false")
"""Values of ``--exclusive`` that do not give a job whole nodes."""


def takes_whole_nodes(options: Mapping[str, Any]) -> bool:
    """Returns True if Slurm allocates whole nodes to the job, because of ``--exclusive`` or the partition's settings.

    Raises:
        SiteError: The controller does not respond.
    """
    exclusive = options.get("exclusive")
    if exclusive not in (None, False) and str(exclusive).lower() not in SHARED_WITH_OWN_JOBS:
        return True
    return any(partition.name in site.whole_nodes() for partition in partitions_of(options))


def charged(options: Mapping[str, Any]) -> limits.Amounts:
    """Returns the resources that accounting charges for a job.

    A job that takes whole nodes is charged for all their CPUs and GPUs, but only for the memory that it requests
    (sbatch --exclusive).
    """
    amounts = limits.asked(options)
    with contextlib.suppress(SiteError):  # unknown; the request is the minimum
        if site.has_slurm() and takes_whole_nodes(options):
            partitions = partitions_of(options)
            cpus = max((partition.cpus for partition in partitions), default=0)
            gpus = max((partition.gpus for partition in partitions), default=0)
            amounts["cpu"] = max(amounts["cpu"], cpus * amounts["node"])
            if gpus:
                amounts["gres/gpu"] = max(amounts.get("gres/gpu", 0), gpus * amounts["node"])
    return amounts


def ranks_that_fill(jobs: Iterable[Job], cpus_per_rank: int) -> int:
    """Returns how many ranks fill the CPUs of the smallest node on which any of these pods may run.

    Raises:
        ConfigError: The node size is unknown. The message names the remedy.
        SiteError: The controller does not respond.
    """
    sizes = []
    for job in jobs:
        partitions = partitions_of(job.options, job.cluster)
        limits_of = {} if job.cluster else site.cpu_limits()
        if not partitions:
            raise ConfigError("ranks_per_node: fill: the size of a node is unknown; name the partition, or the ranks")
        sizes += [min(part.least_cpus, limits_of.get(part.name, part.least_cpus)) for part in partitions]
    return max(1, min(sizes) // cpus_per_rank)


def _limit_s(text: str) -> float:
    """Converts a time limit to seconds. Returns infinity if the limit is unknown."""
    return seconds(text) or math.inf


def _may_exceed(options: Mapping[str, Any]) -> bool:
    """Returns True if the job's QOS overrides the partition's time limit (QOS flag PartitionTimeLimit)."""
    try:
        if not options.get("qos") and not site.enforces_limits():
            return False  # perhaps without accounting
        return "PartitionTimeLimit" in limits.qos(limits.job_qos(options)).get("flags", "")
    except SiteError:
        return bool(options.get("qos"))  # unknown; Slurm will report it
