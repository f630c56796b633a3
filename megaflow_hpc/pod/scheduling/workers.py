"""The workers of one pod: their slots, what runs on them, and which of them takes the next rollout. Pure.

A rollout goes to the worker with most free slots among those with room for its cpus and memory. Smaller rollouts
overtake one that needs more room than is free only so often; then a worker is kept free for it (no starvation).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from megaflow_hpc.pod.scheduling.queues import Lane
from megaflow_hpc.pod.scheduling.work import NOTHING, Demand, Work

OVERTAKEN = 64
"""Starts that may overtake a rollout for which there is no room, before a worker is kept for it."""


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


class Workers:
    """The slots of one pod."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._emptiest: list[tuple[int, int]] = []
        """(-free slots, worker): a heap in which entries of the past are skipped."""
        self._kept: dict[int, Lane] = {}
        """Worker → the lane it is kept free for."""
        self.running = 0
        """Attempts that run."""
        self.slots = 0
        self.free = 0
        """Slots in which nothing runs."""

    def __len__(self) -> int:
        return len(self._workers)

    # --- what runs ---

    def running_on(self, worker: int) -> dict[str, Work]:
        """Returns what runs on a worker, by rollout id."""
        return dict(self._workers[worker].running)

    def worker_of(self, rollout_id: str) -> int | None:
        """Returns the worker that runs a rollout, or ``None`` if none does."""
        return next((rank for rank, worker in self._workers.items() if rollout_id in worker.running), None)

    def running_work(self) -> list[Work]:
        """Returns every attempt that runs."""
        return [work for worker in self._workers.values() for work in worker.running.values()]

    def could_ever(self, demand: Demand) -> bool:
        """Returns whether work of this demand could start somewhere if nothing else ran."""
        return any(worker.could_ever(demand) for worker in self._workers.values())

    # --- who comes and goes ---

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

    # --- starts and ends ---

    def place(self, lane: Lane) -> int | None:
        """Returns the worker for a lane's head; one is kept for it when it has been overtaken too often."""
        work = lane.head[2]
        avoid = work.avoid
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

    def start(self, work: Work, rank: int, lane: Lane | None = None) -> None:
        """Fills a slot of a worker.

        Args:
            lane: that the work comes from; the worker is not kept for it any more.
        """
        worker = self._workers[rank]
        worker.running[work.rollout.id] = work
        worker.cpus += work.demand.cpus
        worker.memory_mb += work.demand.memory_mb
        self.running += 1
        worker.free -= 1
        self.free -= 1
        self._note_free(rank)
        if lane is not None and self._kept.get(rank) is lane:
            del self._kept[rank]

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

    def keep_none(self) -> None:
        """Keeps no worker free for a lane any more: there is none."""
        self._kept.clear()

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
