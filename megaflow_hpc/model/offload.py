"""Runs work on large documents in a thread, so that the event loop serves other calls meanwhile.

One thread does all of it: each further thread would compete with the event loop for the interpreter's lock. So a large
document waits for the large documents before it, and a small one waits for none. Decoders and encoders hold the lock
until they return. The limits of :mod:`.json_text` bound that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
OFFLOAD_BYTES = 2**20
"""The event loop itself handles documents up to this size."""
_thread = ThreadPoolExecutor(1, "large-documents")


async def offload(size: int, work: Callable[..., T], *args: Any) -> T:
    """Calls ``work``, in the thread if the document that it handles has more than :data:`OFFLOAD_BYTES`.

    Args:
        size: Bytes of the document, or :func:`~megaflow_hpc.model.json_text.effort`.
    """
    if size <= OFFLOAD_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *args)
