"""One start of one pod, as its events and its lease tell of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megaflow_hpc.ledger.report import Progress
from megaflow_hpc.rundir.events import AnyEvent, PodEvent, WorkerEvent
from megaflow_hpc.rundir.pods.summary import Summary, busy_at


@dataclass
class PodView:
    """One start of one pod as its events tell."""

    name: str
    state: str = "starting"
    node: str = ""
    job_id: str = ""
    running: int = 0
    stored: int = 0
    workers: int = 0
    slots: int = 0
    seen_at: float = 0.0
    tokens_per_s: float = 0.0
    why: str = ""
    excluded: dict[str, str] = field(default_factory=dict)
    """Nodes that get no more work, and why."""
    queued: int = 0
    """Rollouts that it has claimed and not started."""
    busy_at: float = 0.0
    """When it last started a rollout or ended one, by its own clock; seconds UTC."""
    grown_at: float = 0.0
    """When we last saw its file grow, by our own clock; a node's own may be off."""
    live: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def active(self) -> bool:
        """Whether the pod has started and not ended."""
        return self.state in ("started", "draining")

    def adopt(self, told: Summary) -> None:
        """Takes in what its first events amount to."""
        for event in told.events:
            if isinstance(event, (PodEvent, WorkerEvent)):  # of single rollouts it has summed up itself
                self.apply(event)
        self.grown_at = time.monotonic()
        self.seen_at, self.busy_at = told.t, told.busy_at

    def hear(self, progress: Progress) -> None:
        """Takes in how far it is by its lease, which may be older than its last event."""
        if progress.t <= self.seen_at:
            return
        self.seen_at, self.grown_at = progress.t, time.monotonic()
        if self.active:
            self.running, self.stored = progress.running, max(self.stored, progress.stored)
            self.queued, self.tokens_per_s = progress.queued, progress.tokens_per_s

    def apply(self, event: AnyEvent) -> None:
        """Takes in its next event."""
        self.seen_at, self.grown_at = event.t, time.monotonic()
        self.busy_at = busy_at(self.busy_at, event)
        match event:
            case PodEvent():
                self.state = event.state
                self.job_id = self.job_id if event.job_id is None else event.job_id
                self.node = self.node if event.node is None else event.node
                self.why = self.why if event.why is None else event.why
                self.stored = self.stored if event.stored is None else event.stored
                if not self.active:
                    self.running = 0
            case WorkerEvent():
                if event.state == "ready":
                    self.live[event.rank] = event.slots or 0
                else:
                    self.live.pop(event.rank, None)
                if event.state == "excluded":
                    self.excluded[event.node or ""] = event.why or ""
                self.workers, self.slots = len(self.live), sum(self.live.values())
