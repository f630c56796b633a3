"""Rollout attempts, their resource demands, and the lanes in which they wait. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaflow_hpc.types import Rollout


class Demand(NamedTuple):
    """Resources that a rollout needs in addition to its slot."""

    cpus: float = 0.0
    memory_mb: int = 0


NOTHING = Demand()


@dataclass(slots=True)
class Work:
    """One attempt at a rollout, under a claim."""

    rollout: Rollout
    block: int
    epoch: int
    attempt: int = 0
    avoid: int | None = None
    """Worker on which the last attempt failed."""
    expected_s: float = 0.0
    """Expected duration in seconds. 0 if unknown."""
    demand: Demand = NOTHING
    causes: tuple[str, ...] = ()
    """Causes of the failed earlier attempts."""
    deferred: bool = False
    """Whether to start this work only when nothing else is ready."""
    planned: Any = field(default=None, compare=False, repr=False)
    """The planned task, for the dispatcher. Opaque to the scheduler."""


class Entry(NamedTuple):
    """Queued work, ordered so that the smallest entry is next. Numbers are unique."""

    priority: float
    number: int
    work: Work


class Lane:
    """A priority queue of work with the same policy and demand. If its head cannot start, nothing in the lane can."""

    def __init__(self, policy: str, demand: Demand) -> None:
        self.policy, self.demand = policy, demand
        self._heap: list[Entry] = []
        self._removed: set[int] = set()
        """Numbers of removed entries that are still in the heap."""
        self.overtaken = 0
        """Number of times that other lanes started work since the head of this lane did not fit."""

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def head(self) -> Entry:
        """The next entry. The lane must not be empty."""
        return self._heap[0]

    def push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)

    def pop(self) -> Work:
        """Removes and returns the next entry. The lane must not be empty."""
        entry = heapq.heappop(self._heap)
        self._pop_removed()
        return entry.work

    def remove(self, number: int) -> None:
        """Removes the entry with this number, which must be in the lane."""
        self._removed.add(number)
        self._pop_removed()

    def entries(self) -> list[Entry]:
        """Returns all entries in arbitrary order."""
        return [entry for entry in self._heap if entry.number not in self._removed]

    def _pop_removed(self) -> None:
        while self._heap and self._heap[0].number in self._removed:
            self._removed.discard(heapq.heappop(self._heap).number)
