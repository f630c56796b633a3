"""Cost of a campaign: core-hours and GPU-hours, their price, and how much of them was used.

Slurm's accounting records every start of every job. Without accounting, the cost is computed from the core-seconds
in the pods' leases and the GPU-seconds reported by engine servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.monitor.usage import JobUse, Span, idled
from megaflow_hpc.report.series import significant
from megaflow_hpc.rundir.budget import held_before, spent_usd
from megaflow_hpc.rundir.layout import RunDir

HOUR = 3600.0


class Prices(msgspec.Struct, kw_only=True):
    """Prices per core-hour and GPU-hour. ``None`` if unknown."""

    core_hour: float | None = None
    gpu_hour: float | None = None
    currency: str = ""


class HeldHours(msgspec.Struct, kw_only=True):
    """Core-hours and GPU-hours allocated to jobs, with the idle part and the price."""

    core_hours: float = 0.0
    gpu_hours: float = 0.0
    idle_core_hours: float | None = None
    """Core-hours that were idle (:mod:`megaflow_hpc.monitor.usage`). ``None`` if accounting is unavailable."""
    idle_gpu_hours: float | None = None
    price: float | None = None


class RoleCost(HeldHours, kw_only=True):
    """Hours allocated to the jobs of a role."""

    role: str
    """``pods``, ``servers``, ``trainer``, ``gather`` or ``build``."""
    jobs: int = 0
    """Number of job starts. Each array element counts separately. 0 if accounting is unavailable."""


class JobFigures(msgspec.Struct, kw_only=True):
    """A start of a job, with the figures that ``seff`` shows."""

    job: str
    role: str
    state: str
    seconds: float
    cores: int
    gpus: int
    cpu_efficiency: float | None = None
    """CPU time divided by allocated core time, from 0 to 1."""
    memory_asked_mb: float | None = None
    memory_peak_mb: float | None = None
    memory_efficiency: float | None = None


class Cost(HeldHours, kw_only=True):
    source: str
    """Source of the figures: ``accounting`` (Slurm), ``reports`` (pods and engine servers) or ``none``."""
    price_per_rollout: float | None = None
    price_per_passed: float | None = None
    currency: str = ""
    usd: float = 0.0
    """Price of all model calls in US dollars, including those of failed attempts."""
    cpu_efficiency: float | None = None
    """CPU efficiency over all jobs whose CPU time is known."""
    memory_efficiency: float | None = None
    """Peak memory divided by requested memory, weighted by requested memory."""
    roles: list[RoleCost] = []
    jobs: list[JobFigures] = []
    """Jobs that held the most core-seconds, in descending order."""
    jobs_left_out: int = 0


MAX_JOBS = 400


def cost_of(
    run: RunDir | None,
    uses: Sequence[JobUse],
    rollouts: Iterable[tuple[str, Span]],
    prices: Prices,
    stored: int,
    passed: int,
) -> Cost:
    """Computes the cost of a run.

    Args:
        uses: Accounting data of the run's jobs. Empty if accounting is unavailable.
        rollouts: (Pod's job id, time span) of each attempt, to compute idle time.
        stored: Number of stored rollouts, to compute the price per rollout.
        passed: Number of rollouts that passed, to compute the price per passed rollout.
    """
    if uses:
        cost = _of_accounting(uses, rollouts)
    elif run:
        cost = _of_reports(run)
    else:
        cost = Cost(source="none")
    cost.currency = prices.currency
    if run:
        cost.usd = significant(spent_usd(_accounts(run)))
    for held in (cost, *cost.roles):
        if prices.core_hour is not None or prices.gpu_hour is not None:
            price = held.core_hours * (prices.core_hour or 0.0) + held.gpu_hours * (prices.gpu_hour or 0.0)
            held.price = significant(price)
    if cost.price is not None:
        cost.price_per_rollout = significant(cost.price / stored) if stored else None
        cost.price_per_passed = significant(cost.price / passed) if passed else None
    return cost


def _of_accounting(uses: Sequence[JobUse], rollouts: Iterable[tuple[str, Span]]) -> Cost:
    by_role: dict[str, RoleCost] = {}
    for use, seconds, idle_s in idled(uses, rollouts):
        role = by_role.setdefault(use.role, RoleCost(role=use.role, idle_core_hours=0.0, idle_gpu_hours=0.0))
        role.jobs += 1
        role.core_hours += seconds * use.cores / HOUR
        role.gpu_hours += seconds * use.gpus / HOUR
        role.idle_core_hours = (role.idle_core_hours or 0.0) + idle_s / HOUR * use.cores
        role.idle_gpu_hours = (role.idle_gpu_hours or 0.0) + idle_s / HOUR * use.gpus
    roles = sorted(by_role.values(), key=lambda role: role.role)
    jobs = sorted(map(_figures, uses), key=lambda job: -job.seconds * job.cores)
    cost = Cost(
        source="accounting",
        cpu_efficiency=_mean([(job.cpu_efficiency, job.seconds * job.cores) for job in jobs]),
        memory_efficiency=_mean([(job.memory_efficiency, job.memory_asked_mb or 0.0) for job in jobs]),
        roles=roles,
        jobs=jobs[:MAX_JOBS],
        jobs_left_out=max(0, len(jobs) - MAX_JOBS),
    )
    for name in ("core_hours", "gpu_hours", "idle_core_hours", "idle_gpu_hours"):
        for role in roles:
            setattr(role, name, significant(getattr(role, name)))
        setattr(cost, name, significant(sum(getattr(role, name) for role in roles)))
    return cost


def _figures(use: JobUse) -> JobFigures:
    start, end = use.span
    seconds = max(0.0, end - start)
    cores_s = seconds * use.cores
    asked, peak = use.memory_asked_mb, use.memory_peak_mb
    return JobFigures(
        job=use.job,
        role=use.role,
        state=use.state,
        seconds=seconds,
        cores=use.cores,
        gpus=use.gpus,
        cpu_efficiency=None if use.cpu_s is None or not cores_s else significant(use.cpu_s / cores_s),
        memory_asked_mb=asked,
        memory_peak_mb=peak,
        memory_efficiency=None if not asked or peak is None else significant(peak / asked),
    )


def _mean(weighted: Sequence[tuple[float | None, float]]) -> float | None:
    """Returns the weighted mean of the known values. ``None`` if all are unknown."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return significant(sum(value * weight for value, weight in known) / total) if total else None


def _of_reports(run: RunDir) -> Cost:
    core_s = sum(facts["core_s"] for facts in _accounts(run).values())
    gpu_s = sum(held_before(server) for server in sorted(run.gpus.glob("*.json")))
    if not (core_s or gpu_s):
        return Cost(source="none")
    cores, gpus = significant(core_s / HOUR), significant(gpu_s / HOUR)
    roles = [RoleCost(role="pods", core_hours=cores)]
    if gpus:
        roles.append(RoleCost(role="servers", gpu_hours=gpus))
    return Cost(source="reports", core_hours=cores, gpu_hours=gpus, roles=roles)


def _accounts(run: RunDir) -> dict[str, dict[str, Any]]:
    try:
        return Ledger(run).accounts()
    except (OSError, ValueError):
        return {}
