"""What a campaign held, from the start of each allocation to its end, and what of it was idle.

A pod is idle while none of its own rollouts runs: while it starts, while it waits for an engine, once it has nothing
more to do. An engine is idle while no rollout runs at all. Times are those of the accounting and of the trajectories,
both in seconds UTC.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Span = tuple[float, float]

ROUNDED_S = 1.0
"""The accounting counts whole seconds, and leaves out a job's last one."""


@dataclass(frozen=True)
class HeldTime:
    """Cores and GPUs that one job held from one time to another."""

    span: Span
    cores: int
    gpus: int


@dataclass(frozen=True)
class JobUse(HeldTime):
    """One start of one job: what it held, and what it used of that where accounting knows."""

    job: str
    """``<job>_<element>`` or ``<job>``."""
    role: str
    """As in the run's records of jobs: ``pods``, ``servers``, ``trainer``, ``gather``, …"""
    state: str = ""
    cpu_s: float | None = None
    """CPU time of all its processes."""
    memory_asked_mb: float | None = None
    memory_peak_mb: float | None = None
    """The most that one of its steps used."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def overlap(span: Span, busy: Sequence[Span]) -> float:
    """Seconds of ``span`` that lie in ``busy`` (merged)."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in busy)


def idled(held: Iterable[JobUse], rollouts: Iterable[tuple[str, Span]]) -> Iterator[tuple[JobUse, float, float]]:
    """Yields each job with the seconds that it held its allocation, and those of them in which it was idle.

    A gather job is not idle. A rollout that ends in the second which the accounting leaves out was at work until then.

    Args:
        rollouts: As for :func:`totals`.
    """
    of_pod: dict[str, list[Span]] = {}
    for pod, span in rollouts:
        of_pod.setdefault(pod, []).append(span)
    busy_pods = {pod: merged(spans) for pod, spans in of_pod.items()}
    busy = merged(span for spans in busy_pods.values() for span in spans)
    for job in held:
        whole = max(0.0, job.span[1] - job.span[0])
        at_work = busy_pods.get(job.job.partition("+")[0], []) if job.role == "pods" else busy
        end = max([job.span[1], *(over for _, over in at_work if over < job.span[1] + ROUNDED_S)])
        worked = overlap((job.span[0], end), at_work)
        yield job, whole, 0.0 if job.role == "gather" else max(0.0, whole - worked)


def totals(held: Iterable[JobUse], rollouts: Iterable[tuple[str, Span]]) -> dict[str, float]:
    """Core-seconds and GPU-seconds, in all and idle, and how long GPUs were held after the last rollout.

    Args:
        rollouts: Each attempt at a rollout: the job id of the pod where it ran, and when.
    """
    held, ran = list(held), list(rollouts)
    sums = dict.fromkeys(("core_seconds", "idle_core_seconds", "gpu_seconds", "idle_gpu_seconds"), 0.0)
    for job, whole, idle in idled(held, ran):
        sums["core_seconds"] += whole * job.cores
        sums["idle_core_seconds"] += idle * job.cores
        sums["gpu_seconds"] += whole * job.gpus
        sums["idle_gpu_seconds"] += idle * job.gpus
    last = max((end for _, (start, end) in ran if end > start), default=math.inf)
    after = [job.span[1] - last for job in held if job.gpus]
    sums["gpus_outlived_last_rollout_s"] = max(0.0, max(after, default=0.0))
    return {name: round(value, 1) for name, value in sums.items()}


def added(usages: Iterable[dict[str, float]]) -> dict[str, float]:
    """Returns the sums of what several runs held; of the time that GPUs were held for nothing, the longest."""
    found: dict[str, float] = {}
    for usage in usages:
        for name, value in usage.items():
            both = found.get(name, 0.0), value
            found[name] = max(both) if name == "gpus_outlived_last_rollout_s" else round(sum(both), 1)
    return found
