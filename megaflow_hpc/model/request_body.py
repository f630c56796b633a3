"""The body of a request from somebody else: read whole, within limits that are kept before it costs much."""

from __future__ import annotations

import asyncio

from aiohttp import web

READ_S = 120.0
"""Seconds for the whole of a body."""
UNCOUNTED = 256 * 2**10
"""Bytes of JSON that cannot hold enough values to matter."""
MAX_OBJECTS, MAX_VALUES = 100_000, 2_000_000
"""Arrays and objects, and values after a comma, in one body: an empty array is 3 bytes of JSON and 80 of memory."""


class BadBody(Exception):
    """A body is refused.

    Args:
        status: HTTP status.
        message: Why.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the request's body: {message}")
        self.status = status


async def read_body(request: web.BaseRequest, most: int) -> bytes:
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


async def _read(request: web.BaseRequest, most: int) -> bytes:
    parts, size = [], 0
    while part := await request.content.readany():
        size += len(part)
        if size > most:
            raise BadBody(413, f"longer than {most >> 20} MiB")
        parts.append(part)
    return b"".join(parts)


def check_values(raw: bytes) -> None:
    """Raises :class:`BadBody` if JSON holds so many values that decoding it would take far more than its bytes.

    What stands inside strings is left out only where the rest of the body does not suffice to tell.
    """
    if len(raw) <= UNCOUNTED or _within(raw):
        return
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Every second part between quotes is outside of strings.
    if bare.count(b'"') > 4 * MAX_OBJECTS or not _within(b"".join(bare.split(b'"')[::2])):
        raise BadBody(400, f"over {MAX_OBJECTS} objects and arrays, or {MAX_VALUES} values")


def _within(raw: bytes) -> bool:
    return raw.count(b"{") + raw.count(b"[") <= MAX_OBJECTS and raw.count(b",") <= MAX_VALUES
