"""Which rollout starts where: pure, deterministic, no I/O, no clock of its own.

Work waits in *lanes*, one for each (policy, share, demand): what is in one lane can start where its head can. A
decision looks at the heads of the lanes, never through a queue, so it costs the same with ten rollouts waiting as with
a million.

Orders, chosen by the campaign file:

``fifo``     as the blocks were claimed.
``longest``  the longest expected first, which keeps the end of a campaign from waiting for what was started last.
``fair``     the lane whose share has been given the least (expected seconds over its weight), so that a policy with
             long rollouts does not take the slots from one with short ones.

A rollout goes to the worker with most free slots among those with room for its cpus and memory. One that needs more
room than is free is overtaken by smaller ones only so often; then a worker is kept free for it (no starvation).
Failures are retried before anything else, elsewhere if there is an elsewhere, a bounded number of times by cause.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal, NamedTuple

from megaflow_hpc.types import Rollout

Order = Literal["fifo", "longest", "fair"]

RETRIES = {"sandbox": 2, "model": 2, "node": 2, "verifier": 1}
"""Further attempts after a failure of this kind; other kinds are final at once."""

OVERTAKEN = 64
"""Starts that may overtake a rollout for which there is no room, before a worker is kept for it."""


class Demand(NamedTuple):
    """What a rollout needs beside its slot."""

    cpus: float = 0.0
    memory_mb: int = 0


NOTHING = Demand()


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt at a rollout under a claim."""

    rollout: Rollout
    block: int
    epoch: int
    attempt: int = 0
    avoid: int | None = None
    """Worker on which the last attempt failed."""
    expected_s: float = 0.0
    """What is known of its duration; 0: nothing."""
    demand: Demand = NOTHING
    share: str = ""


@dataclass(slots=True)
class _Worker:
    slots: int
    room: Demand
    """Its cpus and memory; infinite where it did not say."""
    running: dict[str, Work] = field(default_factory=dict)
    cpus: float = 0.0
    memory_mb: int = 0

    @property
    def free(self) -> int:
        return self.slots - len(self.running)

    def has_room(self, demand: Demand) -> bool:
        return (
            self.free > 0
            and self.cpus + demand.cpus <= self.room.cpus
            and self.memory_mb + demand.memory_mb <= self.room.memory_mb
        )

    def could_ever(self, demand: Demand) -> bool:
        return demand.cpus <= self.room.cpus and demand.memory_mb <= self.room.memory_mb


class _Lane:
    """Work that is alike in all that decides whether it may start."""

    __slots__ = ("demand", "heap", "overtaken", "policy", "share")

    def __init__(self, policy: str, share: str, demand: Demand) -> None:
        self.policy, self.share, self.demand = policy, share, demand
        self.heap: list[tuple[float, int, Work]] = []
        self.overtaken = 0


class Scheduler:
    """The queue of one pod and the slots of its workers.

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
        self._lanes: dict[tuple[str, str, Demand], _Lane] = {}
        self._workers: dict[int, _Worker] = {}
        self._given: dict[str, float] = {}
        self._number = count(1)
        self._emptiest: list[tuple[int, int]] = []
        """(-free slots, worker): a heap in which entries of the past are skipped."""
        self._kept: dict[int, _Lane] = {}
        """Worker → the lane it is kept free for."""
        self._too_long: list[Work] = []
        self.queued = 0
        self.running = 0
        self.slots = 0
        self.waiting: set[str] = set()
        """Policies whose rollouts are held back, because no engine of theirs answers yet."""

    # --- what there is ---

    @property
    def workers(self) -> list[int]:
        return list(self._workers)

    @property
    def too_long(self) -> int:
        """Rollouts put aside because they are not expected to end in time; :meth:`clear` gives them back."""
        return len(self._too_long)

    def running_on(self, worker: int) -> dict[str, Work]:
        return dict(self._workers[worker].running)

    def coming(self, count: int) -> list[str]:
        """Tasks of what runs, then of what starts next, each once; about ``count`` of the latter are looked at."""
        running = [work.rollout.task_id for worker in self._workers.values() for work in worker.running.values()]
        waiting = [entry for lane in self._lanes.values() for entry in _smallest(lane.heap, count)]
        return list(dict.fromkeys([*running, *(work.rollout.task_id for _, _, work in sorted(waiting)[:count])]))

    def impossible(self) -> list[Work]:
        """Takes out and returns the work that would not fit on any worker even if it were empty."""
        if not self._workers:
            return []
        found: list[Work] = []
        for key, lane in list(self._lanes.items()):
            if not any(worker.could_ever(lane.demand) for worker in self._workers.values()):
                found += [work for _, _, work in lane.heap]
                del self._lanes[key]
        self.queued -= len(found)
        return found

    # --- events ---

    def add(self, work: Iterable[Work]) -> None:
        for item in work:
            self._push(item, next(self._number))

    def join(self, worker: int, slots: int, cpus: float | None = None, memory_mb: int | None = None) -> None:
        if worker in self._workers:
            return
        infinite = 1 << 62
        room = Demand(infinite if cpus is None else cpus, infinite if memory_mb is None else memory_mb)
        self._workers[worker] = _Worker(slots, room)
        self.slots += slots
        self._note_free(worker)

    def leave(self, worker: int) -> list[Work]:
        """Takes a worker out; returns what ran there, for the caller to fail."""
        gone = self._workers.pop(worker, None)
        self._kept.pop(worker, None)
        if gone is None:
            return []
        self.slots -= gone.slots
        self.running -= len(gone.running)
        return list(gone.running.values())

    def next(self, remaining_s: float = math.inf, whole_s: float = math.inf) -> tuple[int, Work] | None:
        """Starts the next rollout, or ``None`` while nothing that may start is queued or has room.

        Args:
            remaining_s: until the pod must be empty; what surely takes longer is put aside for another pod,
            whole_s: unless a fresh pod, which has this long, would be too short for it as well.
        """
        if self.running >= self.slots:
            return None
        skipped: list[_Lane] = []
        for lane in self._by_turn():
            if remaining_s < math.inf:
                self._put_aside(lane, remaining_s, whole_s)
            if not lane.heap:
                continue
            rank = self._place(lane)
            if rank is None:
                skipped.append(lane)
                continue
            for passed in skipped:
                passed.overtaken += 1
            lane.overtaken = 0
            return rank, self._start(lane, rank)
        return None

    def finish(self, worker: int, rollout_id: str) -> Work | None:
        """Frees the slot; ``None`` if this worker is not known to run it (a late message: ignore it)."""
        found = self._workers.get(worker)
        work = found.running.pop(rollout_id, None) if found else None
        if found is None or work is None:
            return None
        found.cpus -= work.demand.cpus
        found.memory_mb -= work.demand.memory_mb
        self.running -= 1
        self._note_free(worker)
        return work

    def retry(self, work: Work, kind: str, worker: int | None) -> bool:
        """Queues another attempt after a failure of ``kind`` if that kind has one left."""
        if work.attempt >= RETRIES.get(kind, 0):
            return False
        self._push(replace(work, attempt=work.attempt + 1, avoid=worker), -next(self._number))
        return True

    def clear(self) -> list[Work]:
        """Empties the queue (draining)."""
        dropped = [work for lane in self._lanes.values() for _, _, work in sorted(lane.heap)] + self._too_long
        self._lanes.clear()
        self._kept.clear()
        self._too_long, self.queued = [], 0
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
            lane = self._lanes[key] = _Lane(*key)
        priority = -work.expected_s if self.order == "longest" else 0.0
        if number < 0:  # a retry
            priority = float("-inf")
        heapq.heappush(lane.heap, (priority, number, work))
        self.queued += 1

    def _by_turn(self) -> list[_Lane]:
        """The lanes that may start something, whose turn it is first."""
        lanes = [lane for lane in self._lanes.values() if lane.heap and lane.policy not in self.waiting]
        if len(lanes) < 2:
            return lanes
        if self.order == "fair":
            weights = self._weights
            return sorted(
                lanes,
                key=lambda lane: (self._given[lane.share] / weights.get(lane.share, 1.0), lane.heap[0][:2]),
            )
        return sorted(lanes, key=lambda lane: lane.heap[0][:2])

    def _put_aside(self, lane: _Lane, remaining_s: float, whole_s: float) -> None:
        while lane.heap and remaining_s < self._surely_s(lane.heap[0][2]) <= whole_s:
            self._too_long.append(heapq.heappop(lane.heap)[2])
            self.queued -= 1

    def _place(self, lane: _Lane) -> int | None:
        """The worker for a lane's head; one is kept for it when it has been overtaken too often."""
        avoid = lane.heap[0][2].avoid
        if lane.demand == NOTHING and not self._kept and avoid is None:
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
                if worker.could_ever(lane.demand) and rank not in self._kept
            ]
            if able:
                self._kept[-max(able)[1]] = lane
        return None

    def _most_free(self) -> int | None:
        while self._emptiest:
            free, rank = self._emptiest[0]
            worker = self._workers.get(rank)
            if worker is not None and worker.free == -free and free:
                return rank
            heapq.heappop(self._emptiest)
        return None

    def _note_free(self, rank: int) -> None:
        if len(self._emptiest) > 64 + 4 * len(self._workers):
            self._emptiest = [(-worker.free, other) for other, worker in self._workers.items() if worker.free]
            heapq.heapify(self._emptiest)
        elif self._workers[rank].free:
            heapq.heappush(self._emptiest, (-self._workers[rank].free, rank))

    def _start(self, lane: _Lane, rank: int) -> Work:
        work = heapq.heappop(lane.heap)[2]
        worker = self._workers[rank]
        worker.running[work.rollout.id] = work
        worker.cpus += work.demand.cpus
        worker.memory_mb += work.demand.memory_mb
        self._note_free(rank)
        if self._kept.get(rank) is lane:
            del self._kept[rank]
        self._given[work.share] += work.expected_s or 1.0
        self.queued -= 1
        self.running += 1
        if not lane.heap:
            self._lanes.pop((lane.policy, lane.share, lane.demand), None)
        return work


def _smallest(heap: list[tuple[float, int, Work]], count: int) -> list[tuple[float, int, Work]]:
    """The first ``count`` of a heap in order, without touching the rest."""
    found: list[tuple[float, int, Work]] = []
    frontier = [(heap[0], 0)] if heap else []
    while frontier and len(found) < count:
        entry, place = heapq.heappop(frontier)
        found.append(entry)
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))
    return found
