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
    found = Events()
    for name, events in EventReader(run.events).read():
        pod = PodHistory(name)
        live: dict[int, tuple[float, int]] = {}
        for event in events:
            pod.started_at = pod.started_at or event.t
            pod.last_at = max(pod.last_at, event.t)
            match event:
                case PodEvent():
                    pod.state, pod.why = event.state, event.why or pod.why
                    pod.node, pod.job = event.node or pod.node, event.job_id or pod.job
                case WorkerEvent():
                    _end(pod, live.pop(event.rank, None), event.t)
                    if event.state == "ready":
                        live[event.rank] = event.t, event.slots or 0
                    pod.slots = max(pod.slots, sum(slots for _, slots in live.values()))
                case AttemptEvent():
                    found.repeated[event.kind] += 1
                    found.repeated_on[name] += 1
                case RolloutEvent():
                    found.pod_of[event.id] = name
                    pod.stored += 1
        for began in live.values():
            _end(pod, began, pod.last_at)
        if pod.started_at:
            found.pods.append(pod)
    _mark_gone(run, found.pods)
    return found


def _mark_gone(run: RunDir, pods: Sequence[PodHistory]) -> None:
    """Marks killed pods as gone. A pod was killed if another pod found its lease expired, if its element has started
    again since, or if the campaign is over without its last event."""
    with suppress(OSError):
        gone = Ledger(run).gone()
        last: dict[str, float] = {}
        for pod in pods:
            last[pod.element] = max(last.get(pod.element, 0.0), pod.started_at)
        over = Marks(run).finished
        for pod in pods:
            if pod.state in ALIVE and (over or pod.name in gone or pod.started_at < last[pod.element]):
                pod.state = "gone"


def _end(pod: PodHistory, began: tuple[float, int] | None, t: float) -> None:
    if began and began[1]:
        pod.slot_spans.append(((began[0], t), began[1]))
