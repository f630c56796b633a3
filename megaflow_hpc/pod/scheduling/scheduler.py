"""Which rollout starts where: pure, deterministic, no I/O, no clock of its own.

Work waits in *lanes*, one for each (policy, share, demand): what is in one lane can start where its head can. A
decision looks at the heads of the lanes, never through a queue, so it costs the same with ten rollouts waiting as with
a million.

Orders, chosen by the campaign file:

``fifo``     as the blocks were claimed.
``longest``  the longest expected first, which keeps the end of a campaign from waiting for what was started last.
``fair``     the lane whose share has been given the least (expected seconds over its weight), so that a policy with
             long rollouts does not take the slots from one with short ones.

A rollout goes to the worker with most free slots among those with room for its cpus and memory, or where its group
last went. One that needs more room than is free is overtaken by smaller ones only so often; then a worker is kept free
for it (no starvation). Failures are retried before anything else, elsewhere if there is an elsewhere, a bounded number
of times by cause.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from megaflow_hpc.pod.scheduling.failures import may_retry
from megaflow_hpc.pod.scheduling.queues import Lane
from megaflow_hpc.pod.scheduling.work import NOTHING, Demand, Work

Order = Literal["fifo", "longest", "fair"]

OVERTAKEN = 64
"""Starts that may overtake a rollout for which there is no room, before a worker is kept for it."""
LATER = 1e15
"""Added to the priority of what starts only while nothing else can; far above any expected duration."""
GROUPS_KEPT = 1 << 16
"""Groups whose last worker is remembered."""


@dataclass(slots=True)
class _Worker:
    slots: int
    room: Demand
    """Its cpus and memory; infinite where it did not say."""
    running: dict[str, Work] = field(default_factory=dict)
    cpus: float = 0.0
    memory_mb: int = 0
    free: int = 0

    def count_free(self) -> int:
        """Counts free slots anew; by how many there are more."""
        before, self.free = self.free, max(0, self.slots - len(self.running))
        return self.free - before

    def has_room(self, demand: Demand) -> bool:
        """Returns whether work of this demand can start there now."""
        return (
            self.free > 0
            and self.cpus + demand.cpus <= self.room.cpus
            and self.memory_mb + demand.memory_mb <= self.room.memory_mb
        )

    def could_ever(self, demand: Demand) -> bool:
        """Returns whether work of this demand could start there if nothing else ran."""
        return demand.cpus <= self.room.cpus and demand.memory_mb <= self.room.memory_mb


class Scheduler:
    """The queue of one pod and the slots of its workers.

    Args:
        order: see the module.
        weights: of shares, for ``fair``; 1 where not named.
        surely_s: seconds within which a rollout very likely ends, by what is known now; 0: nothing is.
        together: a group's rollouts go to the worker where the last of them went, while it has room.
    """

    def __init__(
        self,
        order: Order = "fifo",
        weights: Mapping[str, float] | None = None,
        surely_s: Callable[[Work], float] = lambda work: work.expected_s,
        together: bool = False,
    ) -> None:
        self.order = order
        self._weights = dict(weights or {})
        self._surely_s = surely_s
        self._together = together
        self._lanes: dict[tuple[str, str, Demand], Lane] = {}
        self._places: dict[str, tuple[Lane, int, Work]] = {}
        """Rollout id → where it is queued."""
        self._workers: dict[int, _Worker] = {}
        self._given: dict[str, float] = {}
        self._number = count(1)
        self._emptiest: list[tuple[int, int]] = []
        """(-free slots, worker): a heap in which entries of the past are skipped."""
        self._kept: dict[int, Lane] = {}
        """Worker → the lane it is kept free for."""
        self._of_group: dict[str, int] = {}
        """Group → the worker where the last of it went."""
        self._copied: dict[str, int] = {}
        """Rollout with two attempts running → the higher of the two."""
        self._too_long: list[Work] = []
        self.later = 0
        """Queued rollouts that start only while nothing else can."""
        self.running = 0
        self.slots = 0
        self.free = 0
        self.waiting: set[str] = set()
        """Policies whose rollouts are held back, because no engine of theirs answers yet."""

    # --- what there is ---

    @property
    def queued(self) -> int:
        """Rollouts that wait."""
        return len(self._places)

    @property
    def workers(self) -> list[int]:
        """The workers that have joined and not left."""
        return list(self._workers)

    @property
    def too_long(self) -> int:
        """Rollouts put aside because they are not expected to end in time; :meth:`clear` gives them back."""
        return len(self._too_long)

    def running_on(self, worker: int) -> dict[str, Work]:
        """Returns what runs on a worker, by rollout id."""
        return dict(self._workers[worker].running)

    def running_at(self, rollout_id: str) -> list[int]:
        """Returns the workers on which a rollout runs: none, one, or two."""
        return [rank for rank, worker in self._workers.items() if rollout_id in worker.running]

    def running_work(self) -> list[Work]:
        """Returns every attempt that runs."""
        return [work for worker in self._workers.values() for work in worker.running.values()]

    def waiting_work(self) -> list[Work]:
        """Returns what is queued, in the order in which it would start if nothing had to wait for anything."""
        return [entry[2] for entry in sorted(entry for lane in self._lanes.values() for entry in lane.entries())]

    def coming(self, count: int) -> list[str]:
        """Returns the tasks of what runs, then of about ``count`` rollouts that start next, each once."""
        running = [work.rollout.task_id for work in self.running_work()]
        waiting = [entry for lane in self._lanes.values() for entry in lane.first(count)]
        return list(dict.fromkeys([*running, *(work.rollout.task_id for _, _, work in sorted(waiting)[:count])]))

    def impossible(self) -> list[Work]:
        """Takes out and returns the work that would not fit on any worker even if it were empty."""
        if not self._workers:
            return []
        found: list[Work] = []
        for key, lane in list(self._lanes.items()):
            if not any(worker.could_ever(lane.demand) for worker in self._workers.values()):
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

    def join(self, worker: int, slots: int, cpus: float | None = None, memory_mb: int | None = None) -> None:
        """Takes in a worker, once.

        Args:
            cpus: that its rollouts share; ``None``: as many as they like.
            memory_mb: the same of memory.
        """
        if worker in self._workers:
            return
        infinite = 1 << 62
        room = Demand(infinite if cpus is None else cpus, infinite if memory_mb is None else memory_mb)
        self._workers[worker] = _Worker(slots, room, free=slots)
        self.slots += slots
        self.free += slots
        self._note_free(worker)

    def leave(self, worker: int) -> list[Work]:
        """Takes a worker out; returns what ran there, for the caller to fail."""
        gone = self._workers.pop(worker, None)
        self._kept.pop(worker, None)
        if gone is None:
            return []
        self.slots -= gone.slots
        self.free -= gone.free
        self.running -= len(gone.running)
        return list(gone.running.values())

    def exclude(self, worker: int) -> None:
        """Starts nothing more on a worker; what runs there goes on."""
        found = self._workers[worker]
        self._kept.pop(worker, None)
        self.slots -= found.slots
        found.slots = 0
        self.free += found.count_free()

    def next(self, remaining_s: float = math.inf, whole_s: float = math.inf) -> tuple[int, Work] | None:
        """Starts the next rollout, or ``None`` while nothing that may start is queued or has room.

        Args:
            remaining_s: until the pod must be empty; what surely takes longer is put aside for another pod,
            whole_s: unless a fresh pod, which has this long, would be too short for it as well.
        """
        if not self.free:
            return None
        skipped: list[Lane] = []
        for lane in self._by_turn():
            if remaining_s < math.inf:
                self._put_aside(lane, remaining_s, whole_s)
            if not lane:
                continue
            rank = self._place(lane)
            if rank is None:
                skipped.append(lane)
                continue
            for passed in skipped:
                passed.overtaken += 1
            lane.overtaken = 0
            return rank, self._start_head(lane, rank)
        return None

    def copy(self, rollout_id: str) -> tuple[int, Work] | None:
        """Starts a second attempt of a running rollout on another worker, if one has a free slot and room.

        The first result counts; the caller cancels the other attempt.
        """
        places = self.running_at(rollout_id)
        if len(places) != 1 or self.queued:
            return None
        work = self._workers[places[0]].running[rollout_id]
        fits = [
            (worker.free, -rank)
            for rank, worker in self._workers.items()
            if rank != places[0] and worker.has_room(work.demand) and rank not in self._kept
        ]
        if not fits:
            return None
        rank = -max(fits)[1]
        twin = replace(work, attempt=work.attempt + 1, avoid=places[0])
        self._copied[rollout_id] = twin.attempt
        self._start(twin, rank)
        return rank, twin

    def finish(self, worker: int, rollout_id: str) -> Work | None:
        """Frees the slot; ``None`` if this worker is not known to run it (a late message: ignore it)."""
        found = self._workers.get(worker)
        work = found.running.get(rollout_id) if found else None
        if found is None or work is None:
            return None
        del found.running[rollout_id]
        found.cpus -= work.demand.cpus
        found.memory_mb -= work.demand.memory_mb
        self.running -= 1
        self.free += found.count_free()
        self._note_free(worker)
        return work

    def retry(self, work: Work, cause: str, worker: int | None) -> bool:
        """Queues another attempt after one that ended for ``cause``, if there is one left for it."""
        causes = (*work.causes, cause)
        if not may_retry(causes):
            return False
        attempt = max(work.attempt, self._copied.pop(work.rollout.id, 0)) + 1
        again = replace(work, attempt=attempt, avoid=worker, causes=causes, later=False)
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
        self._kept.clear()
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

    def _place(self, lane: Lane) -> int | None:
        """The worker for a lane's head; one is kept for it when it has been overtaken too often."""
        work = lane.head[2]
        avoid = work.avoid
        if self._together and avoid is None:
            rank = self._of_group.get(work.rollout.group_id, -1)
            worker = self._workers.get(rank)
            if worker is not None and worker.has_room(lane.demand) and self._kept.get(rank, lane) is lane:
                return rank
        if lane.demand is NOTHING and not self._kept and avoid is None:
            return self._most_free()
        fits = [
            (worker.free, -rank)
            for rank, worker in self._workers.items()
            if worker.has_room(lane.demand) and self._kept.get(rank, lane) is lane
        ]
        if fits:
            return -max([pair for pair in fits if -pair[1] != avoid] or fits)[1]
        if lane.overtaken >= OVERTAKEN and lane not in self._kept.values():
            able = [
                (worker.free, -rank)
                for rank, worker in self._workers.items()
                if worker.could_ever(lane.demand) and rank not in self._kept and worker.slots
            ]
            if able:
                self._kept[-max(able)[1]] = lane
        return None

    def _most_free(self) -> int | None:
        while self._emptiest:
            free, rank = self._emptiest[0]
            worker = self._workers.get(rank)
            if free and worker is not None and worker.free == -free:
                return rank
            heapq.heappop(self._emptiest)
        return None

    def _note_free(self, rank: int) -> None:
        free = self._workers[rank].free
        if len(self._emptiest) > 64 + 4 * len(self._workers):
            self._emptiest = [(-worker.free, other) for other, worker in self._workers.items() if worker.free]
            heapq.heapify(self._emptiest)
        elif free:
            heapq.heappush(self._emptiest, (-free, rank))

    def _start_head(self, lane: Lane, rank: int) -> Work:
        work = lane.pop()[2]
        self._unqueue(work)
        self._start(work, rank)
        if self._kept.get(rank) is lane:
            del self._kept[rank]
        self._close(lane)
        return work

    def _start(self, work: Work, rank: int) -> None:
        worker = self._workers[rank]
        worker.running[work.rollout.id] = work
        worker.cpus += work.demand.cpus
        worker.memory_mb += work.demand.memory_mb
        self.running += 1
        worker.free -= 1
        self.free -= 1
        self._note_free(rank)
        self._given[work.share] += work.expected_s or 1.0
        if self._together:
            if len(self._of_group) >= GROUPS_KEPT:
                self._of_group.clear()
            self._of_group[work.rollout.group_id] = rank
