"""Finds causes of failed rollouts: the first rollout of each cause, with its error and its pod's log. Also finds tasks
whose verifier never gave a reward."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.rundir.events import EventReader, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import pod_log
from megaflow_hpc.rundir.pods.running import AttemptPlace
from megaflow_hpc.types import VERIFIED, without_round


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


def causes(run: RunDir, rollouts: Iterable[RolloutEvent], places: Mapping[str, AttemptPlace]) -> list[Cause]:
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
        error = first.error or (_error(run.events, place.pod, first.id, first.t) if place else "")
        listed.append(Cause(kind, len(events), first.id, error, str(log or "")))
    return listed


def broken_verifiers(rollouts: Iterable[RolloutEvent]) -> list[str]:
    """Returns a warning for each task whose verifier failed for every verified rollout.

    Such rollouts have reward 0. If all rollouts of a task have, the verifier is more likely to blame than the agents.

    Args:
        rollouts: all stored rollouts.
    """
    found: dict[str, list[RolloutEvent]] = {}
    for event in rollouts:
        if event.status in VERIFIED:
            task, _ = without_round(event.id.rsplit("/", 2)[0])
            found.setdefault(task, []).append(event)
    return [
        f"task {task}: its verifier failed for all its rollouts ({len(events)}), which have reward 0; see that its "
        f"solution gets 1 (megaflow-hpc tasks validate); the first: {events[0].id}: {events[0].error}"
        for task, events in found.items()
        if all(event.kind == "verifier" for event in events)
    ]


@functools.lru_cache(256)
def _error(events: Path, pod: str, rollout: str, t: float) -> str:
    """Looks up an error that a summary of the pod's events has left out; once, since all of them are read for it."""
    reader: EventReader[RolloutEvent] = EventReader(events, "rollout", rollout)
    told = (event for _, found in reader.read([pod]) for event in found if isinstance(event, RolloutEvent))
    return next((event.error for event in told if event.t == t), "")
