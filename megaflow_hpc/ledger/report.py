"""The coordinator's report, ``RUN/ledger/coordinator.json``. The coordinator is the pod that surveys the ledger for
all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from megaflow_hpc.host.process import Identity
from megaflow_hpc.ledger.leader import Leader
from megaflow_hpc.ledger.progress import Progress
from megaflow_hpc.rundir.live import Asked

FEW = 8
"""Maximum number of pods with which every pod scans the ledger itself, without a coordinator."""


@dataclass(frozen=True)
class Survey:
    """State of the ledger, as surveyed by one pod for all pods."""

    open: int
    """Number of blocks that are not done."""
    claimable: int
    """Number of open blocks that are free or released, or whose holder is gone."""
    orphans: list[tuple[int, int, str]] = field(default_factory=list)
    """(block, epoch, holder ``<pod>.<start>``) of some blocks whose holder is gone or has restarted. Saves the pods
    that take them over from reading all claims."""
    requests: dict[str, int] = field(default_factory=dict)
    """Pending requests for work, each with its number of slots."""
    opened: bool = False
    """True if a consumer may add blocks."""
    awaited: bool = False
    """True if the lease of such a consumer has not expired."""


class Report(msgspec.Struct, kw_only=True):
    """Content of the coordinator's report."""

    pods: int = 0
    """Number of pods that are renewing their lease."""
    survey: Survey | None = None
    generation: str = ""
    """Generation of the published listing of engines."""
    exceeded: str = ""
    """Describes the exceeded campaign limit. Empty if there is none."""
    progress: dict[str, Progress] = msgspec.field(default_factory=dict)
    """``<pod>.<start>`` → progress, for every pod that has not ended."""
    asked: Asked = Asked()
    """Rollouts that viewers have requested."""


def reported(leader: Leader) -> Report:
    """Returns the leader's report as of the last poll. Empty if it is invalid or of another version."""
    try:
        return msgspec.convert(leader.report, Report)
    except ValueError:  # also raised for lone surrogates
        return Report()


def process_here(lease: Mapping[str, Any]) -> Identity | None:
    """Returns the process of a pod that runs outside Slurm, dead or alive. ``None`` for jobs, and for pods on other
    hosts."""
    if lease.get("job_id") or lease.get("host") != os.uname().nodename:
        return None
    try:
        return Identity(int(lease["pid"]), int(lease["pid_start"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
