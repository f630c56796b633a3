"""Slurm's trackable resources (TRES): what a job requests, and what associations and QOS allow.

Resources have Slurm's names: ``cpu``, ``node``, ``mem`` (in MB), ``gres/gpu``, ``gres/gpu:a100``. A limit applies to
one job, or to all running jobs of a user, an account, an association or a QOS. If the same limit is set in several
places, the first of these applies: the partition's QOS, the job's QOS, the association
(https://slurm.schedmd.com/resource_limits.html).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megaflow_hpc.slurm.script import option_name

Amounts = dict[str, int]
"""Resource → amount. Memory is in MB."""

PER_JOB = "MaxTRESPerJob"
LIMITS = {"maxtres": PER_JOB, "maxtrespu": "MaxTRESPerUser", "maxtrespa": "MaxTRESPerAccount", "grptres": "GrpTRES"}
"""Name of a limit in sacctmgr's format option → its name in the manual."""
_MB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


class Cap(NamedTuple):
    """A limit on one resource."""

    limit: str
    """A value of :data:`LIMITS`."""
    resource: str
    value: int
    of: str
    """Owner of the limit: ``QOS …`` or ``account …``."""

    def __str__(self) -> str:
        return f"{self.of} allows {self.resource}={self.value} ({self.limit})"


def amounts(text: str) -> Amounts:
    """Parses ``cpu=64,gres/gpu=4,mem=100G`` as printed by sacctmgr. Skips values that are not numbers: they mean no
    limit."""
    parsed: Amounts = {}
    for resource, _, value in (part.partition("=") for part in text.split(",")):
        with contextlib.suppress(ValueError):
            parsed[resource] = megabytes(value) if resource == "mem" else int(value)
    return parsed


def megabytes(text: str) -> int:
    """Converts ``100G`` or ``2000`` (MB) to MB.

    Raises:
        ValueError: The text has neither format.
    """
    match = re.fullmatch(r"([\d.]+)([KMGT]?)B?", text.strip().upper())
    if not match:
        raise ValueError(f"{text!r}: expected a number of MB, or one with K, M, G or T")
    return round(float(match[1]) * _MB[match[2]])


def caps(rows: Iterable[tuple[str, Mapping[str, str]]]) -> list[Cap]:
    """Returns the limits in effect.

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
    """Returns the minimum resources requested by a job with these sbatch options."""
    options_given = {
        option_name(str(name)): str(value) for name, value in options.items() if value not in (None, False)
    }
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
    """Returns option → GPUs per node that it requests. The options contradict each other unless all values are
    equal."""
    given = {option_name(str(name)): str(value) for name, value in options.items() if value not in (None, False)}
    nodes = _number(given, "nodes", 1)
    tasks = _number(given, "ntasks-per-node", 0) or _number(given, "ntasks", nodes) / nodes
    factors = {"gpus-per-node": 1.0, "gpus-per-task": tasks, "gpus": 1 / nodes, "G": 1 / nodes}
    found = {name: _gpus(f"gpu:{given[name]}") * times for name, times in factors.items() if name in given}
    if any(part.strip().removeprefix("gres/").startswith("gpu") for part in given.get("gres", "").split(",")):
        found["gres"] = float(_gpus(given["gres"]))
    return found


def _gpus(text: str) -> int:
    """Returns the number of GPUs of all types in ``gpu:a100:2,gpu:h100:1,license:3``."""
    return sum(_gres(part).get("gres/gpu", 0) for part in text.split(","))


def shared(amounts: Amounts, limits: Iterable[Cap]) -> Amounts:
    """Returns the part of a job's resources that counts towards limits shared by several jobs."""
    counted = {cap.resource for cap in limits if cap.limit != PER_JOB}
    return {resource: count for resource, count in amounts.items() if resource in counted}


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    """Returns the first number in an option's value, such as 2 for ``2-4`` nodes."""
    match = re.match(r"\d+", options.get(name, ""))
    return int(match[0]) if match else default


def _gres(text: str) -> Amounts:
    """Parses ``gpu:4`` or ``gpu:a100:4``. The latter counts for both resources. ``gpu`` alone counts as 1."""
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
    """Returns the limit that prevents even a single such job from running, or ``None``."""
    over = [cap for cap in limits if job.get(cap.resource, 0) > cap.value]
    return max(over, key=lambda cap: job[cap.resource] / max(1, cap.value), default=None)


def at_once(limits: Iterable[Cap], job: Amounts, others: Iterable[Amounts] = ()) -> tuple[int, Cap] | None:
    """Returns how many such jobs may run alongside ``others``, and the limit that decides. ``None`` if nothing
    limits them."""
    others = list(others)
    counts = []
    for cap in limits:
        each = job.get(cap.resource, 0)
        if cap.limit != PER_JOB and each:
            left = cap.value - sum(other.get(cap.resource, 0) for other in others)
            counts.append((max(0, left) // each, cap))
    return min(counts, key=lambda each: each[0], default=None)
