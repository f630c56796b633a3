"""Runs coroutines in an event loop from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from megaflow_hpc.errors import UserCodeError

T = TypeVar("T")


def blocking(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Runs a coroutine in an event loop, and blocks the calling thread until it is done.

    Raises:
        UserCodeError: Called in the loop's own thread, which would deadlock.
    """
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    work.close()
    raise UserCodeError(f"a call that blocks was made in {here}; write the method as async def, and await the call")
