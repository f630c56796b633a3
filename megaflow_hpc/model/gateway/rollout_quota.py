"""Limits what one rollout may hold of its gateway: calls, bytes of their bodies, and one large answer.

Further calls of the rollout wait, so the other rollouts of the rank are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

MAX_CALLS = 64
"""Calls of one rollout that are read, decoded and answered at once."""


class RolloutQuota:
    """The quota of one rollout. Calls that exceed it wait, first come, first served. Lives in one event loop.

    Args:
        size: Bytes that the bodies of all calls may have together, and so the largest single body.
        calls: Calls at once.
    """

    def __init__(self, size: int, calls: int = MAX_CALLS) -> None:
        self._size, self._calls = size, calls
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._answers = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Waits until a call with a body of ``size`` bytes may be read, and holds that part of the quota."""
        if self._waiting or not self._fits(size):
            await self._wait(size)
        else:
            self._take(size)
        try:
            yield
        finally:
            self._give(size)

    @asynccontextmanager
    async def large_answer(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Yields a function to await before a large answer is read.

        The function returns for one call at a time, until that call's context ends.
        """
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
        """Returns once the quota has room for the call and the call holds its part."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = size
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._give(size)  # it got its part in the same instant
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
