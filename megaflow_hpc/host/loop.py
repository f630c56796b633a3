"""Waits in a thread for work of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from megaflow_hpc.errors import UserCodeError

T = TypeVar("T")


def blocking(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Waits in a thread for work in an event loop.

    Raises:
        UserCodeError: called in the loop's own thread, where it would wait for itself.
    """
    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    work.close()
    raise UserCodeError(f"a call that blocks was made in {here}; write the method as async def, and await the call")
