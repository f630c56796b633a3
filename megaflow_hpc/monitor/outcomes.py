"""Outcomes of a run's rollouts: counts by status and policy, the listed rollouts, and the causes of failures.

A rollout that ended badly may run again in another pod and end well there, so those are kept by id. Of rollouts that
ended well (``completed``, ``truncated``) only counts are kept, however many there are. A rollout that ended well in two
pods, for example because a living pod's node was taken for lost, is counted twice. :meth:`Outcomes.by_status` never
returns more than were planned.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.monitor.evaluation import evaluate
from megaflow_hpc.rundir.events import EventReader, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import pod_log
from megaflow_hpc.rundir.pods.running import AttemptPlace
from megaflow_hpc.rundir.pods.summary import RECENT_S, Summary, WantedPods, policy_of
from megaflow_hpc.types import VERIFIED, without_round


class Outcomes:
    """Collects every stored rollout. Each pod's events must come in their order; the order of pods does not matter.

    Args:
        listed: number of latest rollouts that ended well to keep. ``None``: all.
    """

    def __init__(self, listed: int | None = 0) -> None:
        self.lists_all = listed is None
        self._kept: dict[str, RolloutEvent] = {}
        """Rollouts that ended badly, or all rollouts if all are listed."""
        self._latest: deque[RolloutEvent] = deque(maxlen=listed or 0)
        self._well: dict[str, Counter[str]] = {}
        """Policy → status → rollouts that ended well and are not in :attr:`_kept`."""
        self._inexact: Counter[str] = Counter()
        """Policy → inexact turns of these rollouts."""
        self._constrained: Counter[str] = Counter()
        self._recent: Counter[int] = Counter()
        """Second → rollouts that were stored then, for the last minutes."""
        self._ended: list[str] = []
        """Rollouts that ended well since :meth:`between_pods`."""
        self._digests: list[bytes] = []

    def apply(self, event: RolloutEvent) -> None:
        """Adds a stored rollout."""
        self._recent[int(event.t)] += 1
        if event.status not in VERIFIED or self.lists_all:
            self._keep(event)
            return
        policy = policy_of(event.id)
        self._well.setdefault(policy, Counter())[event.status] += 1
        self._inexact[policy] += event.inexact
        self._constrained[policy] += event.constrained
        self._latest.append(event)
        self._ended.append(event.id)

    def adopt(self, summary: Summary) -> None:
        """Adds the summary of a pod's first events."""
        for policy, statuses in summary.ended_well.items():
            self._well.setdefault(policy, Counter()).update(statuses)
        self._inexact.update(summary.inexact)
        self._constrained.update(summary.constrained)
        self._recent.update(summary.recent)
        self._digests.append(summary.digests)
        for ended in summary.ended_badly:
            self._keep(ended.to_event())

    def _keep(self, event: RolloutEvent) -> None:
        before = self._kept.get(event.id)
        # A later success replaces a failure (resume --failed). Otherwise the first stored result stays.
        if before is None or before.status not in VERIFIED:
            self._kept[event.id] = event

    def between_pods(self, running: Iterable[str]) -> list[str]:
        """Finds rollouts that ended well in one pod although another pod failed at them or seems to run them.

        Args:
            running: rollouts that some pod has started and not ended.

        Returns:
            The rollouts that ended well since the last call.
        """
        ended, self._ended = self._ended, []
        if self._digests:
            doubtful = WantedPods((*running, *self._kept))
            for digests in self._digests:
                ended += doubtful.among(digests)
            self._digests = []
        for rollout in ended:
            self._kept.pop(rollout, None)
        return ended

    def settle(self, stored: Iterable[RolloutEvent]) -> None:
        """Replaces the outcomes from events by the stored rollouts."""
        before, self._kept = self._kept, {}
        self.lists_all, self._well = True, {}
        self._latest.clear()
        for rollout in stored:
            if event := before.get(rollout.id):
                rollout.inexact, rollout.constrained, rollout.t = event.inexact, event.constrained, event.t
            self._kept[rollout.id] = rollout

    @property
    def listed(self) -> dict[str, RolloutEvent]:
        """The listed rollouts by id: all that ended badly, and as many others as were asked for."""
        return {**self._kept, **{event.id: event for event in self._latest}} if self._latest else self._kept

    def by_status(self, planned: int) -> Counter[str]:
        """Counts rollouts by status. If they are more than ``planned``, some have ended well twice; 0: unknown."""
        counts = Counter(event.status for event in self._kept.values())
        for statuses in self._well.values():
            counts.update(statuses)
        for status in VERIFIED if planned else ():
            counts[status] -= min(counts[status], max(0, counts.total() - planned))
        return counts

    @property
    def failures(self) -> list[RolloutEvent]:
        """The failed rollouts. Those from a summary have no error text."""
        return [event for event in self._kept.values() if event.status == "failed"]

    def rate(self) -> float:
        """Returns the rollouts stored per second, over the last minutes."""
        now = time.time()
        self._recent = Counter({at: count for at, count in self._recent.items() if at >= now - RECENT_S})
        stored = self._recent.total()
        return stored / max(1.0, now - min(self._recent)) if stored >= 2 else 0.0

    def policies(self, pass_threshold: float) -> dict[str, dict[str, Any]]:
        """Returns the figures of each policy, over the listed rollouts: call it if all are listed.

        Args:
            pass_threshold: minimum reward of a passed rollout.
        """
        by_policy: dict[str, list[RolloutEvent]] = {}
        for event in self._kept.values():
            by_policy.setdefault(policy_of(event.id), []).append(event)
        return {policy: self._figures(policy, events, pass_threshold) for policy, events in sorted(by_policy.items())}

    def _figures(self, policy: str, events: list[RolloutEvent], pass_threshold: float) -> dict[str, Any]:
        by_task: dict[str, list[float | None]] = {}
        for event in events:
            by_task.setdefault(_task_of(event.id), []).append(event.reward)
        evaluated = evaluate(by_task, threshold=pass_threshold)
        rewards = [event.reward for event in events if event.reward is not None]
        return {
            "rollouts": len(events),
            "statuses": dict(Counter(event.status for event in events)),
            "turns": sum(event.turns for event in events),
            "seconds": sum(event.seconds for event in events),
            "inexact": self._inexact[policy] + sum(event.inexact for event in events),
            "constrained": self._constrained[policy] + sum(event.constrained for event in events),
            "evaluation": evaluated,
            "solved": evaluated["passed"] if evaluated else 0,
            "mean_reward": round(sum(rewards) / len(rewards), 4) if rewards else None,
        }


def _task_of(rollout_id: str) -> str:
    return without_round(rollout_id.rsplit("/", 2)[0])[0]


# --- causes of failures -----------------------------------------------------------------------------------------------


@dataclass
class Cause:
    """One cause of failures."""

    kind: str
    count: int
    """Number of rollouts that failed for it."""
    id: str
    """The first of these rollouts."""
    error: str
    log: str
    """Log of the pod that ran it. Empty if unknown or removed."""


def causes(run: RunDir, failures: Iterable[RolloutEvent], places: Mapping[str, AttemptPlace]) -> list[Cause]:
    """Returns the causes of failures, the most frequent first.

    Args:
        failures: the failed rollouts.
        places: last place of each rollout, if known.
    """
    by_kind: dict[str, list[RolloutEvent]] = {}
    for event in failures:
        by_kind.setdefault(event.kind, []).append(event)
    listed = []
    for kind, events in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        first = min(events, key=lambda event: event.t)
        error, log = first.error, None
        if place := places.get(first.id):
            log = pod_log(run, place.pod)
            error = error or _error(run.events, place.pod, first.id, first.t)
        listed.append(Cause(kind, len(events), first.id, error, str(log or "")))
    return listed


@functools.lru_cache(256)
def _error(events: Path, pod: str, rollout: str, t: float) -> str:
    """Looks up an error that the pod's summary has left out. Cached, because this reads all events of the pod."""
    reader: EventReader[RolloutEvent] = EventReader(events, "rollout", rollout)
    for _, its_events in reader.read([pod]):
        for event in its_events:
            if isinstance(event, RolloutEvent) and event.t == t:
                return event.error
    return ""


def broken_verifiers(rollouts: Iterable[RolloutEvent]) -> list[str]:
    """Returns a warning for each task whose verifier failed for every verified rollout.

    Such rollouts have reward 0. If all rollouts of a task have, the verifier is more likely to blame than the agents.

    Args:
        rollouts: all stored rollouts.
    """
    by_task: dict[str, list[RolloutEvent]] = {}
    for event in rollouts:
        if event.status in VERIFIED:
            by_task.setdefault(_task_of(event.id), []).append(event)
    return [
        f"task {task}: its verifier failed for all its rollouts ({len(events)}), which have reward 0; see that its "
        f"solution gets 1 (megaflow-hpc tasks validate); the first: {events[0].id}: {events[0].error}"
        for task, events in by_task.items()
        if all(event.kind == "verifier" for event in events)
    ]
