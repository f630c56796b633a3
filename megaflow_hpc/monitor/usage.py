"""Core and GPU time that a campaign's allocations held from start to end, and how much of it was idle.

A pod is idle while none of its own rollouts is running: it is starting, waiting for an engine, or out of work. An
engine is idle while no rollout of the campaign is running. Times come from Slurm's accounting and from the
trajectories, both in Unix seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Span = tuple[float, float]

ROUNDED_S = 1.0
"""Maximum rounding error in seconds. Slurm's accounting counts whole seconds and may omit the last second of a job."""


@dataclass(frozen=True)
class JobUse:
    """Resources allocated to a start of a job, and resources used according to Slurm's accounting."""

    span: Span
    cores: int
    gpus: int
    job: str
    """Job id: ``<job>_<element>`` for an array element, otherwise ``<job>``."""
    role: str
    """Role in the run's job records: ``pods``, ``servers``, ``trainer``, ``gather``, …"""
    state: str = ""
    cpu_s: float | None = None
    """CPU time of all processes of the job, in seconds. ``None`` if unknown."""
    memory_asked_mb: float | None = None
    memory_peak_mb: float | None = None
    """Maximum memory use of any step of the job. ``None`` if unknown."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merges overlapping spans and sorts them."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif end > start:
            result.append((start, end))
    return result


def overlap(span: Span, busy: Sequence[Span]) -> float:
    """Returns how many seconds of ``span`` are covered by ``busy``, the result of :func:`merged`."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in busy)


def idled(held: Iterable[JobUse], rollouts: Iterable[tuple[str, Span]]) -> Iterator[tuple[JobUse, float, float]]:
    """Yields (job, held seconds, idle seconds) for each job.

    A gather job is never idle. A job stays busy until its last rollout ends, even within the second that accounting
    omits.

    Args:
        rollouts: (Pod's job id, time span) of each attempt at a rollout.
    """
    by_pod: dict[str, list[Span]] = {}
    for pod, span in rollouts:
        by_pod.setdefault(pod, []).append(span)
    busy_pods = {pod: merged(spans) for pod, spans in by_pod.items()}
    busy = merged(span for spans in busy_pods.values() for span in spans)
    for job in held:
        start, end = job.span
        seconds = max(0.0, end - start)
        if job.role == "gather":
            yield job, seconds, 0.0
            continue
        at_work = busy_pods.get(job.job.partition("+")[0], []) if job.role == "pods" else busy
        end = max([end, *(over for _, over in at_work if over < end + ROUNDED_S)])
        yield job, seconds, max(0.0, seconds - overlap((start, end), at_work))


def totals(held: Iterable[JobUse], rollouts: Iterable[tuple[str, Span]]) -> dict[str, float]:
    """Returns total and idle core-seconds and GPU-seconds, and the seconds for which GPUs were held after the last
    rollout.

    Args:
        rollouts: (Pod's job id, time span) of each attempt at a rollout.
    """
    held, ran = list(held), list(rollouts)
    sums = dict.fromkeys(("core_seconds", "idle_core_seconds", "gpu_seconds", "idle_gpu_seconds"), 0.0)
    for job, seconds, idle_s in idled(held, ran):
        sums["core_seconds"] += seconds * job.cores
        sums["idle_core_seconds"] += idle_s * job.cores
        sums["gpu_seconds"] += seconds * job.gpus
        sums["idle_gpu_seconds"] += idle_s * job.gpus
    last = max((end for _, (start, end) in ran if end > start), default=math.inf)
    after = [job.span[1] - last for job in held if job.gpus]
    sums["gpus_outlived_last_rollout_s"] = max(0.0, max(after, default=0.0))
    return {name: round(value, 1) for name, value in sums.items()}


def added(usages: Iterable[dict[str, float]]) -> dict[str, float]:
    """Combines the totals of several runs. Takes the maximum of ``gpus_outlived_last_rollout_s``, and the sum of all
    others."""
    sums: dict[str, float] = {}
    for usage in usages:
        for name, value in usage.items():
            before = sums.get(name, 0.0)
            longest = name == "gpus_outlived_last_rollout_s"
            sums[name] = max(before, value) if longest else round(before + value, 1)
    return sums
