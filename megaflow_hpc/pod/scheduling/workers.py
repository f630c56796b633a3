"""The workers of one pod: their slots, their running work, and the choice of a worker for the next rollout. Pure.

A rollout goes to the worker with the most free slots that has enough CPUs and memory. If a rollout does not fit,
smaller ones may overtake it a limited number of times. Then a worker is reserved for it to prevent starvation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megaflow_hpc.pod.scheduling.work import Demand, Lane, Work

MAX_OVERTAKEN = 64
"""Number of starts that may overtake a rollout that does not fit, before a worker is reserved for it."""


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
        """Returns True if work with this demand can start now."""
        return (
            self.free > 0
            and self.used_cpus + demand.cpus <= self.cpus
            and self.used_memory_mb + demand.memory_mb <= self.memory_mb
        )

    def could_ever(self, demand: Demand) -> bool:
        """Returns True if work with this demand could start on an idle worker."""
        return demand.cpus <= self.cpus and demand.memory_mb <= self.memory_mb


class Workers:
    """All worker slots of one pod."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._reserved: dict[int, Lane] = {}
        """Worker → lane for which it is reserved."""
        self.running = 0
        """Number of running attempts."""
        self.slots = 0
        self.free = 0
        """Number of free slots."""

    def __len__(self) -> int:
        return len(self._workers)

    def worker_of(self, rollout_id: str) -> int | None:
        """Returns the worker that runs a rollout, or ``None`` if the rollout is not running."""
        return next((rank for rank, worker in self._workers.items() if rollout_id in worker.running), None)

    def running_work(self) -> list[Work]:
        """Returns all running attempts."""
        return [work for worker in self._workers.values() for work in worker.running.values()]

    def could_ever(self, demand: Demand) -> bool:
        """Returns True if work with this demand could start on some idle worker."""
        return any(worker.could_ever(demand) for worker in self._workers.values())

    # --- workers come and go ---

    def join(self, worker: int, slots: int, cpus: float | None = None, memory_mb: int | None = None) -> None:
        """Adds a worker. Ignores repeated calls for the same worker.

        Args:
            cpus: CPUs that its rollouts share. If ``None``, unlimited.
            memory_mb: memory in MB that its rollouts share. If ``None``, unlimited.
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
        """Removes a worker. Returns the work that was running there. The caller handles its failure."""
        gone = self._workers.pop(worker, None)
        self._reserved.pop(worker, None)
        if gone is None:
            return []
        self.slots -= gone.slots
        self.free -= gone.free
        self.running -= len(gone.running)
        return list(gone.running.values())

    def exclude(self, worker: int) -> None:
        """Starts no more work on a worker. Its running rollouts continue."""
        excluded = self._workers[worker]
        self._reserved.pop(worker, None)
        self.slots -= excluded.slots
        self.free -= excluded.free
        excluded.slots = 0

    # --- starts and ends ---

    def place(self, lane: Lane) -> int | None:
        """Returns a worker for a lane's head, preferably not the one on which it failed. ``None`` if no worker fits.
        In that case, a worker is reserved after :data:`MAX_OVERTAKEN` starts in other lanes."""
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
        """Assigns a rollout of a lane to a slot of a worker, and releases the lane's reservation."""
        worker = self._workers[rank]
        worker.running[work.rollout.id] = work
        worker.used_cpus += work.demand.cpus
        worker.used_memory_mb += work.demand.memory_mb
        self.running += 1
        self.free -= 1
        if self._reserved.get(rank) is lane:
            del self._reserved[rank]

    def finish(self, rank: int, rollout_id: str) -> Work | None:
        """Frees the slot of a rollout. Returns ``None`` if the worker does not run it, for example because the
        message is late."""
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
        """Cancels all reservations, because the queue is empty."""
        self._reserved.clear()
