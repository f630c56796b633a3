"""Scheduler: decides which rollout starts where. Pure and deterministic: no I/O, no clock.

Work waits in *lanes*, one for each policy and demand. If the head of a lane can start, so can everything else in the
lane. So a decision looks only at the heads, and costs the same for ten waiting rollouts as for a million.

The campaign file chooses the order:

``fifo``     in the order in which the blocks were claimed.
``longest``  the longest expected rollout first, so that the campaign does not end waiting for a long rollout.
``fair``     the policy with the least time so far first (expected seconds divided by its weight), so that a policy
             with long rollouts does not take the slots of a policy with short ones.

:mod:`~megaflow_hpc.pod.scheduling.workers` chooses the worker. Retries start before anything else, on another worker if
possible. Each cause of failure has its own retry limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from megaflow_hpc.pod.scheduling.failures import may_retry
from megaflow_hpc.pod.scheduling.work import Demand, Entry, Lane, Work
from megaflow_hpc.pod.scheduling.workers import Workers

Order = Literal["fifo", "longest", "fair"]

DEFERRED_PENALTY = 1e15
"""Priority offset for rollouts that run only when nothing else is ready. Larger than any expected duration."""


class Scheduler:
    """The queue of one pod, and the slots of its workers.

    Args:
        order: scheduling order; see the module.
        weights: policy weights for ``fair``. The default weight is 1.
        surely_s: returns the seconds within which a rollout very likely ends, or 0 if unknown.
    """

    def __init__(
        self,
        order: Order = "fifo",
        weights: Mapping[str, float] | None = None,
        surely_s: Callable[[Work], float] = lambda work: work.expected_s,
    ) -> None:
        self.order = order
        self._weights = dict(weights or {})
        self._surely_s = surely_s
        self._lanes: dict[tuple[str, Demand], Lane] = {}
        self._queued: dict[str, tuple[Lane, Entry]] = {}
        """Queued rollouts, by id."""
        self.workers = Workers()
        self._given_s: dict[str, float] = {}
        """Policy → total expected seconds of its started rollouts."""
        self._number = count(1)
        self._too_long: list[Work] = []
        self.deferred = 0
        """Number of queued rollouts that start only when nothing else is ready."""
        self.waiting: set[str] = set()
        """Policies that must wait, because none of their engines responds yet."""

    # --- the queue ---

    @property
    def queued(self) -> int:
        """Number of queued rollouts."""
        return len(self._queued)

    @property
    def too_long(self) -> int:
        """Number of rollouts set aside because they would not end in time. :meth:`clear` returns them."""
        return len(self._too_long)

    def waiting_work(self) -> list[Work]:
        """Returns the queued work by priority, ignoring waits for slots and engines."""
        return [entry.work for entry in sorted(entry for lane in self._lanes.values() for entry in lane.entries())]

    def coming(self, count: int) -> list[Any]:
        """Returns the planned tasks of running rollouts and of the next ``count`` rollouts, without duplicates."""
        works = [*self.workers.running_work(), *self.waiting_work()[:count]]
        return list({work.rollout.task_id: work.planned for work in works}.values())

    def remove_impossible(self) -> list[Work]:
        """Removes and returns the work that is too large even for an idle worker."""
        if not self.workers:
            return []
        impossible: list[Work] = []
        for lane in list(self._lanes.values()):
            if not self.workers.could_ever(lane.demand):
                impossible += [entry.work for entry in lane.entries()]
        for work in impossible:
            self.drop(work.rollout.id)
        return impossible

    # --- events ---

    def add(self, works: Iterable[Work]) -> None:
        """Queues work in the given order."""
        for work in works:
            priority = -work.expected_s if self.order == "longest" else 0.0
            if work.deferred:
                priority += DEFERRED_PENALTY
            self._push(Entry(priority, next(self._number), work))

    def retry(self, work: Work, cause: str, worker: int | None) -> bool:
        """Queues another attempt after a failure for ``cause``. Returns False if no attempts are left."""
        causes = (*work.causes, cause)
        if not may_retry(causes):
            return False
        again = replace(work, attempt=work.attempt + 1, avoid=worker, causes=causes, deferred=False)
        self._push(Entry(-math.inf, -next(self._number), again))
        return True

    def next(self, remaining_s: float = math.inf, whole_s: float = math.inf) -> tuple[int, Work] | None:
        """Starts the next rollout. Returns its worker and work, or ``None`` if no queued rollout can start now.

        Args:
            remaining_s: seconds until the pod must be empty. Longer rollouts are left to another pod, unless a fresh
                pod would be too short for them too.
            whole_s: seconds available in a fresh pod.
        """
        if not self.workers.free:
            return None
        skipped: list[Lane] = []
        for lane in self._ready_lanes():
            if remaining_s < math.inf:
                self._put_aside(lane, remaining_s, whole_s)
            if not lane:
                continue
            rank = self.workers.place(lane)
            if rank is None:
                skipped.append(lane)
                continue
            for passed in skipped:
                passed.overtaken += 1
            lane.overtaken = 0
            work = self._pop(lane)
            self._given_s[lane.policy] += work.expected_s or 1.0
            self.workers.start(work, rank, lane)
            return rank, work
        return None

    def drop(self, rollout_id: str) -> Work | None:
        """Removes and returns a queued rollout's work. Returns ``None`` if the rollout is not queued."""
        if rollout_id not in self._queued:
            return None
        lane, entry = self._queued[rollout_id]
        lane.remove(entry.number)
        self._forget(lane, entry.work)
        return entry.work

    def clear(self) -> list[Work]:
        """Empties the queue, because the pod drains. Returns all queued and set-aside work."""
        dropped = [entry.work for _, entry in self._queued.values()] + self._too_long
        self._lanes.clear()
        self._queued.clear()
        self.workers.reserve_none()
        self._too_long, self.deferred = [], 0
        return dropped

    # --- the decision ---

    def _push(self, entry: Entry) -> None:
        work = entry.work
        policy = work.rollout.policy
        lane = self._lanes.get((policy, work.demand))
        if lane is None:
            self._level(policy)
            lane = self._lanes[policy, work.demand] = Lane(policy, work.demand)
        lane.push(entry)
        self._queued[work.rollout.id] = lane, entry
        self.deferred += work.deferred

    def _level(self, policy: str) -> None:
        """Raises a policy that had no queued work to the level of the others. Otherwise it would take every slot to
        catch up."""
        active = {lane.policy for lane in self._lanes.values()}
        if policy not in active:
            least_s = min((self._given_s[other] for other in active), default=0.0)
            self._given_s[policy] = max(least_s, self._given_s.get(policy, 0.0))

    def _pop(self, lane: Lane) -> Work:
        work = lane.pop()
        self._forget(lane, work)
        return work

    def _forget(self, lane: Lane, work: Work) -> None:
        """Updates the records for work that leaves the queue."""
        del self._queued[work.rollout.id]
        self.deferred -= work.deferred
        if not lane:
            del self._lanes[lane.policy, lane.demand]

    def _ready_lanes(self) -> list[Lane]:
        """Returns the lanes that may be able to start work, in scheduling order."""
        lanes = [lane for lane in self._lanes.values() if lane.policy not in self.waiting]
        if len(lanes) > 1:
            lanes.sort(key=self._fair_turn if self.order == "fair" else self._turn)
        return lanes

    @staticmethod
    def _turn(lane: Lane) -> tuple[float, ...]:
        return lane.head[:2]

    def _fair_turn(self, lane: Lane) -> tuple[float, ...]:
        priority, number, _ = lane.head
        given = self._given_s[lane.policy] / self._weights.get(lane.policy, 1.0)
        return priority >= DEFERRED_PENALTY / 2, given, priority, number

    def _put_aside(self, lane: Lane, remaining_s: float, whole_s: float) -> None:
        while lane and remaining_s < self._surely_s(lane.head.work) <= whole_s:
            self._too_long.append(self._pop(lane))
