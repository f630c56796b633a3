"""What one rollout may hold of its gateway at once: calls, bytes of their bodies, and a large answer.

The rest waits its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

CALLS = 64
"""Calls of one rollout that are read, decoded and answered at once."""


class Share:
    """A rollout's calls take turns, first come, first served. Lives in one event loop.

    Args:
        size: Bytes of bodies that its calls may hold together; a single body is no longer.
        calls: Calls at once.
    """

    def __init__(self, size: int, calls: int = CALLS) -> None:
        self._size, self._calls = size, calls
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._answers = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Waits until a call with a body of ``size`` bytes may be read, and holds its part inside the context."""
        if self._waiting or not self._fits(size):
            await self._wait(size)
        else:
            self._take(size)
        try:
            yield
        finally:
            self._give(size)

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Gives a function to await before a large answer is taken in; of those calls one goes on at a time, to the
        context's end."""
        held = False

        async def take() -> None:
            nonlocal held
            if not held:
                await self._answers.acquire()
                held = True

        try:
            yield take
        finally:
            if held:
                self._answers.release()

    def _fits(self, size: int) -> bool:
        return self._calls > 0 and size <= self._size

    def _take(self, size: int) -> None:
        self._calls, self._size = self._calls - 1, self._size - size

    def _give(self, size: int) -> None:
        self._calls, self._size = self._calls + 1, self._size + size
        self._wake()

    async def _wait(self, size: int) -> None:
        """Returns when the part has been taken for this call."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = size
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._give(size)  # its turn came in the same instant
            else:
                self._waiting.pop(future, None)
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting:
            future, size = next(iter(self._waiting.items()))
            if not future.done():
                if not self._fits(size):
                    return
                self._take(size)
                future.set_result(None)
            del self._waiting[future]
