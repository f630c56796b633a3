"""Whether a partition can ever run a job: the walltime it allows, its number of nodes, and what one node has; and the
walltime of jobs for which nobody names one.

Slurm takes such a job and lets it wait for ever (PartitionTimeLimit, PartitionConfig), or refuses it without saying
which key of the campaign file it means; here the key and the limit are named.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm import limits, resources, site
from megaflow_hpc.slurm.script import Job, option_name
from megaflow_hpc.slurm.site import Partition


def seconds(time: str | int | None) -> float | None:
    """Returns the seconds of a walltime in any of Slurm's forms; infinity for one without end, ``None`` for no time.

    ``30`` and ``30:00`` are minutes, ``1:30:00`` and ``2-0`` hours and days (sbatch ``--time``).
    """
    text = str(time if time is not None else "").strip()
    if text.lower() in ("infinite", "unlimited"):
        return math.inf
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, secs = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:  # minutes[:seconds]
        hours, (minutes, secs) = 0, (*numbers, 0)[:2]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs)


def partitions_of(options: Mapping[str, Any]) -> list[Partition]:
    """Returns the partitions among which Slurm chooses for a job with these sbatch options.

    Raises:
        SiteError: The controller does not answer.
    """
    known = site.partitions()
    names = str(options.get("partition") or "").split(",")
    return [known[name] for name in names if name in known] if names != [""] else _default(known)


def _default(known: Mapping[str, Partition]) -> list[Partition]:
    return [partition for partition in known.values() if partition.default]


def timed(job: Job, unasked_s: float | None = None) -> Job:
    """Returns a job with the walltime that it asks for (:func:`asked_time`); engines beside a pod have the pod's.

    A job at another cluster, whose limits are not known here, stays as it is.
    """
    options = {option_name(name): value for name, value in job.options.items() if value is not None}
    if job.cluster or not {"time", "t"}.isdisjoint(options):
        return job
    parts = [options, *(options | {option_name(n): v for n, v in engine.items()} for engine in job.engines)]
    times = [time for part in parts if (time := asked_time(part, unasked_s)) is not None]
    if not times:
        return job
    return replace(job, options={**job.options, "time": min(times, key=lambda time: seconds(time) or math.inf)})


def asked_time(options: Mapping[str, Any], unasked_s: float | None = None) -> str | None:
    """Returns the walltime that a job with these options asks for, in Slurm's form; ``None``: for none at all.

    What the options name; else nothing where the partition's default fits, and the longest that partition, account and
    QOS allow where it does not: Slurm refuses such a job (DenyOnLimit), or holds it for ever.

    Args:
        unasked_s: Seconds to ask for in place of the partition's default.
    """
    if said := [str(options[name]) for name in ("time", "t") if options.get(name) is not None]:
        return said[0]
    wanted_s, longest = unasked_s, math.inf
    if site.has_slurm():
        with contextlib.suppress(SiteError):  # nobody to ask; sbatch will say
            longest = longest_s(options)
            wanted_s = max(_defaults_s(options), default=None) if unasked_s is None else unasked_s
    if wanted_s is None or (unasked_s is None and wanted_s <= longest):
        return None
    return str(max(1, int(min(wanted_s, longest) // 60)))


def walltime_s(options: Mapping[str, Any]) -> float | None:
    """Returns the seconds that a job with these options gets: what it asks for, else the partition's default.

    ``None`` where nobody knows; infinity where there is no limit.
    """
    asked = asked_time(options)
    return min(_defaults_s(options), default=None) if asked is None else seconds(asked)


def _defaults_s(options: Mapping[str, Any]) -> list[float]:
    """What a job gets unasked in each of the partitions that it names, where that is known."""
    defaults = site.default_times()
    found = [seconds(defaults.get(partition.name)) or seconds(partition.time) for partition in partitions_of(options)]
    return [time for time in found if time is not None]


def longest_s(options: Mapping[str, Any]) -> float:
    """Returns the most seconds that partition, account and QOS give a job with these options; infinity: no limit.

    Raises:
        SiteError: The controller does not answer.
    """
    found = [_limit_s(partition.time) for partition in partitions_of(options)]
    longest = [] if not found or _may_exceed(options) else [max(found)]
    if most := limits.longest_walltime(options):
        longest.append(_limit_s(most[0]))
    return min(longest, default=math.inf)


def refusals(key: str, options: Mapping[str, Any]) -> list[str]:
    """Returns why no partition that a job names can ever run it, one line for each key; empty where one can.

    Args:
        key: the job's section in the campaign file, as ``slurm.pods``.
        options: the job's sbatch options, by sbatch's own names.
    """
    partitions = partitions_of(options)
    if not partitions:
        return []
    job, found = resources.asked(options), []
    names = " or ".join(partition.name for partition in partitions)
    wanted, limit = seconds(options.get("time")), max((p.time for p in partitions), key=_limit_s)
    if wanted is not None and wanted > _limit_s(limit) and not _may_exceed(options):
        found.append(f"{key}.time: {options['time']} is longer than partition {names} allows ({limit}); ask for less")
    if wanted is not None and (most_time := limits.longest_walltime(options)) is not None:
        text, of = most_time
        if wanted > _limit_s(text):
            found.append(f"{key}.time: {options['time']} is longer than {of} allows (MaxWall {text}); ask for less")
    nodes, memory = job["node"], job.get("mem", 0) // max(1, job["node"])
    cpus = -(-job["cpu"] // max(1, nodes))
    if nodes > (most := max(p.nodes for p in partitions)):
        found.append(f"{key}.nodes: {nodes} nodes, and partition {names} has {most}; ask for fewer")
    if memory > (most := max(p.memory_mb for p in partitions)):
        asked = f"{memory / 1000:g} GB on each node"
        found.append(f"{key}.mem_gb: {asked}, and a node of partition {names} has {most / 1000:g}; ask for less")
    if cpus > (most := max(p.cpus for p in partitions)):
        what = "ranks_per_node and cpus_per_rank" if key.startswith("slurm.pods") else "cpus_per_gpu"
        what = "cpus" if key == "slurm.gather" else what
        found.append(f"{key}.{what}: {cpus} CPUs on each node, and one of partition {names} has {most}; ask for fewer")
    if job.get("gres/gpu") and not any(p.gpus for p in partitions):
        having = sorted(p.name for p in site.partitions().values() if p.gpus)
        there = f"those with GPUs are {', '.join(having)}" if having else "no partition here has any"
        found.append(f"{key}.partition: asks for GPUs, and partition {names} has none; {there}")
    return found


def _limit_s(text: str) -> float:
    """Seconds of a limit; infinity where none is known."""
    return seconds(text) or math.inf


def _may_exceed(options: Mapping[str, Any]) -> bool:
    """Whether a QOS that is asked for lifts the partition's limit (its flag PartitionTimeLimit)."""
    if not options.get("qos"):
        return False
    try:
        return "PartitionTimeLimit" in limits.qos(str(options["qos"])).get("flags", "")
    except SiteError:
        return True  # nobody can tell; Slurm will say
