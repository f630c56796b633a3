"""Outcomes of a run's rollouts: counts by status and policy, listed rollouts, and causes of failures.

An unsuccessful rollout may run again in another pod and succeed there, so unsuccessful rollouts are kept by id.
Successful rollouts (``completed``, ``truncated``) are only counted, because there may be millions.

A rollout that succeeded in two pods is counted twice, for example if a node was wrongly declared lost.
:meth:`Outcomes.by_status` never returns more rollouts than were planned.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.monitor.evaluation import evaluate
from megaflow_hpc.rundir.budget import Used, total_use
from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import pod_log
from megaflow_hpc.rundir.pods.running import AttemptPlace
from megaflow_hpc.rundir.summaries import RECENT_S, Summary, WantedPods
from megaflow_hpc.types import VERIFIED, RolloutName


class Outcomes:
    """Collects the outcomes of stored rollouts from events.

    Events of the same pod must be added in order. Events of different pods may be added in any order.

    Args:
        listed: Number of latest successful rollouts to list. ``None`` lists all.
    """

    def __init__(self, listed: int | None = 0) -> None:
        self.limit = listed
        """Number of latest successful rollouts to list. ``None`` lists all."""
        self._kept: dict[str, RolloutEvent] = {}
        """Unsuccessful rollouts by id. All rollouts if :attr:`limit` is ``None``."""
        self._latest: deque[RolloutEvent] = deque(maxlen=listed or 0)
        self._well: dict[str, Counter[str]] = {}
        """Maps policy and status to the number of successful rollouts that are not in :attr:`_kept`."""
        self._inexact: Counter[str] = Counter()
        """Maps each policy to the number of inexact model calls of the rollouts in :attr:`_well`."""
        self._constrained: Counter[str] = Counter()
        self.models: Used = {}
        """Maps each judge and each priced model to its usage. Rollouts that were stored twice count twice."""
        self._recent: Counter[int] = Counter()
        """Maps Unix seconds to the number of rollouts stored in each second. Covers the last minutes."""
        self._ended: list[str] = []
        """Rollouts that have succeeded since the last call of :meth:`between_pods`."""
        self._digests: list[bytes] = []

    def apply(self, event: RolloutEvent) -> None:
        """Adds the outcome of a stored rollout."""
        self._recent[int(event.t)] += 1
        if event.models:
            self.models = total_use([self.models, event.models])
        if event.status not in VERIFIED or self.limit is None:
            self._keep(event)
            return
        policy = _arm_of(event.id)
        self._well.setdefault(policy, Counter())[event.status] += 1
        self._inexact[policy] += event.inexact
        self._constrained[policy] += event.constrained
        self._latest.append(event)
        self._ended.append(event.id)

    def adopt(self, summary: Summary) -> None:
        """Adds a pod's summary, which replaces the pod's first events or the events of its earlier starts."""
        for policy, statuses in summary.ended_well.items():
            self._well.setdefault(policy, Counter()).update(statuses)
        self._inexact.update(summary.inexact)
        self._constrained.update(summary.constrained)
        self.models = total_use([self.models, summary.models])
        self._recent.update(summary.recent)
        self._digests.append(summary.digests)
        for ended in summary.ended_badly:
            self._keep(ended.to_event())

    def _keep(self, event: RolloutEvent) -> None:
        before = self._kept.get(event.id)
        # A success replaces a failure (resume --failed), and a later failure replaces an earlier one. Pods may be read
        # in any order.
        if before and before.status in VERIFIED:
            return
        if before and event.status not in VERIFIED and event.t < before.t:
            return
        self._kept[event.id] = event

    def between_pods(self, running: Iterable[str]) -> list[str]:
        """Returns the rollouts that have succeeded since the last call. Drops failures of the same rollouts in other
        pods.

        Args:
            running: Rollouts that are running according to the events.
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
        """Replaces all outcomes collected from events with the stored rollouts."""
        before, self._kept = self._kept, {}
        self.limit, self._well = None, {}
        self._latest.clear()
        for rollout in stored:
            if event := before.get(rollout.id):
                rollout.inexact, rollout.constrained, rollout.t = event.inexact, event.constrained, event.t
            self._kept[rollout.id] = rollout

    @property
    def lists_all(self) -> bool:
        """True if :attr:`listed` contains every stored rollout."""
        return self.limit is None and not self._well

    @property
    def listed(self) -> dict[str, RolloutEvent]:
        """Listed rollouts by id: all unsuccessful rollouts, and the requested number of successful rollouts."""
        return {**self._kept, **{event.id: event for event in self._latest}} if self._latest else self._kept

    def by_status(self, planned: int) -> Counter[str]:
        """Counts rollouts by status. If there are more than ``planned``, subtracts the excess, which was counted twice.
        A ``planned`` of 0 means unknown."""
        counts = Counter(event.status for event in self._kept.values())
        for statuses in self._well.values():
            counts.update(statuses)
        for status in VERIFIED if planned else ():
            counts[status] -= min(counts[status], max(0, counts.total() - planned))
        return counts

    @property
    def failures(self) -> list[RolloutEvent]:
        """Failed rollouts. Rollouts from a pod's summary have no error text."""
        return [event for event in self._kept.values() if event.status == "failed"]

    @property
    def errors(self) -> list[RolloutEvent]:
        """Listed rollouts that were verified although their agent or verifier ended with an error."""
        return [event for event in self._kept.values() if event.status in VERIFIED and event.kind]

    def rate(self) -> float:
        """Returns the number of rollouts stored per second, averaged over the last minutes."""
        now = time.time()
        self._recent = Counter({at: count for at, count in self._recent.items() if at >= now - RECENT_S})
        stored = self._recent.total()
        return stored / max(1.0, now - min(self._recent)) if stored >= 2 else 0.0

    def policies(self, pass_threshold: float) -> dict[str, dict[str, Any]]:
        """Returns the figures of each policy over the listed rollouts. Meaningful only if all rollouts are listed.

        Args:
            pass_threshold: Minimum reward at which a rollout counts as passed.
        """
        by_policy: dict[str, list[RolloutEvent]] = {}
        for event in self._kept.values():
            by_policy.setdefault(_arm_of(event.id), []).append(event)
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
    return RolloutName.parse(rollout_id).task_id


def _arm_of(rollout_id: str) -> str:
    return RolloutName.parse(rollout_id).arm


# --- causes of failures -----------------------------------------------------------------------------------------------


@dataclass
class Cause:
    """A cause of failures."""

    kind: str
    count: int
    """Number of rollouts with this cause."""
    id: str
    """Id of the first rollout with this cause."""
    error: str
    log: str
    """Log of the pod that ran the first rollout. Empty if unknown or removed."""


def causes(run: RunDir, failures: Iterable[RolloutEvent], places: Mapping[str, AttemptPlace]) -> list[Cause]:
    """Returns the causes of failures, most frequent first.

    Args:
        failures: Failed rollouts.
        places: Last known location of each rollout, by id.
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
    """Looks up an error text that the pod's summary omits. Cached, because it reads all events of the pod."""
    reader = EventReader(events, "rollout", rollout)
    for _, its_events in reader.read([pod]):
        for event in its_events:
            if isinstance(event, RolloutEvent) and event.t == t:
                return event.error
    return ""


def failing_agents(rollouts: Iterable[RolloutEvent]) -> list[str]:
    """Returns a warning for each policy whose agent ended with an error in every verified rollout.

    Args:
        rollouts: All stored rollouts.
    """
    return [
        f"policy {policy}: its agent ended with an error in all {len(events)} verified rollouts; the first: "
        f"{events[0].id}: {events[0].error}"
        for policy, events in _always_with(rollouts, "agent", _arm_of)
    ]


def broken_verifiers(rollouts: Iterable[RolloutEvent]) -> list[str]:
    """Returns a warning for each task whose verifier failed in every verified rollout.

    Such rollouts have reward 0. If all rollouts of a task are affected, the verifier is more likely at fault than
    the agents.

    Args:
        rollouts: All stored rollouts.
    """
    return [
        f"task {task}: its verifier failed for all its rollouts ({len(events)}), which have reward 0; check that its "
        f"solution gets 1 (megaflow-hpc tasks validate); the first: {events[0].id}: {events[0].error}"
        for task, events in _always_with(rollouts, "verifier", _task_of)
    ]


def _always_with(
    rollouts: Iterable[RolloutEvent], kind: str, group_of: Callable[[str], str]
) -> list[tuple[str, list[RolloutEvent]]]:
    """Returns the groups, with their rollouts, in which every verified rollout has an error of this kind.

    Args:
        group_of: Maps a rollout id to its group.
    """
    groups: dict[str, list[RolloutEvent]] = {}
    for event in rollouts:
        if event.status in VERIFIED:
            groups.setdefault(group_of(event.id), []).append(event)
    return [each for each in groups.items() if all(event.kind == kind for event in each[1])]
