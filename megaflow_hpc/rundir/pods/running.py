"""Tracks running rollouts, where they run, and their failed attempts. The input is pod events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from megaflow_hpc.rundir.events import AnyEvent, AttemptEvent, PodEvent, RolloutEvent, StartEvent, WorkerEvent
from megaflow_hpc.rundir.marks import LAST_WORDS
from megaflow_hpc.rundir.summaries import Summary


class AttemptPlace(msgspec.Struct, frozen=True, gc=False):
    """Where and when an attempt runs or ran."""

    id: str
    """Id of the rollout."""
    pod: str
    """Start of the pod, ``<pod>.<start>``."""
    rank: int
    node: str
    attempt: int
    began_at: float
    """Start time, as a Unix timestamp in seconds by the pod's clock."""


class RunningRollouts:
    """Tracks a run's rollouts. Each pod's events must arrive in order. Events of different pods may interleave."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[int, str]] = {}
        """Node name by pod and rank."""
        self._running: dict[str, AttemptPlace] = {}
        """Current attempt of each running rollout, by rollout id."""
        self._stored_at: dict[str, float] = {}
        """Time at which each rollout's latest outcome was stored, by rollout id."""
        self._begun: dict[str, dict[str, AttemptPlace]] = {}
        """Last attempt by pod and rollout id. Contains only rollouts without an outcome from that pod."""
        self.last: dict[str, AttemptPlace] = {}
        """Last attempt of each rollout, by rollout id."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """Number of failed attempts by (cause, node), including retried ones."""
        self.retries: Counter[str] = Counter()
        """Number of retried attempts by cause."""

    def apply(self, pod: str, event: AnyEvent) -> None:
        """Applies one event of ``pod`` (``<pod>.<start>``)."""
        match event:
            case StartEvent():
                self._start(pod, event)
            case RolloutEvent(id=rollout):
                self._note_stored(rollout, event.t)
                if event.status == "failed":
                    self._failed(pod, rollout, event.kind)
                self._begun.get(pod, {}).pop(rollout, None)
            case AttemptEvent(id=rollout):
                if event.kind != "cancelled":  # the user's decision is not a failure
                    self.retries[event.kind] += 1
                self._failed(pod, rollout, event.kind, event.rank)
                attempt = self._running.get(rollout)
                if attempt is not None and attempt.pod == pod and event.rank in (None, attempt.rank):
                    del self._running[rollout]
            case WorkerEvent(state="ready"):
                self._nodes.setdefault(pod, {})[event.rank] = event.node or ""
            case WorkerEvent(state="lost"):
                self._end(pod, event.rank)
            case PodEvent() if event.state in LAST_WORDS:
                self._end(pod)

    def forget(self, rollout: str) -> None:
        """Drops a rollout that has finished and will have no further events."""
        for kept in (self._running, self._stored_at, self.last):
            kept.pop(rollout, None)

    @property
    def ids(self) -> Iterable[str]:
        """Ids of rollouts that are running, or were running when their pod vanished."""
        return list(self._running)

    def adopt(self, pod: str, summary: Summary) -> None:
        """Applies a summary of a pod's earlier events or earlier starts."""
        counted = self.failures, self.retries
        self.failures, self.retries = Counter(), Counter()
        for event in summary.events:
            self.apply(pod, event)
        self.failures, self.retries = counted  # the summary's own counts include its events
        self.retries.update(summary.retries)
        for cause, nodes in summary.failures.items():
            self.failures.update({(cause, node): count for node, count in nodes.items()})
        for ended in summary.ended_badly:
            self._note_stored(ended.id, ended.t)
            if ended.began is not None:
                rank, attempt, began_at = ended.began
                start = f"{pod.rpartition('.')[0]}.{ended.start}" if ended.start else pod
                node = ended.node or self._nodes.get(pod, {}).get(rank, "")
                place = AttemptPlace(ended.id, start, rank, node, attempt, began_at)
                before = self.last.get(ended.id)
                if before is None or before.began_at <= began_at:
                    self.last[ended.id] = place

    def drop(self, pod: str) -> None:
        """Drops an ended pod start that will have no further events. Its counts are kept."""
        self._end(pod)
        self._nodes.pop(pod, None)
        for rollout in self._begun.pop(pod, {}):
            attempt = self.last.get(rollout)
            if attempt is not None and attempt.pod == pod and rollout not in self._stored_at:
                del self.last[rollout]

    def _note_stored(self, rollout: str, at: float) -> None:
        self._stored_at[rollout] = max(at, self._stored_at.get(rollout, 0.0))
        attempt = self._running.get(rollout)
        if attempt is not None and attempt.began_at <= at:  # a failed rollout may have been started again
            del self._running[rollout]

    def _start(self, pod: str, event: StartEvent) -> None:
        """Records a started attempt, unless a later attempt in another pod has already been recorded."""
        node = self._nodes.get(pod, {}).get(event.rank, "")
        attempt = AttemptPlace(event.id, pod, event.rank, node, event.attempt, event.t)
        self._begun.setdefault(pod, {})[event.id] = attempt
        before = self.last.get(event.id)
        if before is not None and before.pod != pod and before.began_at > event.t:
            return
        self.last[event.id] = attempt
        if event.t >= self._stored_at.get(event.id, 0.0):
            self._running[event.id] = attempt

    def _failed(self, pod: str, rollout: str, cause: str, rank: int | None = None) -> None:
        attempt = self._begun.get(pod, {}).get(rollout)
        self.failures[cause, attempt.node if attempt is not None and rank in (None, attempt.rank) else ""] += 1

    def _end(self, pod: str, rank: int | None = None) -> None:
        ended = [key for key, attempt in self._running.items() if attempt.pod == pod and rank in (None, attempt.rank)]
        for rollout in ended:
            del self._running[rollout]

    def longest(self, pods: Collection[str]) -> list[AttemptPlace]:
        """Returns the attempts that are running in the given pods, longest-running first."""
        places = [attempt for attempt in self._running.values() if attempt.pod in pods]
        return sorted(places, key=lambda attempt: attempt.began_at)

    def by_cause(self) -> dict[str, dict[str, int]]:
        """Returns the number of failed attempts by cause and node, most frequent first."""
        causes: dict[str, dict[str, int]] = {}
        for (cause, node), count in self.failures.most_common():
            causes.setdefault(cause, {})[node] = count
        return causes
