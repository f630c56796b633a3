"""Which rollouts run, since when and where, and where attempts failed: what pods' events tell of single rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from megaflow_hpc.rundir.events import AnyEvent, AttemptEvent, PodEvent, RolloutEvent, StartEvent, WorkerEvent

ENDED = ("done", "drained", "paused", "lost")


@dataclass(frozen=True, slots=True)
class Place:
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
        self._running: dict[str, dict[tuple[str, int], Place]] = {}
        """Rollout → (pod, rank) → what runs there: one, or two of a straggler."""
        self._stored_at: dict[str, float] = {}
        """Rollout → when its last outcome was stored."""
        self.last: dict[str, Place] = {}
        """Rollout → its last attempt."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """(cause, node) → attempts that failed there, those that were repeated included."""

    def apply(self, pod: str, event: AnyEvent) -> None:
        """Takes in one event of ``pod`` (``<pod>.<start>``)."""
        match event:
            case StartEvent():
                self._start(pod, event)
            case RolloutEvent(id=rollout):
                self._stored_at[rollout] = max(event.t, self._stored_at.get(rollout, 0.0))
                later = {k: p for k, p in self._running.pop(rollout, {}).items() if p.began_at > event.t}
                if later:  # what failed was begun anew
                    self._running[rollout] = later
                if event.status == "failed":
                    self._failed(rollout, event.kind)
            case AttemptEvent(id=rollout):
                self._failed(rollout, event.kind, event.rank)
                places = self._running.get(rollout, {})
                for key in [key for key in places if key[0] == pod and event.rank in (None, key[1])]:
                    del places[key]
            case WorkerEvent(state="ready"):
                self._nodes[pod, event.rank] = event.node or ""
            case WorkerEvent(state="lost"):
                self._end(pod, event.rank)
            case PodEvent() if event.state in ENDED:
                self._end(pod)

    def _start(self, pod: str, event: StartEvent) -> None:
        """Another pod, or another start of this one, may have had it before, and its file may be read later."""
        node = self._nodes.get((pod, event.rank), "")
        place = Place(event.id, pod, event.rank, node, event.attempt, event.t)
        before = self.last.get(event.id)
        if before is not None and before.pod != pod and before.began_at > event.t:
            return
        self.last[event.id] = place
        if event.t >= self._stored_at.get(event.id, 0.0):
            twins = {key: twin for key, twin in self._running.get(event.id, {}).items() if key[0] == pod}
            self._running[event.id] = {**twins, (pod, event.rank): place}

    def _failed(self, rollout: str, cause: str, rank: int | None = None) -> None:
        place = self.last.get(rollout)
        self.failures[cause, place.node if place is not None and rank in (None, place.rank) else ""] += 1

    def _end(self, pod: str, rank: int | None = None) -> None:
        for places in self._running.values():
            for key in [key for key in places if key[0] == pod and rank in (None, key[1])]:
                del places[key]

    def longest(self, pods: Collection[str]) -> list[Place]:
        """Returns what runs in these pods, that which began first at the beginning."""
        places = [place for found in self._running.values() for place in found.values() if place.pod in pods]
        return sorted(places, key=lambda place: place.began_at)

    def by_cause(self) -> dict[str, dict[str, int]]:
        """Returns cause → node → failed attempts, the most frequent first."""
        found: dict[str, dict[str, int]] = {}
        for (cause, node), count in self.failures.most_common():
            found.setdefault(cause, {})[node] = count
        return found
