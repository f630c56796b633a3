"""Which rollouts run, since when and where, and where attempts failed: what pods' events tell of single rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from megaflow_hpc.rundir.events import AnyEvent, AttemptEvent, PodEvent, RolloutEvent, StartEvent, WorkerEvent
from megaflow_hpc.rundir.pods.summary import Summary

ENDED = ("done", "drained", "paused", "lost")


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where one attempt runs, or ran."""

    id: str
    """Of the rollout."""
    pod: str
    """``<pod>.<start>``."""
    rank: int
    node: str
    attempt: int
    began_at: float
    """Seconds UTC, by the pod's clock."""


class RunningRollouts:
    """Hears every event of a run: each pod's in their order, and pods in any."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, int], str] = {}
        """(pod, rank) → its node."""
        self._running: dict[str, Place] = {}
        """Rollout → where it runs."""
        self._stored_at: dict[str, float] = {}
        """Rollout → when its last outcome was stored."""
        self._begun: dict[str, dict[str, Place]] = {}
        """Pod → rollout that it has not stored → its last attempt there."""
        self.last: dict[str, Place] = {}
        """Rollout → its last attempt."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """(cause, node) → attempts that failed there, those that were repeated included."""
        self.retries: Counter[str] = Counter()
        """Cause → attempts that were repeated."""

    def apply(self, pod: str, event: AnyEvent) -> None:
        """Takes in one event of ``pod`` (``<pod>.<start>``)."""
        match event:
            case StartEvent():
                self._start(pod, event)
            case RolloutEvent(id=rollout):
                self._note_stored(rollout, event.t)
                if event.status == "failed":
                    self._failed(pod, rollout, event.kind)
                self._begun.get(pod, {}).pop(rollout, None)
            case AttemptEvent(id=rollout):
                if event.kind != "cancelled":  # its user's decision, not a fault
                    self.retries[event.kind] += 1
                self._failed(pod, rollout, event.kind, event.rank)
                place = self._running.get(rollout)
                if place is not None and place.pod == pod and event.rank in (None, place.rank):
                    del self._running[rollout]
            case WorkerEvent(state="ready"):
                self._nodes[pod, event.rank] = event.node or ""
            case WorkerEvent(state="lost"):
                self._end(pod, event.rank)
            case PodEvent() if event.state in ENDED:
                self._end(pod)

    def forget(self, rollout: str) -> None:
        """Keeps nothing of a rollout that has ended for good and that no event will speak of any more."""
        for kept in (self._running, self._stored_at, self.last):
            kept.pop(rollout, None)

    @property
    def ids(self) -> Iterable[str]:
        """The rollouts that run anywhere, or did in pods that have not said what became of them."""
        return list(self._running)

    def adopt(self, pod: str, summary: Summary) -> None:
        """Takes in what the first events of a pod amount to."""
        counted = self.failures, self.retries
        self.failures, self.retries = Counter(), Counter()
        for event in summary.events:
            self.apply(pod, event)
        self.failures, self.retries = counted  # the summary's count those of the events that it keeps
        self.retries.update(summary.retries)
        for cause, nodes in summary.failures.items():
            self.failures.update({(cause, node): count for node, count in nodes.items()})
        for ended in summary.ended_badly:
            self._note_stored(ended.id, ended.t)
            if ended.began is not None:
                rank, attempt, began_at = ended.began
                place = Place(ended.id, pod, rank, self._nodes.get((pod, rank), ""), attempt, began_at)
                before = self.last.get(ended.id)
                if before is None or before.began_at <= began_at:
                    self.last[ended.id] = place

    def _note_stored(self, rollout: str, at: float) -> None:
        self._stored_at[rollout] = max(at, self._stored_at.get(rollout, 0.0))
        place = self._running.get(rollout)
        if place is not None and place.began_at <= at:  # one that failed may have started again since
            del self._running[rollout]

    def _start(self, pod: str, event: StartEvent) -> None:
        """Another pod, or another start of this one, may have had it before, and its file may be read later."""
        node = self._nodes.get((pod, event.rank), "")
        place = Place(event.id, pod, event.rank, node, event.attempt, event.t)
        self._begun.setdefault(pod, {})[event.id] = place
        before = self.last.get(event.id)
        if before is not None and before.pod != pod and before.began_at > event.t:
            return
        self.last[event.id] = place
        if event.t >= self._stored_at.get(event.id, 0.0):
            self._running[event.id] = place

    def _failed(self, pod: str, rollout: str, cause: str, rank: int | None = None) -> None:
        place = self._begun.get(pod, {}).get(rollout)
        self.failures[cause, place.node if place is not None and rank in (None, place.rank) else ""] += 1

    def _end(self, pod: str, rank: int | None = None) -> None:
        ended = [key for key, place in self._running.items() if place.pod == pod and rank in (None, place.rank)]
        for rollout in ended:
            del self._running[rollout]

    def longest(self, pods: Collection[str]) -> list[Place]:
        """Returns what runs in these pods, that which began first at the beginning."""
        places = [place for place in self._running.values() if place.pod in pods]
        return sorted(places, key=lambda place: place.began_at)

    def by_cause(self) -> dict[str, dict[str, int]]:
        """Returns cause → node → failed attempts, the most frequent first."""
        found: dict[str, dict[str, int]] = {}
        for (cause, node), count in self.failures.most_common():
            found.setdefault(cause, {})[node] = count
        return found
