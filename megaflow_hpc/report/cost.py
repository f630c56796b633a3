"""Cost of a campaign: hours of cores and GPUs, their price, and how much of them was used.

Slurm's accounting knows every start of every job. Without accounting, the cost comes from the core-seconds in the
leases of pods and the GPU-seconds in the files of engine servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.monitor.usage import JobUse, Span, idled
from megaflow_hpc.report.series import significant
from megaflow_hpc.rundir.budget import held_before, measured
from megaflow_hpc.rundir.layout import RunDir

HOUR = 3600.0


class Prices(msgspec.Struct, kw_only=True):
    """Prices of an hour; ``None`` if not given."""

    core_hour: float | None = None
    gpu_hour: float | None = None
    currency: str = ""


class HeldHours(msgspec.Struct, kw_only=True):
    """Hours that jobs held."""

    core_hours: float = 0.0
    gpu_hours: float = 0.0
    idle_core_hours: float | None = None
    """Idle hours among them (:mod:`megaflow_hpc.monitor.usage`); ``None`` without accounting."""
    idle_gpu_hours: float | None = None
    price: float | None = None


class RoleCost(HeldHours, kw_only=True):
    """Hours that the jobs of one role held."""

    role: str
    """``pods``, ``servers``, ``trainer``, ``gather`` or ``build``."""
    jobs: int = 0
    """Starts of array elements or plain jobs; 0 without accounting."""


class JobFigures(msgspec.Struct, kw_only=True):
    """One start of one job, as ``seff`` shows it."""

    job: str
    role: str
    state: str
    seconds: float
    cores: int
    gpus: int
    cpu_efficiency: float | None = None
    """CPU time divided by the core time held, 0 to 1."""
    memory_asked_mb: float | None = None
    memory_peak_mb: float | None = None
    memory_efficiency: float | None = None


class Cost(HeldHours, kw_only=True):
    """Cost of a campaign."""

    source: str
    """``accounting``: from Slurm; ``reports``: from pods and engine servers; ``none``."""
    price_per_rollout: float | None = None
    price_per_passed: float | None = None
    currency: str = ""
    cpu_efficiency: float | None = None
    """Efficiency over all jobs whose CPU time is known."""
    memory_efficiency: float | None = None
    """Peak memory divided by requested memory, weighted by the request."""
    roles: list[RoleCost] = []
    jobs: list[JobFigures] = []
    """The jobs that held the most core-seconds, largest first."""
    jobs_left_out: int = 0


JOBS_SHOWN = 400


def cost_of(
    run: RunDir | None,
    uses: Sequence[JobUse],
    rollouts: Iterable[tuple[str, Span]],
    prices: Prices,
    stored: int,
    passed: int,
) -> Cost:
    """Returns the cost of a run.

    Args:
        uses: accounting of its jobs; empty without accounting.
        rollouts: job id of the pod and span of each attempt, for the idle time.
        stored, passed: numbers of rollouts that share the price.
    """
    found = _of_accounting(uses, rollouts) if uses else _of_reports(run) if run else Cost(source="none")
    found.currency = prices.currency
    for role in found.roles:
        role.price = _price(role.core_hours, role.gpu_hours, prices)
    found.price = _price(found.core_hours, found.gpu_hours, prices)
    if found.price is not None:
        found.price_per_rollout = significant(found.price / stored) if stored else None
        found.price_per_passed = significant(found.price / passed) if passed else None
    return found


def _price(core_hours: float, gpu_hours: float, prices: Prices) -> float | None:
    if prices.core_hour is None and prices.gpu_hour is None:
        return None
    return significant(core_hours * (prices.core_hour or 0.0) + gpu_hours * (prices.gpu_hour or 0.0))


def _of_accounting(uses: Sequence[JobUse], rollouts: Iterable[tuple[str, Span]]) -> Cost:
    roles: dict[str, RoleCost] = {}
    for use, whole, idle_s in idled(uses, rollouts):
        idle = idle_s / HOUR
        role = roles.setdefault(use.role, RoleCost(role=use.role, idle_core_hours=0.0, idle_gpu_hours=0.0))
        role.jobs += 1
        role.core_hours += whole * use.cores / HOUR
        role.gpu_hours += whole * use.gpus / HOUR
        role.idle_core_hours = (role.idle_core_hours or 0.0) + idle * use.cores
        role.idle_gpu_hours = (role.idle_gpu_hours or 0.0) + idle * use.gpus
    for role in roles.values():
        for name in ("core_hours", "gpu_hours", "idle_core_hours", "idle_gpu_hours"):
            setattr(role, name, significant(getattr(role, name)))
    every = sorted(roles.values(), key=lambda role: role.role)
    jobs = sorted(map(_figures, uses), key=lambda job: -job.seconds * job.cores)
    known = [(job.cpu_efficiency, job.seconds * job.cores) for job in jobs if job.cpu_efficiency is not None]
    asked = [(job.memory_efficiency, job.memory_asked_mb or 0.0) for job in jobs if job.memory_efficiency is not None]
    return Cost(
        source="accounting",
        core_hours=significant(sum(role.core_hours for role in every)),
        gpu_hours=significant(sum(role.gpu_hours for role in every)),
        idle_core_hours=significant(sum(role.idle_core_hours or 0.0 for role in every)),
        idle_gpu_hours=significant(sum(role.idle_gpu_hours or 0.0 for role in every)),
        cpu_efficiency=_weighted(known),
        memory_efficiency=_weighted(asked),
        roles=every,
        jobs=jobs[:JOBS_SHOWN],
        jobs_left_out=max(0, len(jobs) - JOBS_SHOWN),
    )


def _figures(use: JobUse) -> JobFigures:
    seconds = max(0.0, use.span[1] - use.span[0])
    cores_s, asked, peak = seconds * use.cores, use.memory_asked_mb, use.memory_peak_mb
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


def _weighted(values: Sequence[tuple[float, float]]) -> float | None:
    total = sum(weight for _, weight in values)
    return significant(sum(value * weight for value, weight in values) / total) if total else None


def _of_reports(run: RunDir) -> Cost:
    try:
        leases = list(Ledger(run).leases().values())
    except (OSError, ValueError):
        leases = []
    core_s = sum(measured(lease.get("core_s")) or 0.0 for lease in leases)
    servers = sorted(run.gpus.glob("*.json"))
    gpu_s = sum(map(held_before, servers))
    if not (core_s or gpu_s):
        return Cost(source="none")
    cores, gpus = significant(core_s / HOUR), significant(gpu_s / HOUR)
    roles = [RoleCost(role="pods", core_hours=cores)]
    if gpus:
        roles.append(RoleCost(role="servers", gpu_hours=gpus))
    return Cost(source="reports", core_hours=cores, gpu_hours=gpus, roles=roles)
