"""Reads from the event files of a run when each pod started and ended, its slots, and which attempts were repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.report.series import Span
from megaflow_hpc.rundir.events import AttemptEvent, EventReader, PodEvent, RolloutEvent, WorkerEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks

ALIVE = ("started", "draining")
"""States of a pod before its last event."""


@dataclass
class PodHistory:
    """One start of one pod. Times are seconds UTC by its node's clock."""

    name: str
    node: str = ""
    job: str = ""
    state: str = "started"
    """State in its last event; ``gone`` if it was killed."""
    why: str = ""
    started_at: float = 0.0
    last_at: float = 0.0
    """Time of its last event, which is its end if it has ended."""
    slots: int = 0
    """Maximum number of slots at once."""
    slot_spans: list[tuple[Span, int]] = field(default_factory=list)
    """Spans of time, each with the slots that a worker had in it."""
    stored: int = 0

    @property
    def element(self) -> str:
        """The element of the array, which has several starts if it was requeued."""
        return self.name.rpartition(".")[0]


@dataclass
class Events:
    """Contents of all event files of a run."""

    pods: list[PodHistory] = field(default_factory=list)
    pod_of: dict[str, str] = field(default_factory=dict)
    """The pod that stored each rollout, by rollout id."""
    repeated: Counter[str] = field(default_factory=Counter)
    """Failed attempts that were repeated, by cause."""
    repeated_on: Counter[str] = field(default_factory=Counter)
    """Failed attempts that were repeated, by pod."""


def read_events(run: RunDir) -> Events:
    """Reads every event file of a run. Unreadable files and lines are skipped."""
    all_events = Events()
    for name, events in EventReader(run.events).read():
        pod = PodHistory(name)
        workers: dict[int, tuple[float, int]] = {}
        """Rank → the time since when it is ready, and its slots."""
        for event in events:
            pod.started_at = pod.started_at or event.t
            pod.last_at = max(pod.last_at, event.t)
            match event:
                case PodEvent():
                    pod.state = event.state
                    pod.why = event.why or pod.why
                    pod.node = event.node or pod.node
                    pod.job = event.job_id or pod.job
                case WorkerEvent():
                    if event.rank in workers:
                        _add_span(pod, workers.pop(event.rank), event.t)
                    if event.state == "ready":
                        workers[event.rank] = event.t, event.slots or 0
                    pod.slots = max(pod.slots, sum(slots for _, slots in workers.values()))
                case AttemptEvent():
                    all_events.repeated[event.kind] += 1
                    all_events.repeated_on[name] += 1
                case RolloutEvent():
                    all_events.pod_of[event.id] = name
                    pod.stored += 1
        for worker in workers.values():
            _add_span(pod, worker, pod.last_at)
        if pod.started_at:
            all_events.pods.append(pod)
    _mark_gone(run, all_events.pods)
    return all_events


def _mark_gone(run: RunDir, pods: Sequence[PodHistory]) -> None:
    """Marks killed pods as gone.

    A pod without a last event was killed if another pod found its lease expired, if its element has started again, or
    if the campaign has finished.
    """
    with suppress(OSError):
        gone = Ledger(run).gone()
        last_start: dict[str, float] = {}
        for pod in pods:
            last_start[pod.element] = max(last_start.get(pod.element, 0.0), pod.started_at)
        has_finished = Marks(run).finished
        for pod in pods:
            is_over = has_finished or pod.name in gone or pod.started_at < last_start[pod.element]
            if pod.state in ALIVE and is_over:
                pod.state = "gone"


def _add_span(pod: PodHistory, worker: tuple[float, int], end: float) -> None:
    start, slots = worker
    if slots:
        pod.slot_spans.append(((start, end), slots))
