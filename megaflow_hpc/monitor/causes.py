"""What made rollouts fail: of each cause the first one, with its error and the log of the pod that it ran in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megaflow_hpc.rundir.events import EventReader, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import pod_log
from megaflow_hpc.rundir.pods.running import Place


@dataclass
class Cause:
    """One cause of failures."""

    kind: str
    count: int
    """Rollouts that failed of it."""
    id: str
    """The rollout that did first."""
    error: str
    log: str
    """Empty where it cannot be told, or is gone."""


def causes(run: RunDir, rollouts: Iterable[RolloutEvent], places: Mapping[str, Place]) -> list[Cause]:
    """Returns the causes of failures, the most frequent first.

    Args:
        rollouts: those that are stored.
        places: where each ran last, as far as events tell.
    """
    found: dict[str, list[RolloutEvent]] = {}
    for event in rollouts:
        if event.status == "failed":
            found.setdefault(event.kind, []).append(event)
    listed = []
    for kind, events in sorted(found.items(), key=lambda item: -len(item[1])):
        first = min(events, key=lambda event: event.t)
        place = places.get(first.id)
        log = pod_log(run, place.pod) if place else None
        error = first.error or (_error(run, first, place.pod) if place else "")
        listed.append(Cause(kind, len(events), first.id, error, str(log or "")))
    return listed


def _error(run: RunDir, failed: RolloutEvent, pod: str) -> str:
    """Looks up an error that a summary of the pod's events has left out."""
    reader: EventReader[RolloutEvent] = EventReader(run.events, "rollout", failed.id)
    told = (event for _, events in reader.read([pod]) for event in events if isinstance(event, RolloutEvent))
    return next((event.error for event in told if event.t == failed.t), "")
