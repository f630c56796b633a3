"""Bounded waits for a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], object], what: str, timeout_s: float = 120.0, every_s: float = 0.1) -> None:
    """Wait until ``condition()`` is true. After ``timeout_s`` the test fails with ``what`` in the message."""
    assert eventually(condition, timeout_s, every_s), f"{what}: not within {timeout_s:g} s"


def eventually(condition: Callable[[], object], timeout_s: float = 30.0, every_s: float = 0.1) -> bool:
    """Return whether ``condition()`` becomes true within ``timeout_s``; it is polled every ``every_s`` seconds.

    A condition that takes long, such as a query of Slurm, is polled less often: a fifth of the time at most.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if condition():
            return True
        if (now := time.monotonic()) > deadline:
            return False
        time.sleep(max(every_s, min(2.0, 4 * (now - began))))


async def until_async(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Do the same as :func:`until` without blocking the event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        await asyncio.sleep(0.005)


def some_at_a_time(number: int, works: Iterable[Awaitable[T]]) -> list[Awaitable[T]]:
    """Return the same awaitables, of which at most ``number`` run at once."""
    turns = asyncio.Semaphore(number)

    async def one(work: Awaitable[T]) -> T:
        async with turns:
            return await work

    return [one(work) for work in works]
