"""Which rollout starts where: pure, deterministic, no I/O, no clock of its own.

Work waits in *lanes*, one for each (policy, share, demand): what is in one lane can start where its head can. A
decision looks at the heads of the lanes, never through a queue, so it costs the same with ten rollouts waiting as with
a million.

Orders, chosen by the campaign file:

``fifo``     as the blocks were claimed.
``longest``  the longest expected first, which keeps the end of a campaign from waiting for what was started last.
``fair``     the lane whose share has been given the least (expected seconds over its weight), so that a policy with
             long rollouts does not take the slots from one with short ones.

Which worker takes a rollout says :mod:`~megaflow_hpc.pod.scheduling.workers`. Failures are retried before anything
else, elsewhere if there is an elsewhere, a bounded number of times by cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from megaflow_hpc.pod.scheduling.failures import may_retry
from megaflow_hpc.pod.scheduling.queues import Lane
from megaflow_hpc.pod.scheduling.work import Demand, Work
from megaflow_hpc.pod.scheduling.workers import Workers

Order = Literal["fifo", "longest", "fair"]

LATER = 1e15
"""Added to the priority of what starts only while nothing else can; far above any expected duration."""


class Scheduler:
    """The queue of one pod, over the slots of its workers.

    Args:
        order: see the module.
        weights: of shares, for ``fair``; 1 where not named.
        surely_s: seconds within which a rollout very likely ends, by what is known now; 0: nothing is.
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
        self._lanes: dict[tuple[str, str, Demand], Lane] = {}
        self._places: dict[str, tuple[Lane, int, Work]] = {}
        """Rollout id → where it is queued."""
        self.workers = Workers()
        self._given: dict[str, float] = {}
        self._number = count(1)
        self._too_long: list[Work] = []
        self.later = 0
        """Queued rollouts that start only while nothing else can."""
        self.waiting: set[str] = set()
        """Policies whose rollouts are held back, because no engine of theirs answers yet."""

    # --- what there is ---

    @property
    def queued(self) -> int:
        """Rollouts that wait."""
        return len(self._places)

    @property
    def too_long(self) -> int:
        """Rollouts put aside because they are not expected to end in time; :meth:`clear` gives them back."""
        return len(self._too_long)

    def waiting_work(self) -> list[Work]:
        """Returns what is queued, in the order in which it would start if nothing had to wait for anything."""
        return [entry[2] for entry in sorted(entry for lane in self._lanes.values() for entry in lane.entries())]

    def coming(self, count: int) -> list[Any]:
        """Returns the planned tasks of what runs, then of about ``count`` rollouts that start next, each once."""
        waiting = sorted(entry for lane in self._lanes.values() for entry in lane.first(count))[:count]
        works = [*self.workers.running_work(), *(work for _, _, work in waiting)]
        return list({work.rollout.task_id: work.planned for work in works}.values())

    def impossible(self) -> list[Work]:
        """Takes out and returns the work that would not fit on any worker even if it were empty."""
        if not self.workers:
            return []
        found: list[Work] = []
        for key, lane in list(self._lanes.items()):
            if not self.workers.could_ever(lane.demand):
                found += [work for _, _, work in lane.entries()]
                del self._lanes[key]
        for work in found:
            self._unqueue(work)
        return found

    # --- events ---

    def add(self, work: Iterable[Work]) -> None:
        """Queues work in this order."""
        for item in work:
            self._push(item, next(self._number))

    def next(self, remaining_s: float = math.inf, whole_s: float = math.inf) -> tuple[int, Work] | None:
        """Starts the next rollout, or ``None`` while nothing that may start is queued or has room.

        Args:
            remaining_s: until the pod must be empty; what surely takes longer is put aside for another pod,
            whole_s: unless a fresh pod, which has this long, would be too short for it as well.
        """
        if not self.workers.free:
            return None
        skipped: list[Lane] = []
        for lane in self._by_turn():
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
            return rank, self._start_head(lane, rank)
        return None

    def retry(self, work: Work, cause: str, worker: int | None) -> bool:
        """Queues another attempt after one that ended for ``cause``, if there is one left for it."""
        causes = (*work.causes, cause)
        if not may_retry(causes):
            return False
        again = replace(work, attempt=work.attempt + 1, avoid=worker, causes=causes, later=False)
        self._push(again, -next(self._number))
        return True

    def drop(self, rollout_id: str) -> Work | None:
        """Takes a queued rollout out of the queue; ``None`` where it is not queued."""
        place = self._places.get(rollout_id)
        if place is None:
            return None
        lane, number, work = place
        lane.take(number)
        self._unqueue(work)
        self._close(lane)
        return work

    def clear(self) -> list[Work]:
        """Empties the queue (draining)."""
        dropped = [work for lane in self._lanes.values() for _, _, work in lane.entries()] + self._too_long
        self._lanes.clear()
        self.workers.keep_none()
        self._places.clear()
        self._too_long, self.later = [], 0
        return dropped

    # --- the decision ---

    def _push(self, work: Work, number: int) -> None:
        key = (work.rollout.policy, work.share, work.demand)
        lane = self._lanes.get(key)
        if lane is None:
            # A share that begins (again) starts level with the others, or it would take every slot to catch up.
            active = {other.share for other in self._lanes.values()}
            if work.share not in active:
                level = min((self._given[share] for share in active), default=0.0)
                self._given[work.share] = max(level, self._given.get(work.share, 0.0))
            lane = self._lanes[key] = Lane(*key)
        priority = -work.expected_s if self.order == "longest" else 0.0
        if number < 0:  # a retry
            priority = -math.inf
        elif work.later:
            priority = LATER + priority
        lane.push(priority, number, work)
        self._places[work.rollout.id] = lane, number, work
        self.later += work.later

    def _unqueue(self, work: Work) -> None:
        """Notes that work is no longer queued."""
        del self._places[work.rollout.id]
        self.later -= work.later

    def _close(self, lane: Lane) -> None:
        if not lane:
            self._lanes.pop((lane.policy, lane.share, lane.demand), None)

    def _by_turn(self) -> list[Lane]:
        """The lanes that may start something, whose turn it is first."""
        lanes = [lane for lane in self._lanes.values() if lane and lane.policy not in self.waiting]
        if len(lanes) < 2:
            return lanes
        if self.order == "fair":
            given, weights = self._given, self._weights
            return sorted(
                lanes,
                key=lambda lane: (
                    lane.head[0] >= LATER / 2,
                    given[lane.share] / weights.get(lane.share, 1.0),
                    lane.head[:2],
                ),
            )
        return sorted(lanes, key=lambda lane: lane.head[:2])

    def _put_aside(self, lane: Lane, remaining_s: float, whole_s: float) -> None:
        while lane and remaining_s < self._surely_s(lane.head[2]) <= whole_s:
            work = lane.pop()[2]
            self._unqueue(work)
            self._too_long.append(work)

    def _start_head(self, lane: Lane, rank: int) -> Work:
        work = lane.pop()[2]
        self._unqueue(work)
        self._charge(work)
        self.workers.start(work, rank, lane)
        self._close(lane)
        return work

    def _charge(self, work: Work) -> None:
        self._given[work.share] += work.expected_s or 1.0
