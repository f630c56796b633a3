"""``RUN/ledger/coordinator.json``: the lease of the pod that looks at everything for all, and what it has found out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger.leader_lease import LeaderLease
from megaflow_hpc.rundir.events import Count, Number, Time
from megaflow_hpc.rundir.live import Asked

FEW = 8
"""Up to so many pods each look at the ledger for themselves."""


@dataclass(frozen=True)
class Survey:
    """What one pod finds out for all, so that not every pod has to look."""

    open: int
    """Blocks that are not done."""
    claimable: int
    """Those of them that are free, were given back, or whose holder is gone."""
    orphans: list[tuple[int, int, str]] = field(default_factory=list)
    """Block, epoch and holder (``<pod>.<start>``) of some whose holder is gone, or was started anew since: who looks
    for one of them need not read the claims of all."""
    requests: dict[str, int] = field(default_factory=dict)
    """Slots that pods without work ask others to fill, by request."""
    opened: bool = False
    """A consumer may add blocks."""
    awaited: bool = False
    """One of these has renewed its lease not long ago."""


class Progress(NamedTuple):
    """How far a pod is, as its lease says."""

    t: Time
    """Seconds UTC of the pod's clock."""
    running: Count
    queued: Count
    stored: Count
    tokens: Count = 0
    """Tokens that engines have sampled for it."""
    tokens_per_s: Number = 0.0


class Report(msgspec.Struct, kw_only=True):
    """What the coordinator reports."""

    pods: int = 0
    """Pods whose lease is renewed."""
    survey: Survey | None = None
    generation: str = ""
    """Of the engines, as they are in the listing."""
    exceeded: str = ""
    """The limit of the campaign that is exceeded."""
    progress: dict[str, Progress] = msgspec.field(default_factory=dict)
    """By ``<pod>.<start>``, of all that have not ended."""
    asked: Asked = Asked()
    """What viewers want to know."""


def reported(lease: LeaderLease) -> Report:
    """Returns what the leader reported at the last look; an empty report where it is of another version."""
    try:
        return msgspec.convert(lease.report, Report)
    except ValueError:  # a text of lone surrogates too
        return Report()


def progress_of(lease: dict[str, object]) -> Progress | None:
    """Returns what a pod's lease says of its progress; ``None`` of one that says nothing."""
    try:
        said = {**Progress._field_defaults, **lease}  # of a version that did not say all of it
        return msgspec.convert([said[name] for name in Progress._fields], Progress)
    except (KeyError, ValueError):
        return None


def process_here(lease: Mapping[str, Any]) -> Identity | None:
    """Returns the process of a pod outside of Slurm, dead or alive; ``None`` of a job's, and of another host's."""
    if lease.get("job_id") or lease.get("host") != os.uname().nodename:
        return None
    try:
        return Identity(int(lease["pid"]), int(lease["pid_start"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
