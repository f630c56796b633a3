"""What a campaign held and what of it was idle: seconds of cores and GPUs in which no rollout ran.

An engine that starts before the pods, pods that start before an engine, and what lives on after the last rollout all
show here. Times are those of the accounting and of the trajectories, both in seconds UTC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[float, float]


@dataclass(frozen=True)
class Held:
    """Cores and GPUs that one job held from one time to another."""

    span: Span
    cores: int
    gpus: int


@dataclass(frozen=True)
class JobUse(Held):
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


def totals(held: Iterable[Held], rollouts: Iterable[Span]) -> dict[str, float]:
    """Core-seconds and GPU-seconds, in all and while no rollout ran, and how long GPUs were held after the last one."""
    busy, held = merged(rollouts), list(held)
    sums = dict.fromkeys(("core_seconds", "idle_core_seconds", "gpu_seconds", "idle_gpu_seconds"), 0.0)
    for job in held:
        whole = max(0.0, job.span[1] - job.span[0])
        idle = whole - overlap(job.span, busy)
        sums["core_seconds"] += whole * job.cores
        sums["idle_core_seconds"] += idle * job.cores
        sums["gpu_seconds"] += whole * job.gpus
        sums["idle_gpu_seconds"] += idle * job.gpus
    last = busy[-1][1] if busy else 0.0
    after = [job.span[1] - last for job in held if job.gpus] if busy else []
    sums["gpus_outlived_last_rollout_s"] = max(0.0, max(after, default=0.0))
    return {name: round(value, 1) for name, value in sums.items()}
