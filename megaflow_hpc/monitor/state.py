"""Determines the state of a run and whether its pods are alive, for ``status``, ``watch`` and ``list``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megaflow_hpc.ledger.accounts import Progress
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.rundir.events import AnyEvent, AttemptEvent, PodEvent, RolloutEvent, StartEvent, WorkerEvent
from megaflow_hpc.rundir.summaries import Summary, busy_at, start_number


def run_state(
    *,
    finished: bool = False,
    cancelled: bool = False,
    serves: bool = False,
    alive: bool = False,
    waits: bool = False,
    submitted: bool = False,
    queued: bool | None = None,
    started: bool = False,
) -> str:
    """Returns the state of a run.

    The state is ``planned``, ``queued``, ``running``, ``waiting``, ``serving``, ``stopped``, ``cancelled`` or
    ``finished``. It is ``unknown`` if the run has Slurm jobs and Slurm does not respond.

    Args:
        finished: The run has the finished flag.
        cancelled: The run has the cancelled flag.
        serves: The run is an engine pool, and a server has registered.
        alive: A pod is alive.
        waits: All rollouts are stored, and a trainer may add more.
        submitted: The run has Slurm jobs.
        queued: Slurm still has a job of the run. ``None`` if unknown.
        started: A pod has started, or has failed to start.
    """
    if finished:
        return "finished"
    if cancelled:
        return "cancelled"
    if serves and queued is not False:
        return "serving"
    if alive:
        return "waiting" if waits else "running"
    if queued:
        return "queued"
    if queued is None and submitted:
        return "unknown"
    return "stopped" if started or submitted else "planned"


def lives(*, ended: bool, runs: bool | None, process: bool | None, silent_s: float) -> bool:
    """Returns whether a pod is alive.

    Args:
        ended: Whether the pod has written its final event.
        runs: Whether Slurm is running the pod's job. ``None`` if it has no job, or Slurm does not respond.
        process: Whether the pod's process exists. ``None`` for a Slurm job, or on another host.
        silent_s: Seconds since the pod's last sign of life. Used only if the other arguments do not decide.
    """
    if ended:
        return False
    if runs is not None:
        return runs
    return process if process is not None else silent_s < TIMES.lease_s


@dataclass
class PodView:
    """One start of a pod, as described by its events and its lease. A requeued pod starts again."""

    name: str
    state: str = "starting"
    node: str = ""
    job_id: str = ""
    running: int = 0
    stored: int = 0
    workers: int = 0
    slots: int = 0
    seen_at: float = 0.0
    """Unix time of the pod's last event or lease update, on the pod's clock."""
    tokens_per_s: float = 0.0
    why: str = ""
    excluded: dict[str, str] = field(default_factory=dict)
    """Maps each node that is excluded from new work to the reason."""
    queued: int = 0
    """Number of rollouts that the pod has claimed but not started."""
    busy_at: float = 0.0
    """Unix time at which the pod last started or ended a rollout, on the pod's clock."""
    grown_at: float = 0.0
    """Monotonic time at which this process last saw the pod's event file grow."""
    live: dict[int, int] = field(default_factory=dict, repr=False)
    """Maps the rank of each live worker to its number of slots."""
    begun: set[str] = field(default_factory=set, repr=False)
    """Ids of running rollouts, according to the events."""

    @property
    def pod(self) -> str:
        """Name of the pod without the number of its start."""
        return self.name.rpartition(".")[0]

    @property
    def start(self) -> int:
        return start_number(self.name.rpartition(".")[2])

    @property
    def active(self) -> bool:
        """True if the pod has started but not ended."""
        return self.state in ("started", "draining")

    def adopt(self, summary: Summary) -> None:
        """Adds the pod's summary, which replaces the pod's earliest events."""
        for event in summary.events:
            if not isinstance(event, AttemptEvent) or event.id in self.begun:  # the summary counts other attempts
                self.apply(event)
        self.stored = max(self.stored, summary.stored)
        self.grown_at = time.monotonic()
        self.seen_at, self.busy_at = summary.t, summary.busy_at

    def update(self, progress: Progress) -> None:
        """Updates the progress from the pod's lease, unless the pod's last event is newer."""
        if progress.t <= self.seen_at:
            return
        self.seen_at, self.grown_at = progress.t, time.monotonic()
        if self.active:
            self.running, self.stored = progress.running, max(self.stored, progress.stored)
            self.queued, self.tokens_per_s = progress.queued, progress.tokens_per_s

    def apply(self, event: AnyEvent) -> None:
        """Updates this view with the pod's next event."""
        self.seen_at, self.grown_at = event.t, time.monotonic()
        self.busy_at = busy_at(self.busy_at, event)
        match event:
            case PodEvent():
                self.state = event.state
                for name in ("job_id", "node", "why"):
                    value = getattr(event, name)
                    if value is not None:
                        setattr(self, name, value)
                self.stored = max(self.stored, event.stored or 0)
                if not self.active:
                    self.running = 0
                    self.begun.clear()
            case StartEvent(id=rollout):
                self.running += rollout not in self.begun
                self.begun.add(rollout)
            case AttemptEvent(id=rollout) | RolloutEvent(id=rollout):
                self.running = max(0, self.running - (rollout in self.begun))
                self.begun.discard(rollout)
                self.stored += isinstance(event, RolloutEvent)
            case WorkerEvent():
                if event.state == "ready":
                    self.live[event.rank] = event.slots or 0
                else:
                    self.live.pop(event.rank, None)
                if event.state == "excluded":
                    self.excluded[event.node or ""] = event.why or ""
                self.workers, self.slots = len(self.live), sum(self.live.values())
