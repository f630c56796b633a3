"""Server-sent events to an agent that asked for a stream.

The engine gives the whole answer at once. Nothing is sent while it is awaited, so that a failure is an ordinary HTTP
error. After ``QUIET_S`` the stream opens with a comment, which clients skip, repeated every ``QUIET_S``, so that no
client takes the wait for a dead connection. A later failure is an event of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from aiohttp import web

from megaflow_hpc.model.gateway.dialects import Event
from megaflow_hpc.model.gateway.http_messages import taken
from megaflow_hpc.model.gateway.protocols import Answer
from megaflow_hpc.model.json_text import packed
from megaflow_hpc.model.offload import offload

QUIET_S = 20.0
"""Seconds of waiting after which a comment is sent."""


async def send(
    request: web.BaseRequest,
    answer: Awaitable[Answer],
    events: Callable[[dict[str, Any]], Iterator[Event]],
    failed: Callable[[Exception], Event],
) -> web.StreamResponse:
    """Streams the events of an answer.

    Args:
        request: The agent's request.
        answer: The engine's answer, awaited here.
        events: Makes the stream's events of it.
        failed: Makes an event of an exception raised after the stream has begun.

    Raises:
        Exception: As ``answer`` does while no byte has been sent.
    """
    work = asyncio.ensure_future(answer)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        with contextlib.suppress(ConnectionResetError):  # the agent has left: there is nobody to tell
            while not (await asyncio.wait({work}, timeout=QUIET_S))[0]:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": still working\n\n")
            try:
                reply = work.result()
                body = await offload(reply.size, lambda: _encoded(events(reply.body)))
            except Exception as error:
                if not response.prepared:
                    raise
                body = encode(*failed(error))
            async with taken(request):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(body)
                await response.write_eof()
        return response
    finally:
        work.cancel()


def _encoded(events: Iterator[Event]) -> bytes:
    """Encodes the events of an answer. They are written at once, so that a small answer is one packet."""
    return b"".join(encode(name, data) for name, data in events)


def encode(name: str, data: Any) -> bytes:
    """Encodes one server-sent event; text is sent as it is, other data as JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, data.encode() if isinstance(data, str) else packed(data))
