"""The body of a request from somebody else: read whole, within limits that are kept before it costs much."""

from __future__ import annotations

import asyncio

from aiohttp import web

READ_S = 120.0
"""Seconds for the whole of a body."""


class BadBody(Exception):
    """A body is refused.

    Args:
        status: HTTP status.
        message: Why.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the request's body: {message}")
        self.status = status


async def read_body(request: web.BaseRequest, most: int) -> bytes | bytearray:
    """Returns the whole body of a request, decompressed.

    Args:
        most: Bytes.

    Raises:
        BadBody: It is longer, malformed, or not there within :data:`READ_S`.
    """
    try:
        if request.content.is_eof():  # all of it came with the head, as is usual: a timer would cost more than reading
            return await _read(request, most)
        async with asyncio.timeout(READ_S):
            return await _read(request, most)
    except web.RequestPayloadError:
        raise BadBody(400, "malformed") from None
    except TimeoutError:
        raise BadBody(408, f"not whole within {READ_S:g} s") from None


async def _read(request: web.BaseRequest, most: int) -> bytes | bytearray:
    body: bytes | bytearray
    first = body = await request.content.readany()
    if len(first) > most or (first and not request.content.is_eof()):
        body = bytearray(first)  # grows as parts come, so that a long one is never copied at once
        while len(body) <= most and (part := await request.content.readany()):
            body += part
    if len(body) > most:
        raise BadBody(413, f"longer than {most >> 20} MiB")
    return body
