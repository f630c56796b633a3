"""Lanes: each is a queue of work that is alike in all that decides whether it may start. Pure."""

from __future__ import annotations

import heapq

from megaflow_hpc.pod.scheduling.work import Demand, Work

Entry = tuple[float, int, Work]
"""(priority, number, work): the smallest is next; numbers are unique."""


class Lane:
    """A heap out of which work can also be taken by number; what was taken stays inside until it comes to the top."""

    __slots__ = ("_heap", "_taken", "demand", "overtaken", "policy", "share")

    def __init__(self, policy: str, share: str, demand: Demand) -> None:
        self.policy, self.share, self.demand = policy, share, demand
        self._heap: list[Entry] = []
        self._taken: set[int] = set()
        """Numbers of entries that count no more."""
        self.overtaken = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def head(self) -> Entry:
        """What is next; the lane must not be empty."""
        return self._heap[0]

    def push(self, priority: float, number: int, work: Work) -> None:
        """Puts work in, under a number that no other entry has."""
        heapq.heappush(self._heap, (priority, number, work))

    def pop(self) -> Entry:
        """Takes out what is next; the lane must not be empty."""
        entry = heapq.heappop(self._heap)
        self._clear_top()
        return entry

    def take(self, number: int) -> None:
        """Takes out the entry of this number, which must be in the lane."""
        self._taken.add(number)
        self._clear_top()

    def entries(self) -> list[Entry]:
        """Returns what waits, in order."""
        return sorted(entry for entry in self._heap if entry[1] not in self._taken)

    def first(self, count: int) -> list[Entry]:
        """Returns about the first ``count`` in order, without touching the rest."""
        return [entry for entry in smallest(self._heap, count) if entry[1] not in self._taken]

    def _clear_top(self) -> None:
        while self._taken and self._heap and self._heap[0][1] in self._taken:
            self._taken.discard(heapq.heappop(self._heap)[1])


def smallest(heap: list[Entry], count: int) -> list[Entry]:
    """Returns the first ``count`` of a heap in order, without touching the rest."""
    found: list[Entry] = []
    frontier = [(heap[0], 0)] if heap else []
    while frontier and len(found) < count:
        entry, place = heapq.heappop(frontier)
        found.append(entry)
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))
    return found
