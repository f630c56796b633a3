"""Computes timelines of a run: pods, running and waiting rollouts, slots, and the lane of each rollout.

If the events of a pod's earlier starts were condensed, these starts form a single entry. Its slot counts are means over
periods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.report.rollouts import RolloutColumns
from megaflow_hpc.report.series import CURVE_POINTS, Floats, Span, lanes, mean_level, peak_level, significant, thinned
from megaflow_hpc.rundir.budget import Used, total_use
from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import AttemptEvent, PodEvent, RolloutEvent, WorkerEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.summaries import Condensed

MAX_BARS = 2500
"""Maximum number of rollouts in a timeline."""
LONGEST_BARS = 100
"""Number of the longest rollouts that a timeline always shows."""
MAX_POD_ROWS = 64
"""Maximum number of pods in a timeline. The pods with the most rollouts are shown."""
ALIVE = ("started", "draining")
"""States of a pod that has not ended."""


@dataclass
class PodHistory:
    """A start of a pod, or its condensed earlier starts. Times are Unix seconds on the clock of the pod's node."""

    name: str
    node: str = ""
    job: str = ""
    state: str = "started"
    """State after the last event. ``gone`` if the pod was killed."""
    why: str = ""
    started_at: float = 0.0
    last_at: float = 0.0
    """Time of the last event, which is the end of the pod if it has ended."""
    slots: int = 0
    """Maximum number of concurrent slots."""
    slot_spans: list[tuple[Span, float]] = field(default_factory=list)
    """Time spans with their numbers of slots: one span per worker, or one per period of condensed starts."""
    stored: int = 0

    @property
    def element(self) -> str:
        """Array element of the pod. If Slurm requeued the element, several pod starts have the same one."""
        return self.name.rpartition(".")[0]


@dataclass
class Events:
    """Contents of all event files of a run."""

    pods: list[PodHistory] = field(default_factory=list)
    pod_of: dict[str, str] = field(default_factory=dict)
    """Pod that stored each rollout, by rollout id."""
    repeated: Counter[str] = field(default_factory=Counter)
    """Number of failed attempts that were retried, by cause."""
    repeated_on: Counter[str] = field(default_factory=Counter)
    """Number of failed attempts that were retried, by pod."""
    models: Used = field(default_factory=dict)
    """Usage of judges, external endpoints and priced models in stored rollouts, by name."""


def read_events(run: RunDir) -> Events:
    """Reads all event files of a run. Skips unreadable files and lines."""
    all_events = Events()

    def restart() -> None:
        nonlocal all_events
        all_events = Events()

    for name, events in EventReader(run.events, restart=restart).read():
        if events and isinstance(events[0], Condensed):
            _add_condensed(all_events, name, events[0])
            continue
        pod = PodHistory(name)
        workers: dict[int, tuple[float, int]] = {}
        """Time at which each worker became ready and its number of slots, by rank."""
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
                    all_events.models = total_use([all_events.models, event.models])
        for worker in workers.values():
            _add_span(pod, worker, pod.last_at)
        if pod.started_at:
            all_events.pods.append(pod)
    _mark_gone(run, all_events.pods)
    return all_events


def _add_condensed(all_events: Events, name: str, condensed: Condensed) -> None:
    """Adds an entry for the condensed starts of a pod. ``name`` is the last of these starts."""
    all_events.models = total_use([all_events.models, condensed.models])
    all_events.repeated.update(condensed.retries)
    all_events.repeated_on[name] += sum(condensed.retries.values())
    spans = [((begin, end), slots) for begin, end, slots in condensed.slots if begin < end]
    if spans:
        all_events.pods.append(
            PodHistory(
                name,
                state="condensed",
                why=f"{condensed.starts} starts",
                started_at=spans[0][0][0],
                last_at=spans[-1][0][1],
                slots=round(max(slots for _, slots in spans)),
                slot_spans=spans,
                stored=condensed.stored,
            )
        )


def _mark_gone(run: RunDir, pods: Sequence[PodHistory]) -> None:
    """Marks killed pods as gone.

    A pod without a final event counts as killed if another pod removed its lease or declared it expired, if its array
    element has started again, or if the campaign has finished.
    """
    with suppress(OSError):
        gone, leases = Ledger(run).gone(), Ledger(run).leases()
        last_start: dict[str, float] = {}
        for pod in pods:
            last_start[pod.element] = max(last_start.get(pod.element, 0.0), pod.started_at)
        has_finished = Marks(run).finished
        for pod in pods:
            removed = bool(leases) and pod.name not in leases
            is_over = has_finished or pod.name in gone or removed or pod.started_at < last_start[pod.element]
            if pod.state in ALIVE and is_over:
                pod.state = "gone"


def _add_span(pod: PodHistory, worker: tuple[float, int], end: float) -> None:
    start, slots = worker
    if slots:
        pod.slot_spans.append(((start, end), slots))


class Concurrency(msgspec.Struct, kw_only=True):
    """Concurrency over time, as means over equal intervals."""

    at: list[float] = []
    """Midpoint of each interval, in seconds since the first rollout started."""
    running: list[float] = []
    waiting: list[float] = []
    """Number of rollouts that had not started. Empty if the campaign adds rollouts while it runs."""
    slots: list[float] = []
    """Number of slots of all workers. Empty if there are no events."""
    ended: list[float] = []
    """Number of rollouts per hour that ended in each interval."""
    peak: int = 0
    slot_use: float | None = None
    """Fraction of slot time during which a rollout was running. ``None`` if unknown."""


class PodFigures(msgspec.Struct, kw_only=True):
    """Figures of one start of a pod. If there are no events, figures of a node."""

    pod: str
    node: str
    state: str
    why: str
    start: float
    """Seconds since the first rollout started."""
    end: float
    slots: int
    rollouts: int
    repeated: int


class Bar(msgspec.Struct, kw_only=True):
    """A rollout in a timeline."""

    rollout: str
    pod: str
    lane: int
    start: float
    """Seconds since the first rollout started."""
    end: float
    outcome: str


def concurrency_of(rows: RolloutColumns, events: Events, total: int, grows: bool) -> Concurrency:
    """Computes the concurrency over time.

    Args:
        total: Number of rollouts in the campaign.
        grows: Whether the campaign adds rollouts while it runs, so that the number of waiting rollouts is unknown.
    """
    if not len(rows):
        return Concurrency()
    began, ended = float(rows.started_at.min()), float(rows.finished_at.max())
    edges = np.linspace(began, max(ended, began + 1e-3), CURVE_POINTS + 1)
    running = mean_level(rows.started_at, rows.finished_at, edges)
    # Each rollout waits from the beginning until it starts. Rollouts not stored yet are counted as waiting.
    waiting = mean_level(np.full(len(rows), began), rows.started_at, edges) + (total - len(rows))
    spans = [span for pod in events.pods for span in pod.slot_spans]
    slots = _slots(spans, edges) if spans else np.zeros(0)
    slot_total = float(slots.sum())
    counts, _ = np.histogram(rows.finished_at, edges)
    stretch_s = edges[1] - edges[0]
    return Concurrency(
        at=_list((edges[1:] + edges[:-1]) / 2 - began),
        running=_list(running),
        waiting=[] if grows else _list(waiting),
        slots=_list(slots),
        ended=_list(counts / stretch_s * 3600),
        peak=peak_level(rows.started_at, rows.finished_at),
        slot_use=significant(min(1.0, float(running.sum()) / slot_total)) if slot_total else None,
    )


def _slots(spans: list[tuple[Span, float]], edges: Floats) -> Floats:
    starts = np.array([start for (start, _), _ in spans])
    ends = np.array([end for (_, end), _ in spans])
    return mean_level(starts, ends, edges, np.array([slots for _, slots in spans], np.float64))


def pods_of(rows: RolloutColumns, events: Events) -> list[PodFigures]:
    """Returns the pods, ordered by start. If there are no events, returns the nodes of the rollouts."""
    pods = sorted(events.pods, key=lambda pod: (pod.started_at, pod.name))
    if not pods:
        for code, name in enumerate(rows.node.names):
            own = rows.node.codes == code
            start, end = float(rows.started_at[own].min()), float(rows.finished_at[own].max())
            node = PodHistory(name or "unknown", name, state="", started_at=start, last_at=end, stored=int(own.sum()))
            pods.append(node)
    began = float(rows.started_at.min()) if len(rows) else min((pod.started_at for pod in pods), default=0.0)
    return [
        PodFigures(
            pod=pod.name,
            node=pod.node,
            state=pod.state,
            why=pod.why,
            start=significant(pod.started_at - began),
            end=significant(pod.last_at - began),
            slots=pod.slots,
            rollouts=pod.stored,
            repeated=events.repeated_on[pod.name],
        )
        for pod in pods
    ]


def pod_of(rows: RolloutColumns, events: Events, row: int) -> str:
    """Returns the pod that ran a rollout, or its node if the events do not name the pod."""
    return events.pod_of.get(rows.ids[row]) or rows.node.of(row) or "unknown"


def bars_of(rows: RolloutColumns, events: Events, threshold: float) -> list[Bar]:
    """Returns timeline bars for the pods with the most rollouts.

    If there are too many rollouts, returns an evenly spaced sample and the longest rollouts.
    """
    if not len(rows):
        return []
    order = np.argsort(rows.started_at, kind="stable").tolist()
    pods = {row: pod_of(rows, events, row) for row in order}
    shown = {pod for pod, _ in Counter(pods.values()).most_common(MAX_POD_ROWS)}
    candidates = [row for row in order if pods[row] in shown]
    chosen = {candidates[index] for index in thinned(len(candidates), MAX_BARS).tolist()}
    if len(candidates) > MAX_BARS:
        chosen.update(sorted(candidates, key=lambda row: -rows.seconds[row])[:LONGEST_BARS])
    by_pod: dict[str, list[int]] = {}
    for row in candidates:
        if row in chosen:
            by_pod.setdefault(pods[row], []).append(row)
    began = float(rows.started_at.min())
    bars = []
    for pod, own in sorted(by_pod.items()):
        spans = [(float(rows.started_at[row]), float(rows.finished_at[row])) for row in own]
        for row, lane, (start, end) in zip(own, lanes(spans), spans, strict=True):
            bars.append(
                Bar(
                    rollout=rows.ids[row],
                    pod=pod,
                    lane=lane,
                    start=significant(start - began),
                    end=significant(end - began),
                    outcome=outcome_of(rows, row, threshold),
                )
            )
    return bars


def outcome_of(rows: RolloutColumns, row: int, threshold: float) -> str:
    """Returns ``passed`` or ``not passed`` for a rollout with a reward, otherwise the rollout's status."""
    reward = rows.reward[row]
    if np.isnan(reward):
        return rows.status.of(row)
    return "passed" if reward >= threshold else "not passed"


def _list(values: Floats) -> list[float]:
    return [significant(value) for value in values.tolist()]
