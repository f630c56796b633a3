"""The ranks of a pod as seen by rank 0. A rank is awaited, ready, silent or lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

from megaflow_hpc.host.wire import Message
from megaflow_hpc.pod.comm import BEAT, BEAT_S, STOP, Comm

LOST_S = 30.0
"""A rank counts as lost after this many seconds without a heartbeat."""
JOIN_S = 120.0
"""A worker that is not ready after this many seconds counts as lost. The time to stage its first image does not
count."""


class Ranks:
    """All ranks of the pod except rank 0."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._began_at = time.monotonic()
        self._beaten_at = -BEAT_S
        self.heard_at: dict[int, float] = {}
        """Monotonic time of each rank's last message, by rank."""
        self.awaited = set(range(1, comm.size))
        """Ranks that are not ready yet."""
        self._engines: set[int] = set()
        self.ready: dict[int, str] = {}
        """Node name of each ready worker rank, by rank."""

    def greet(self, init: Message) -> None:
        """Sends the ``init`` message with the campaign to every awaited rank."""
        for rank in self.awaited:
            self._comm.send(rank, init)

    def join(self, rank: int, node: str) -> None:
        """Records that a worker rank is ready."""
        self.awaited.discard(rank)
        self.ready[rank] = node

    def accompany(self, rank: int) -> None:
        """Records that a rank runs an engine server. This rank runs no rollouts and ends with the pod."""
        self.awaited.discard(rank)
        self._engines.add(rank)

    def leave(self, rank: int) -> None:
        """Removes a rank that has left or was lost."""
        self.awaited.discard(rank)
        self._engines.discard(rank)
        self.ready.pop(rank, None)

    @property
    def all(self) -> list[int]:
        """Worker ranks that are ready or awaited."""
        return [*self.ready, *self.awaited]

    @property
    def everyone(self) -> list[int]:
        """Worker ranks that are ready or still expected to join, and ranks that run an engine server."""
        return [*self.all, *self._engines]

    def tell(self, message: Message | bytes) -> None:
        """Sends a message to every ready worker rank and to every rank with an engine server."""
        for rank in [*self.ready, *self._engines]:
            self._comm.send(rank, message)

    def stop(self) -> None:
        """Tells every rank to leave, including ranks that are not ready yet."""
        for rank in self.everyone:
            self._comm.send(rank, STOP)

    def beat(self) -> None:
        """Sends a heartbeat to every rank if one is due."""
        if time.monotonic() - self._beaten_at >= BEAT_S:
            self._beaten_at = time.monotonic()
            for rank in self.everyone:
                self._comm.send(rank, BEAT)

    def lost(self) -> Iterator[tuple[int, str]]:
        """Yields (rank, reason) for each rank that has been silent for too long."""
        now = time.monotonic()
        for rank in list(self.ready):
            if now - self.heard_at.get(rank, now) > LOST_S:
                yield rank, f"no heartbeat for {LOST_S:.0f} s"
        if now - self._began_at > JOIN_S:
            for rank in list(self.awaited):
                yield rank, f"not ready after {JOIN_S:.0f} s"
