"""Which rollout starts where: pure, deterministic, no I/O, no clock of its own.

FIFO over the blocks a pod holds, onto the worker with most free slots. Failures are retried at the front of the queue,
elsewhere if there is an elsewhere, a bounded number of times by cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megaflow_hpc.types import Rollout

RETRIES = {"sandbox": 2, "model": 2, "node": 2, "verifier": 1}
"""Further attempts after a failure of this kind; other kinds are final at once."""


@dataclass(frozen=True)
class Work:
    """One attempt at a rollout under a claim."""

    rollout: Rollout
    block: int
    epoch: int
    attempt: int = 0
    avoid: int | None = None
    """Worker on which the last attempt failed."""


@dataclass
class _Worker:
    slots: int
    running: dict[str, Work] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.slots - len(self.running)


class Scheduler:
    """The queue of one pod and the slots of its workers."""

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()
        self._workers: dict[int, _Worker] = {}
        self.waiting: set[str] = set()
        """Policies whose rollouts are held back, because no engine of theirs answers yet."""

    # --- what there is ---

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return sum(len(worker.running) for worker in self._workers.values())

    @property
    def slots(self) -> int:
        return sum(worker.slots for worker in self._workers.values())

    @property
    def workers(self) -> list[int]:
        return list(self._workers)

    def running_on(self, worker: int) -> dict[str, Work]:
        return dict(self._workers[worker].running)

    # --- events ---

    def add(self, work: Iterable[Work]) -> None:
        self._queue.extend(work)

    def join(self, worker: int, slots: int) -> None:
        self._workers.setdefault(worker, _Worker(slots))

    def leave(self, worker: int) -> list[Work]:
        """Takes a worker out; returns what ran there, for the caller to fail."""
        gone = self._workers.pop(worker, None)
        return list(gone.running.values()) if gone else []

    def next(self) -> tuple[int, Work] | None:
        """Starts the next rollout, or ``None`` while nothing that may start is queued or no slot is free."""
        if not self._queue:
            return None
        free = [(worker.free, -rank) for rank, worker in self._workers.items() if worker.free > 0]
        if not free:
            return None
        index = next((i for i, work in enumerate(self._queue) if work.rollout.policy not in self.waiting), None)
        if index is None:
            return None
        work = self._queue[index]
        del self._queue[index]
        others = [pair for pair in free if -pair[1] != work.avoid]
        rank = -max(others or free)[1]
        self._workers[rank].running[work.rollout.id] = work
        return rank, work

    def finish(self, worker: int, rollout_id: str) -> Work | None:
        """Frees the slot; ``None`` if this worker is not known to run it (a late message: ignore it)."""
        found = self._workers.get(worker)
        return found.running.pop(rollout_id, None) if found else None

    def retry(self, work: Work, kind: str, worker: int | None) -> bool:
        """Queues another attempt after a failure of ``kind`` if that kind has one left."""
        if work.attempt >= RETRIES.get(kind, 0):
            return False
        self._queue.appendleft(replace(work, attempt=work.attempt + 1, avoid=worker))
        return True

    def clear(self) -> list[Work]:
        """Empties the queue (draining)."""
        dropped = list(self._queue)
        self._queue.clear()
        return dropped
