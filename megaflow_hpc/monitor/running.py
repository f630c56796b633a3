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
    """Hears every event of a run, each pod's in their order."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, int], str] = {}
        """(pod, rank) → its node."""
        self._running: dict[str, dict[tuple[str, int], Place]] = {}
        """Rollout → (pod, rank) → what runs there: one, or two of a straggler."""
        self.last: dict[str, Place] = {}
        """Rollout → its last attempt."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """(cause, node) → attempts that failed there, those that were repeated included."""

    def apply(self, pod: str, event: AnyEvent) -> None:
        """Takes in one event of ``pod`` (``<pod>.<start>``)."""
        match event:
            case StartEvent(id=rollout, rank=rank):
                place = Place(rollout, pod, rank, self._nodes.get((pod, rank), ""), event.attempt, event.t)
                others = self._running.get(rollout, {})
                # Another pod, or another start of this one, has it now: the one before is gone.
                kept = {key: other for key, other in others.items() if key[0] == pod}
                self._running[rollout] = {**kept, (pod, rank): place}
                self.last[rollout] = place
            case RolloutEvent(id=rollout):
                self._running.pop(rollout, None)
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
