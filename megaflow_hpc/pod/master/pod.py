"""Configuration and state of rank 0 of a pod. Built by :mod:`~megaflow_hpc.pod.master.assembly`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.config.sections import LimitsConfig, SchedulingConfig
from megaflow_hpc.host.wire import Message
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.comm import Comm
from megaflow_hpc.pod.scheduling.groups import GroupRules
from megaflow_hpc.pod.scheduling.scheduler import NOTHING, Demand
from megaflow_hpc.rundir.events import EventWriter
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.writer import JournalWriter


@dataclass(frozen=True)
class Walltime:
    """Time available to this pod's rollouts. Infinite if the job has no time limit.

    The batch script queries Slurm once. After that, the pod relies on its monotonic clock.
    """

    whole_s: float = math.inf
    """Seconds available to rollouts when the pod started."""
    end: float = math.inf
    """Monotonic time by which rollouts must have ended."""

    @classmethod
    def of_job(cls, lead_s: float) -> Walltime:
        """Reads the end of the job from ``MEGAFLOW_END``, in Unix seconds. ``pods.sh`` sets it if the job has a time
        limit.

        Args:
            lead_s: Seconds before the end of the job at which Slurm signals the batch script, and the pod drains.
        """
        try:
            left_s = float(os.environ.get("MEGAFLOW_END", "")) - time.time() - lead_s
        except ValueError:
            return cls()
        if left_s <= 0:
            return cls()  # invalid, or Slurm is about to signal the pod anyway
        return cls(left_s, time.monotonic() + left_s)

    @property
    def remaining_s(self) -> float:
        """Seconds until :attr:`end`."""
        return self.end - time.monotonic()


@dataclass
class Pod:
    """State of one start of a pod, with the settings from the campaign file that it needs."""

    run: RunDir
    comm: Comm
    ledger: Ledger
    journal: JournalWriter
    events: EventWriter
    init: Message
    tasks: Mapping[str, PlannedTask]
    """All tasks of the campaign, by id. Only the I/O thread may use this mapping, because a lookup may read a file."""
    servers: dict[str, int]
    """Number of engine servers that the campaign requests, by policy. Empty if no policy has a model."""
    drain_file: Path | None = None
    drain_s: float = 25.0
    """Seconds that running rollouts have left once the pod drains."""
    signalled_at: float = math.inf
    """Monotonic time when Slurm signalled the tasks of the step. Infinite before that."""
    job_id: str = ""
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    samples: Mapping[str, int] = field(default_factory=dict)
    """Number of samples per group, by policy. Does not count spare samples."""
    judges: frozenset[str] = frozenset()
    """Policies that judge rollouts, and services of the whole campaign. Rollouts start only once their servers
    respond."""
    held_out: Collection[str] = ()
    """Ids of the tasks that evaluate training. The group rules do not apply to them."""
    room: tuple[float | None, int | None] = (None, None)
    """CPUs and memory in MB of a worker rank. Each is ``None`` if unknown."""
    walltime: Walltime = field(default_factory=Walltime)
    pods: int = 1
    """Number of pods that the campaign requests."""

    def why_drain(self, wait_s: float = 0.0) -> str | None:
        """Reads the word in the drain file. Returns ``None`` if the supervisor has not requested a drain.

        Args:
            wait_s: Seconds to wait for the drain file.
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
        section = self.scheduling
        return GroupRules(
            wanted=self.samples if section.spare else {},
            signal_after=section.signal_after or 0,
        )

    @property
    def several_images(self) -> bool:
        """True if the tasks use more than one image."""
        first = next(iter(self.tasks.values()), None)
        return first is not None and first.alike < len(self.tasks)

    def demand(self, planned: PlannedTask) -> Demand:
        """Returns the resources that a task's rollouts need in addition to a slot. Includes only the resources
        that the campaign counts when it packs rollouts."""
        pack = self.scheduling.pack
        if not pack:
            return NOTHING
        own = [each for each in planned.task.get("services", ()) if each.get("per", "rollout") == "rollout"]
        limits = [each.get("limits", {}) for each in (planned.task, *own)]
        return Demand(
            sum(float(each.get("cpus") or 0.0) for each in limits) if "cpus" in pack else 0.0,
            sum(int(each.get("memory_mb") or 0) for each in limits) if "memory" in pack else 0,
        )
