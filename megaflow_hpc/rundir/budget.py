"""Tracks the usage of a campaign against its total limits.

The limits are ``limits.core_hours``, ``limits.gpu_hours``, ``limits.wall`` and ``limits.usd``. Every pod reports the
core-seconds of its allocation and the price of its model calls in its lease. Every engine server reports its
GPU-seconds in a separate file. One pod sums the reports for the whole campaign. A campaign can exceed a limit by at
most its usage between two polls. The jobs exchange no messages and do not query Slurm.

::

    RUN/ledger/gpus/<server>.json    GPU-seconds of one engine server, over all its starts
    RUN/ledger/limits.json           limits that override those of the campaign file (``resume --limit``)
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import make_directory, write_json
from megaflow_hpc.rundir.layout import RunDir, read_json, write_record

LIMITS = ("core_hours", "gpu_hours", "wall", "usd")
REPORT_INTERVAL_S = 30.0
"""Seconds between two reports of GPU time."""
MAX_S = 1e15
"""Largest plausible number of core-seconds: a billion cores for about ten days."""
Amount = Annotated[float, Meta(gt=0, le=MAX_S)]
_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def cores_of(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of CPUs in the whole allocation. Slurm's accounting charges for all of them."""
    counts = environment.get("SLURM_JOB_CPUS_PER_NODE", "")
    if not counts:
        return len(os.sched_getaffinity(0))
    return sum(int(cpus) * int(times or 1) for cpus, times in _PER_NODE.findall(counts))


class RaisedLimits(msgspec.Struct, omit_defaults=True):
    """Limits that override the limits in the campaign file. ``None`` means unlimited."""

    core_hours: Amount | UnsetType | None = UNSET
    gpu_hours: Amount | UnsetType | None = UNSET
    wall: Amount | UnsetType | None = UNSET
    usd: Amount | UnsetType | None = UNSET


class GpuTime(msgspec.Struct):
    """GPU time of one engine server, summed over all its starts."""

    gpus: int = 0
    gpu_s: Annotated[float, Meta(ge=0, le=MAX_S)] = 0.0


class CampaignBudget:
    """A campaign's limits, and the total usage of all its jobs.

    Args:
        limits: The ``limits`` section of the campaign file. A missing limit means unlimited.
    """

    def __init__(self, run: RunDir, limits: Mapping[str, Any]) -> None:
        self._run = run
        self._planned = {name: limits.get(name) for name in LIMITS}
        self._raised: dict[str, float | None] = {}
        self._held: dict[Path, float] = {}

    def limits(self) -> dict[str, float | None]:
        """Returns the current limits, in hours and US dollars. ``None`` means unlimited."""
        with suppress(FileNotFoundError, ValueError):
            raised = read_json(self._run.raised_limits, RaisedLimits)
            self._raised = msgspec.to_builtins(raised)
        return {**self._planned, **self._raised}

    def raise_to(self, limits: Mapping[str, float | None]) -> None:
        """Overrides limits of an existing run. Running pods apply them at their next poll.

        Raises:
            ConfigError: A limit is unknown, or its value is not positive.
        """
        for name, value in limits.items():
            if name not in LIMITS or (value is not None and not value > 0):
                raise ConfigError(f"limit {name}={value}: expected one of {', '.join(LIMITS)}, and a number above 0")
        if limits:
            write_json(self._run.raised_limits, {**self.limits(), **limits})

    def exceeded(self, leases: Mapping[str, Mapping[str, Any]]) -> str:
        """Returns a sentence that describes the first exceeded limit. Returns an empty string if none is exceeded.

        Args:
            leases: The lease of each pod start, with ``core_s``, ``usd`` and ``began_at`` (Unix timestamp in seconds).
        """
        limits = self.limits()
        core_h, gpu_h, wall, usd = (limits[name] for name in LIMITS)
        if core_h is not None:
            used_h = sum(measured(lease.get("core_s")) or 0.0 for lease in leases.values()) / 3600
            if used_h >= core_h:
                return f"{used_h:.2f} core-hours are used, limits.core_hours is {core_h:g}"
        if gpu_h is not None:
            used_h = self._gpu_s() / 3600
            if used_h >= gpu_h:
                return f"{used_h:.2f} GPU-hours are used, limits.gpu_hours is {gpu_h:g}"
        if wall is not None:
            starts = [measured(lease.get("began_at")) for lease in leases.values()]
            first = min((start for start in starts if start), default=time.time())
            wall_h = (time.time() - first) / 3600
            if wall_h >= wall:
                return f"the first pod started {wall_h:.2f} hours ago, limits.wall is {wall:g}"
        if usd is not None:
            spent = spent_usd(leases)
            if spent >= usd:
                return f"{spent:.2f} US dollars are spent on model calls, limits.usd is {usd:g}"
        return ""

    def _gpu_s(self) -> float:
        for file in self._run.gpus.glob("*.json"):
            self._held[file] = max(held_before(file), self._held.get(file, 0.0))
        return sum(self._held.values())


class Meter:
    """Reports the GPU time of one engine server, summed over all its starts.

    Args:
        gpus: Number of GPUs of the server.
    """

    def __init__(self, run: RunDir, server: str, gpus: int) -> None:
        self._file, self._gpus = run.gpus / f"{server}.json", gpus
        self._before, self._began = 0.0, time.monotonic()
        self._next = 0.0

    def tick(self, now: bool = False) -> None:
        """Writes a report if one is due or ``now`` is true. A killed server loses the time since its last report.

        Raises:
            OSError: The run directory is not writable.
        """
        if not self._gpus or (not now and time.monotonic() < self._next):
            return
        if not self._next:
            self._before = held_before(self._file)
            make_directory(self._file.parent)
        held_s = time.monotonic() - self._began
        used = GpuTime(self._gpus, round(self._before + held_s * self._gpus, 1))
        write_record(self._file, used)
        self._next = time.monotonic() + REPORT_INTERVAL_S


def gpus_of(planned: int, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of GPUs of an engine server. Slurm's number replaces ``planned`` if it is known."""
    gpus = environment.get("SLURM_GPUS_ON_NODE", "") if environment.get("SLURM_ARRAY_JOB_ID") else ""
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    return int(gpus) * int(nodes) if gpus.isdigit() and nodes.isdigit() else planned


def held_before(file: Path) -> float:
    """Returns the GPU-seconds recorded in a server's report. Returns 0 if there is no valid report."""
    try:
        return read_json(file, GpuTime).gpu_s
    except (FileNotFoundError, ValueError):
        return 0.0


def spent_usd(leases: Mapping[str, Mapping[str, Any]]) -> float:
    """Returns the price of all model calls that pods have reported, in US dollars."""
    return sum(measured(lease.get("usd")) or 0.0 for lease in leases.values())


def measured(value: object) -> float | None:
    """Checks a number of seconds or dollars read from a file. Returns ``None`` if the value is implausible."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= MAX_S else None


# --- usage of judges and priced models --------------------------------------------------------------------------------


class ModelUse(msgspec.Struct, omit_defaults=True):
    """Token usage and price of one judge or one priced model. It does not count as usage of the policies."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    usd: float | None = None
    """Price in US dollars. ``None`` if the campaign file does not specify one."""

    def __add__(self, other: ModelUse) -> ModelUse:
        usd = None if self.usd is None and other.usd is None else (self.usd or 0.0) + (other.usd or 0.0)
        tokens = self.prompt_tokens + other.prompt_tokens, self.sampled_tokens + other.sampled_tokens
        return ModelUse(self.calls + other.calls, *tokens, usd)


Used = dict[str, ModelUse]
"""Usage by model name."""


def total_use(uses: Iterable[Mapping[str, ModelUse]]) -> Used:
    """Adds up several mappings, model by model."""
    sums: Used = {}
    for use in uses:
        for model, one in use.items():
            sums[model] = sums.get(model, ModelUse()) + one
    return sums


def use_lines(used: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Describes the calls of each model in one line of text."""
    lines = []
    for model, use in used.items():
        usd = use.get("usd")
        price = f", {usd:.4g} USD" if isinstance(usd, float) else ""
        tokens = f"{use.get('prompt_tokens', 0)} prompt and {use.get('sampled_tokens', 0)} sampled tokens"
        lines.append(f"model {model}: {use.get('calls', 0)} calls, {tokens}{price}")
    return lines
