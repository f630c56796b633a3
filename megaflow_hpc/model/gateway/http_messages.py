"""Reads requests and sends responses of the gateway's HTTP server: JSON bodies, streams, and errors with their
types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
from aiohttp import web

from megaflow_hpc.model.gateway.dialects import Event
from megaflow_hpc.model.gateway.protocols import Answer
from megaflow_hpc.model.http_server import BadBody, read_body
from megaflow_hpc.model.json_text import decoded, effort, offload, packed

MODEL_SERVICE_ERROR = "model_service_error"
BUDGET_EXCEEDED = "rollout_budget_exceeded"
SUSPENDED = "rollout_suspended"
"""Error types that clients should not retry."""
TOO_MANY_CONNECTIONS = "too_many_connections"
SEND_TIMEOUT_S = 60.0
"""Seconds within which an agent must read a response. Other calls of its rollout may be waiting for their turn."""
PING_INTERVAL_S = 20.0
"""A stream sends a comment after this many seconds without data."""
MAX_BODY = 32 * 2**20
"""Maximum size of a request body, in bytes."""
MAX_BODY_OF_UNKNOWN_SIZE = 8 * 2**20
"""Maximum size in bytes of a body that is compressed or has no ``Content-Length``."""


class CallError(Exception):
    """Ends a call. The agent gets the error in its own API's format.

    Args:
        status: HTTP status.
        message: Error message for the agent.
        kind: Error type.
    """

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=packed(body), status=status, headers=headers, content_type="application/json")


async def send_json(
    request: web.BaseRequest, size: int, body: Callable[[], Any], headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Awaits ``body`` and sends the result as JSON.

    Args:
        size: Size of the engine's response in bytes.
        headers: Further headers of the response.
    """
    data = await offload(size, lambda: packed(body()))
    response = web.Response(body=data, content_type="application/json", headers=headers)
    async with _sending(request):
        await response.prepare(request)
        await response.write_eof()
    return response


async def send_stream(
    request: web.BaseRequest,
    answer: Awaitable[Answer],
    events: Callable[[dict[str, Any]], Iterator[Event]],
    failed: Callable[[Exception], Event],
) -> web.StreamResponse:
    """Sends a complete engine response as a stream of events.

    For the first :data:`PING_INTERVAL_S` seconds nothing is sent, so that a failure can be an ordinary HTTP error.
    After that, a comment is sent at this interval until the response is complete. Clients ignore comments, but the
    comments keep them from timing out. A failure after the first comment is sent as an event of the stream.

    Args:
        request: The agent's request.
        answer: The engine's response, which this function awaits.
        events: Converts the response to events.
        failed: Converts an exception, raised after the stream has started, to an event.

    Raises:
        Exception: ``answer`` failed before the stream started.
    """
    work = asyncio.ensure_future(answer)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        with suppress(ConnectionResetError):  # the agent has disconnected
            while not (await asyncio.wait({work}, timeout=PING_INTERVAL_S))[0]:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": still working\n\n")
            try:
                reply = work.result()
                body = await offload(reply.size, lambda: b"".join(_encode(*event) for event in events(reply.body)))
            except Exception as error:
                if not response.prepared:
                    raise
                body = _encode(*failed(error))
            async with _sending(request):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(body)  # in one write, so that a small response fits in one packet
                await response.write_eof()
        return response
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)  # a call with a price is completed and keeps its quota


def _encode(name: str, data: Any) -> bytes:
    """Encodes a server-sent event. Strings are sent unchanged, other data as JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, data.encode() if isinstance(data, str) else packed(data))


@asynccontextmanager
async def _sending(request: web.BaseRequest) -> AsyncIterator[None]:
    """Closes the connection if the agent disconnects or does not read the response within :data:`SEND_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            yield
    except (TimeoutError, ConnectionResetError):
        if request.transport is not None:
            request.transport.abort()


def body_size(request: web.BaseRequest) -> int:
    """Returns an upper bound for the size of a request body in bytes, before it is read.

    Raises:
        CallError: The body is longer than :data:`MAX_BODY`.
    """
    length = request.content_length
    if length is None or request.headers.get("Content-Encoding"):
        return MAX_BODY_OF_UNKNOWN_SIZE
    if length > MAX_BODY:
        raise CallError(413, f"the request's body: {length} bytes, longer than {MAX_BODY >> 20} MiB ({MAX_BODY} bytes)")
    return length


async def read_object(request: web.BaseRequest, max_bytes: int) -> tuple[dict[str, Any], int]:
    """Reads and decodes a request body. Returns the JSON object and its :func:`~megaflow_hpc.model.json_text.effort`.

    Raises:
        CallError: The body is not a JSON object, is too long, or has too many values.
    """
    try:
        raw = await read_body(request, max_bytes)
        size = effort(raw)
        body = await offload(size, decoded, raw)
    except BadBody as error:
        raise CallError(error.status, str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CallError(400, f"the request's body: {error}") from None
    if not isinstance(body, dict):
        raise CallError(400, "the request's body: expected a JSON object")
    return body, size


def error_fields(error: Exception) -> tuple[int, str, str]:
    """Returns (HTTP status, message, error type) for an exception that ended a call."""
    if isinstance(error, CallError):
        return error.status, str(error), error.kind
    if isinstance(error, RecursionError):
        return 400, "the request's body: nested too deeply", "invalid_request_error"
    return 500, f"in the gateway: {type(error).__name__}: {error}", "server_error"


def refusal_fields(body: bytes) -> tuple[str, str]:
    """Returns (message, error type) of an engine's error response. A body in an unknown format becomes the message."""
    try:
        reply = orjson.loads(body)
        error = reply.get("error") or reply
        return str(error["message"]), str(error.get("type") or "invalid_request_error")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return body[:2000].decode("utf-8", "replace"), "invalid_request_error"
