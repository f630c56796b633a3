"""The progress of a start of a pod, from its lease and its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from megaflow_hpc.rundir.events import Count, Number, PodEvent, RolloutEvent, Time
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import last_events

RECENT_EVENTS = 200
"""Number of latest events to read of a start that has not ended."""


class Progress(NamedTuple):
    """Progress of a pod, as published in its lease."""

    t: Time
    """Unix seconds, by the pod's clock."""
    running: Count
    queued: Count
    stored: Count
    tokens: Count = 0
    """Number of tokens that engines have sampled for the pod."""
    tokens_per_s: Number = 0.0


def progress_of(lease: Mapping[str, object]) -> Progress | None:
    """Returns the progress published in a pod's lease, or ``None``."""
    try:
        content = {**Progress._field_defaults, **lease}
        return msgspec.convert([content[name] for name in Progress._fields], Progress)
    except (KeyError, ValueError):
        return None


def stored_by(run: RunDir, pod: str, lease: Mapping[str, Any]) -> int:
    """Returns the number of rollouts that a pod start (``<pod>.<start>``) has stored.

    Its last events are newer than its last lease renewal, for instance if it was killed or its run was moved.
    """
    progress = progress_of(lease)
    events, all_of_them = last_events(run, pod, 1 if lease.get("ended") else RECENT_EVENTS)
    said = max((event.stored or 0 for event in events if isinstance(event, PodEvent)), default=0)
    counted, since = (0, 0.0) if all_of_them or not progress else (progress.stored, progress.t)
    counted += len({event.id for event in events if isinstance(event, RolloutEvent) and event.t > since})
    return max(progress.stored if progress else 0, counted, said)
