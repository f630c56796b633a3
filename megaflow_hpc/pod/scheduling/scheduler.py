"""Decides which rollout starts on which worker. Deterministic, without I/O or a clock.

Work waits in *lanes*, one for each combination of policy and resource demand. If the head of a lane cannot start,
nothing else in the lane can. The scheduler therefore looks only at the heads, so that a decision takes the same time
for ten waiting rollouts as for a million.

Rollouts start in the order in which their blocks were claimed, on the worker with the most free slots among those with
enough CPUs and memory. If a rollout fits on no worker, smaller ones may overtake it a limited number of times. To
prevent starvation, a worker is then reserved for it. Retries start before any other work, on another worker if
possible. Each cause of failure has its own retry limit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from megaflow_hpc.pod.scheduling.failures import may_retry
from megaflow_hpc.types import Rollout

# --- attempts and the lanes in which they wait ---


class Demand(NamedTuple):
    """CPUs and memory that a rollout needs in addition to a slot."""

    cpus: float = 0.0
    memory_mb: int = 0


NOTHING = Demand()


@dataclass(slots=True)
class Work:
    """One attempt at a rollout from a claimed block."""

    rollout: Rollout
    block: int
    epoch: int
    attempt: int = 0
    avoid: int | None = None
    """Rank of the worker on which the previous attempt failed, or ``None``."""
    demand: Demand = NOTHING
    causes: tuple[str, ...] = ()
    """Failure causes of the earlier attempts, in order."""
    deferred: bool = False
    """True if this work starts only when nothing else can."""
    planned: Any = field(default=None, compare=False, repr=False)
    """The planned task. The scheduler does not inspect it."""


class Entry(NamedTuple):
    """Queued work. The entry that compares lowest starts first. Entry numbers are unique."""

    priority: float
    number: int
    work: Work


class Lane:
    """A priority queue of work with the same policy and demand. If its head cannot start, nothing in the lane can."""

    def __init__(self, policy: str, demand: Demand) -> None:
        self.policy, self.demand = policy, demand
        self._heap: list[Entry] = []
        self._removed: set[int] = set()
        """Numbers of entries that were removed but are still in the heap."""
        self.overtaken = 0
        """Number of starts in other lanes since the head of this lane first found no room."""

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def head(self) -> Entry:
        """The next entry. The lane must not be empty."""
        return self._heap[0]

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)

    def pop(self) -> Work:
        """Removes the next entry and returns its work. The lane must not be empty."""
        entry = heapq.heappop(self._heap)
        self._pop_removed()
        return entry.work

    def remove(self, number: int) -> None:
        """Removes the entry with this number. The entry must be in the lane."""
        self._removed.add(number)
        self._pop_removed()

    def entries(self) -> list[Entry]:
        """Returns all entries in arbitrary order."""
        return [entry for entry in self._heap if entry.number not in self._removed]

    def _pop_removed(self) -> None:
        while self._heap and self._heap[0].number in self._removed:
            self._removed.discard(heapq.heappop(self._heap).number)


# --- the workers ---


MAX_OVERTAKEN = 64
"""After this many starts of other rollouts, a worker is reserved for a rollout that does not fit."""


@dataclass(slots=True)
class _Worker:
    slots: int
    cpus: float
    memory_mb: float
    running: dict[str, Work] = field(default_factory=dict)
    used_cpus: float = 0.0
    used_memory_mb: int = 0

    @property
    def free(self) -> int:
        """Number of free slots."""
        return max(0, self.slots - len(self.running))

    def has_room(self, demand: Demand) -> bool:
        """Returns true if work with this demand can start on this worker now."""
        return (
            self.free > 0
            and self.used_cpus + demand.cpus <= self.cpus
            and self.used_memory_mb + demand.memory_mb <= self.memory_mb
        )

    def could_ever(self, demand: Demand) -> bool:
        """Returns true if work with this demand could start on this worker if it were idle."""
        return demand.cpus <= self.cpus and demand.memory_mb <= self.memory_mb


class Workers:
    """The workers of one pod and their slots."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._reserved: dict[int, Lane] = {}
        """Lane for which each reserved worker is reserved, by worker."""
        self.running = 0
        """Number of running attempts."""
        self.slots = 0
        self.free = 0
        """Number of free slots."""

    def __len__(self) -> int:
        return len(self._workers)

    def worker_of(self, rollout_id: str) -> int | None:
        """Returns the worker that runs the rollout, or ``None`` if the rollout is not running."""
        return next((rank for rank, worker in self._workers.items() if rollout_id in worker.running), None)

    def running_work(self) -> list[Work]:
        """Returns all running attempts."""
        return [work for worker in self._workers.values() for work in worker.running.values()]

    def could_ever(self, demand: Demand) -> bool:
        """Returns true if work with this demand could start on any worker if it were idle."""
        return any(worker.could_ever(demand) for worker in self._workers.values())

    # --- workers come and go ---

    def join(self, worker: int, slots: int, cpus: float | None = None, memory_mb: int | None = None) -> None:
        """Adds a worker. Repeated calls for the same worker have no effect.

        Args:
            worker: Rank of the worker.
            slots: Maximum number of rollouts that it runs at the same time.
            cpus: Number of CPUs that its rollouts share. ``None`` means unlimited.
            memory_mb: Memory in MB that its rollouts share. ``None`` means unlimited.
        """
        if worker in self._workers:
            return
        unlimited = math.inf
        self._workers[worker] = _Worker(
            slots, unlimited if cpus is None else cpus, unlimited if memory_mb is None else memory_mb
        )
        self.slots += slots
        self.free += slots

    def leave(self, worker: int) -> list[Work]:
        """Removes a worker. Returns the work that was running on it, whose failure the caller must handle."""
        gone = self._workers.pop(worker, None)
        self._reserved.pop(worker, None)
        if gone is None:
            return []
        self.slots -= gone.slots
        self.free -= gone.free
        self.running -= len(gone.running)
        return list(gone.running.values())

    def exclude(self, worker: int) -> None:
        """Stops starting work on a worker. Rollouts that are already running on it continue."""
        excluded = self._workers[worker]
        self._reserved.pop(worker, None)
        self.slots -= excluded.slots
        self.free -= excluded.free
        excluded.slots = 0

    # --- starts and ends ---

    def place(self, lane: Lane) -> int | None:
        """Returns a worker for the lane's head, or ``None`` if no worker has room.

        Prefers workers on which the head has not failed. If other lanes have overtaken this lane :data:`MAX_OVERTAKEN`
        times and no worker has room, reserves a worker for the lane.
        """
        avoid = lane.head.work.avoid
        best: tuple[bool, int, int] | None = None
        best_rank = None
        for rank, worker in self._workers.items():
            if worker.has_room(lane.demand) and self._reserved.get(rank, lane) is lane:
                score = rank != avoid, worker.free, -rank
                if best is None or score > best:
                    best, best_rank = score, rank
        if best_rank is None and lane.overtaken >= MAX_OVERTAKEN:
            self._reserve(lane)
        return best_rank

    def _reserve(self, lane: Lane) -> None:
        if lane in self._reserved.values():
            return
        able = [
            (worker.free, -rank)
            for rank, worker in self._workers.items()
            if worker.could_ever(lane.demand) and rank not in self._reserved and worker.slots
        ]
        if able:
            _, negative_rank = max(able)
            self._reserved[-negative_rank] = lane

    def start(self, work: Work, rank: int, lane: Lane) -> None:
        """Assigns a lane's work to a slot of a worker, and ends the lane's reservation of that worker."""
        worker = self._workers[rank]
        worker.running[work.rollout.id] = work
        worker.used_cpus += work.demand.cpus
        worker.used_memory_mb += work.demand.memory_mb
        self.running += 1
        self.free -= 1
        if self._reserved.get(rank) is lane:
            del self._reserved[rank]

    def finish(self, rank: int, rollout_id: str) -> Work | None:
        """Frees the rollout's slot and returns its work. Returns ``None`` if the worker is not running the rollout.
        This happens if the message is late."""
        worker = self._workers.get(rank)
        if worker is None or rollout_id not in worker.running:
            return None
        free = worker.free
        work = worker.running.pop(rollout_id)
        worker.used_cpus -= work.demand.cpus
        worker.used_memory_mb -= work.demand.memory_mb
        self.running -= 1
        self.free += worker.free - free
        return work

    def reserve_none(self) -> None:
        """Cancels all reservations. Called when the queue is emptied."""
        self._reserved.clear()


# --- the scheduler ---


DEFERRED = 1.0
"""Priority of rollouts that run only when nothing else is ready. Other rollouts have priority 0."""


class Scheduler:
    """The queue of one pod, and the slots of its workers.

    Args:
        surely_s: Function that returns a duration in seconds that the work is very unlikely to exceed, or 0 if unknown.
    """

    def __init__(self, surely_s: Callable[[Work], float] = lambda work: 0.0) -> None:
        self._surely_s = surely_s
        self._lanes: dict[tuple[str, Demand], Lane] = {}
        self._queued: dict[str, tuple[Lane, Entry]] = {}
        """Lane and entry of each queued rollout, by rollout id."""
        self.workers = Workers()
        self._number = count(1)
        self._too_long: list[Work] = []
        self.deferred = 0
        """Number of queued rollouts that start only when nothing else can."""
        self.waiting: set[str] = set()
        """Policies whose rollouts wait because no engine serves them yet."""
        self.judges: frozenset[str] = frozenset()
        """Policies that judge rollouts, and services of the campaign. No rollout starts while any of them is in
        :attr:`waiting`."""

    # --- the queue ---

    @property
    def queued(self) -> int:
        """Number of queued rollouts."""
        return len(self._queued)

    @property
    def too_long(self) -> int:
        """Number of rollouts that were set aside because they would not end in time."""
        return len(self._too_long)

    def waiting_work(self) -> list[Work]:
        """Returns the queued work in order of priority, whether or not slots and engines are available."""
        return [entry.work for entry in sorted(entry for lane in self._lanes.values() for entry in lane.entries())]

    def coming(self, count: int) -> list[Any]:
        """Returns the planned tasks of the running rollouts and the next ``count`` rollouts, without duplicates."""
        works = [*self.workers.running_work(), *self.waiting_work()[:count]]
        return list({work.rollout.task_id: work.planned for work in works}.values())

    def remove_impossible(self) -> list[Work]:
        """Removes and returns the work that would not fit even on an idle worker."""
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
            self._push(Entry(DEFERRED if work.deferred else 0.0, next(self._number), work))

    def retry(self, work: Work, cause: str, worker: int | None) -> bool:
        """Queues another attempt after a failure with this cause. Returns false if no retries are left."""
        causes = (*work.causes, cause)
        if not may_retry(causes):
            return False
        again = replace(work, attempt=work.attempt + 1, avoid=worker, causes=causes, deferred=False)
        self._push(Entry(-math.inf, -next(self._number), again))
        return True

    def next(self, remaining_s: float = math.inf, whole_s: float = math.inf) -> tuple[int, Work] | None:
        """Starts the next rollout. Returns its worker and work, or ``None`` if no queued rollout can start now.

        Args:
            remaining_s: Seconds until the pod must be empty. Rollouts that would take longer are set aside for another
                pod, unless they are too long for a new pod too.
            whole_s: Seconds available in a new pod.
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
            self.workers.start(work, rank, lane)
            return rank, work
        return None

    def drop(self, rollout_id: str) -> Work | None:
        """Removes a queued rollout and returns its work. Returns ``None`` if the rollout is not queued."""
        if rollout_id not in self._queued:
            return None
        lane, entry = self._queued[rollout_id]
        lane.remove(entry.number)
        self._forget(lane, entry.work)
        return entry.work

    def clear(self) -> list[Work]:
        """Empties the queue when the pod drains. Returns all queued work, including work that was set aside."""
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
            lane = self._lanes[policy, work.demand] = Lane(policy, work.demand)
        lane.push(entry)
        self._queued[work.rollout.id] = lane, entry
        self.deferred += work.deferred

    def _pop(self, lane: Lane) -> Work:
        work = lane.pop()
        self._forget(lane, work)
        return work

    def _forget(self, lane: Lane, work: Work) -> None:
        """Updates the bookkeeping for work that leaves the queue."""
        del self._queued[work.rollout.id]
        self.deferred -= work.deferred
        if not lane:
            del self._lanes[lane.policy, lane.demand]

    def _ready_lanes(self) -> list[Lane]:
        """Returns the lanes whose policy is ready, in scheduling order."""
        if self.waiting & self.judges:
            return []  # a finished rollout could not be verified
        lanes = [lane for lane in self._lanes.values() if lane.policy not in self.waiting]
        lanes.sort(key=lambda lane: lane.head[:2])
        return lanes

    def _put_aside(self, lane: Lane, remaining_s: float, whole_s: float) -> None:
        while lane and remaining_s < self._surely_s(lane.head.work) <= whole_s:
            self._too_long.append(self._pop(lane))
