"""What the master of a pod works with; :mod:`~megaflow_hpc.pod.master.assembly` puts it together."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.config.sections import LimitsConfig, SchedulingConfig
from megaflow_hpc.host.wire import Message
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.comm import Comm
from megaflow_hpc.pod.master.run_io_thread import Journal
from megaflow_hpc.pod.scheduling.groups import GroupRules
from megaflow_hpc.pod.scheduling.work import NOTHING, Demand
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import EventWriter
from megaflow_hpc.rundir.layout import RunDir

MARGIN_S = 60.0
"""The batch script is warned, and the pod drains, this long before the end."""


@dataclass(frozen=True)
class Walltime:
    """How long rollouts of this pod may take; without end where the job has no limit.

    Slurm is asked once, by the batch script; the monotonic clock counts from then on.
    """

    whole_s: float = math.inf
    """Seconds that there were when the pod began."""
    end: float = math.inf
    """When rollouts must have ended, by the monotonic clock."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Walltime:
        """Reads ``MEGAFLOW_END`` (seconds UTC; absent or empty: no limit), which ``pods.sh`` sets."""
        try:
            left = float(environment.get("MEGAFLOW_END", "")) - time.time() - MARGIN_S
        except ValueError:
            return cls()
        if left <= 0:
            return cls()  # nonsense, or a pod that is about to be warned anyhow
        return cls(left, time.monotonic() + left)

    @property
    def remaining_s(self) -> float:
        """Seconds until then."""
        return self.end - time.monotonic()


@dataclass
class Pod:
    """One start of one pod, and what the campaign file says of it."""

    run: RunDir
    comm: Comm
    ledger: Ledger
    journal: Journal
    events: EventWriter
    init: Message
    tasks: Mapping[str, PlannedTask]
    """Every task of the campaign by id. Looking one up may read a file: it belongs to the I/O thread."""
    servers: dict[str, int]
    """Engine servers that the campaign asks for, by policy; empty where no policy has a model."""
    drain_file: Path | None = None
    job_id: str = ""
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    learned: Sequence[Sequence[Any]] = ()
    """Durations in earlier campaigns; see :meth:`Estimates.learn`."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    samples: Mapping[str, int] = field(default_factory=dict)
    """Samples that a group wants, by policy; spare ones not counted."""
    held_out: Collection[str] = ()
    """Tasks on which training is evaluated: all of their samples run, whatever the rules of groups."""
    room: tuple[float | None, int | None] = (None, None)
    """Cpus and MB of memory that a worker rank has, where they are known."""
    walltime: Walltime = field(default_factory=Walltime)
    pods: int = 1
    """How many the campaign asks for."""
    starts_a_task: float = 0.0
    """Sandboxes that one node will start of a task, in the mean; 0 where that is not known."""

    def why_drain(self, wait_s: float = 0.0) -> str | None:
        """Returns the word with which the supervisor asks the pod to drain; ``None`` while it does not.

        Args:
            wait_s: Seconds for which it may still come.
        """
        end = time.monotonic() + wait_s
        while self.drain_file is not None:
            with suppress(FileNotFoundError):
                return self.drain_file.read_text().strip()
            if time.monotonic() >= end:
                break
            time.sleep(0.02)
        return None

    def group_rules(self) -> GroupRules:
        """Returns what the campaign file says of groups."""
        section = self.scheduling
        return GroupRules(
            wanted=self.samples if section.spare else {},
            signal_after=section.signal_after or 0,
        )

    def planned(self, policy: str) -> int:
        """Returns the samples that a group of this policy was planned with, spare ones counted."""
        return self.samples.get(policy, 0) + self.scheduling.spare

    @property
    def several_images(self) -> bool:
        """Whether tasks differ in their images."""
        first = next(iter(self.tasks.values()), None)
        return first is not None and first.alike < len(self.tasks)

    def starts(self, planned: PlannedTask) -> float:
        """Returns the sandboxes of a task's image that one node will start: what unpacking it is weighed against."""
        return self.starts_a_task * planned.alike

    def budget(self) -> CampaignBudget:
        """Returns the watch over limits of the whole campaign."""
        return CampaignBudget(self.run, self.limits.model_dump())

    def demand(self, planned: PlannedTask) -> Demand:
        """Returns what a task's rollouts need beside a slot, as far as the campaign packs by it."""
        pack = self.scheduling.pack
        if not pack:
            return NOTHING
        limits = planned.task.get("limits", {})
        return Demand(
            float(limits.get("cpus") or 0.0) if "cpus" in pack else 0.0,
            int(limits.get("memory_mb") or 0) if "memory" in pack else 0,
        )
