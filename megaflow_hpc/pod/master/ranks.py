"""The worker ranks of a pod as rank 0 knows them: who is awaited, who was heard of last when, who is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from megaflow_hpc.host.wire import Message
from megaflow_hpc.pod.comm import BEAT_S, Comm
from megaflow_hpc.pod.messages import BEAT

LOST_S = 30.0
JOIN_S = 120.0
"""A worker that has not reported ready after this long is given up; a first image may have to be staged later."""


class Ranks:
    """Knows the world, not what runs in it."""

    def __init__(self, comm: Comm, clock: Callable[[], float] = time.monotonic) -> None:
        self._comm, self._clock = comm, clock
        self._began = clock()
        self._beaten = -BEAT_S
        self.heard: dict[int, float] = {}
        self.awaited = set(range(1, comm.size))
        """Told of the campaign and not ready yet."""
        self._engines: set[int] = set()
        self.ready: dict[int, str] = {}
        """Rank → its node."""

    def greet(self, init: Message) -> None:
        for rank in self.awaited:
            self._comm.send(rank, init)

    def join(self, rank: int, node: str) -> None:
        self.awaited.discard(rank)
        self.ready[rank] = node

    def accompany(self, rank: int) -> None:
        """It keeps an engine server, runs nothing, and ends with the pod."""
        self.awaited.discard(rank)
        self._engines.add(rank)

    def leave(self, rank: int) -> None:
        self.awaited.discard(rank)
        self._engines.discard(rank)
        self.ready.pop(rank, None)

    @property
    def all(self) -> list[int]:
        return [*self.ready, *self.awaited]

    def tell(self, message: Message | bytes) -> None:
        """Sends to every rank that is ready."""
        for rank in [*self.ready, *self._engines]:
            self._comm.send(rank, message)

    def beat(self) -> None:
        """Says that rank 0 is there, when that is due."""
        if self._clock() - self._beaten >= BEAT_S:
            self._beaten = self._clock()
            for rank in [*self.all, *self._engines]:
                self._comm.send(rank, BEAT)

    def lost(self) -> Iterator[tuple[int, str]]:
        """Ranks that have been silent for too long, and why they are given up."""
        now = self._clock()
        for rank in list(self.ready):
            if now - self.heard.get(rank, now) > LOST_S:
                yield rank, f"no heartbeat for {LOST_S:.0f} s"
        if now - self._began > JOIN_S:
            for rank in list(self.awaited):
                yield rank, f"not ready after {JOIN_S:.0f} s"
