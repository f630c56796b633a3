"""The report ``RUN/ledger/coordinator.json`` of the pod that surveys the ledger for all pods."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger.leader import Leader
from megaflow_hpc.rundir.events import Count, Number, Time
from megaflow_hpc.rundir.live import Asked

FEW = 8
"""Up to this many pods, each pod looks at the ledger itself."""


@dataclass(frozen=True)
class Survey:
    """State of the ledger, as one pod found it for all pods."""

    open: int
    """Blocks that are not done."""
    claimable: int
    """Open blocks that are free or released, or whose holder is gone."""
    orphans: list[tuple[int, int, str]] = field(default_factory=list)
    """Block, epoch and holder (``<pod>.<start>``) of some blocks whose holder is gone or has restarted. Pods that take
    them over need not read all claims."""
    requests: dict[str, int] = field(default_factory=dict)
    """Slots that pods without work ask other pods to fill, by request."""
    opened: bool = False
    """A consumer may add blocks."""
    awaited: bool = False
    """The lease of such a consumer has not expired."""


class Progress(NamedTuple):
    """Progress of a pod, as its lease shows it."""

    t: Time
    """Seconds UTC of the pod's clock."""
    running: Count
    queued: Count
    stored: Count
    tokens: Count = 0
    """Tokens that engines have sampled for it."""
    tokens_per_s: Number = 0.0


class Report(msgspec.Struct, kw_only=True):
    """Everything that the coordinator reports."""

    pods: int = 0
    """Pods that renew their lease."""
    survey: Survey | None = None
    generation: str = ""
    """Generation of the published listing of engines."""
    exceeded: str = ""
    """The campaign limit that is exceeded, empty if none is."""
    progress: dict[str, Progress] = msgspec.field(default_factory=dict)
    """By ``<pod>.<start>``, for every pod that has not ended."""
    asked: Asked = Asked()
    """Rollouts that viewers ask about."""


def reported(leader: Leader) -> Report:
    """Returns the leader's report at the last look, an empty one if it is invalid or of another version."""
    try:
        return msgspec.convert(leader.report, Report)
    except ValueError:  # also for a text with lone surrogates
        return Report()


def progress_of(lease: dict[str, object]) -> Progress | None:
    """Returns the progress that a pod's lease shows, ``None`` if it shows none."""
    try:
        content = {**Progress._field_defaults, **lease}
        return msgspec.convert([content[name] for name in Progress._fields], Progress)
    except (KeyError, ValueError):
        return None


def process_here(lease: Mapping[str, Any]) -> Identity | None:
    """Returns the process of a pod outside Slurm, dead or alive. ``None`` for jobs, and for pods of other hosts."""
    if lease.get("job_id") or lease.get("host") != os.uname().nodename:
        return None
    try:
        return Identity(int(lease["pid"]), int(lease["pid_start"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
