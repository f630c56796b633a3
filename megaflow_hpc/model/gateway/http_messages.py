"""Requests and answers of the gateway's HTTP server: keys, JSON bodies, and errors with their types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from megaflow_hpc.model.http_server import BadBody, read_body
from megaflow_hpc.model.json_text import decoded, effort, packed
from megaflow_hpc.model.offload import offload

MODEL_SERVICE_ERROR = "model_service_error"
BUDGET_EXCEEDED = "rollout_budget_exceeded"
SUSPENDED = "rollout_suspended"
"""Types of errors that a client's retries do not help against."""
TAKEN_S = 60.0
"""Seconds for an agent to read an answer: other calls of its rollout may wait for that."""
TOO_MANY = "too_many_connections"
MAX_BODY = 32 * 2**20
"""Bytes of one request's body."""
MAX_UNTOLD = 8 * 2**20
"""Bytes of a body without a ``Content-Length``, or of a compressed one."""
FIELDS = 1000
"""Fields of one request."""


class CallError(Exception):
    """Ends a call with an error in the agent's dialect.

    Args:
        status: HTTP status.
        message: For the agent.
        kind: The error's type.
    """

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Returns an answer with ``body`` as JSON."""
    return web.Response(body=packed(body), status=status, headers=headers, content_type="application/json")


async def send_json(request: web.BaseRequest, size: int, body: Callable[[], Any]) -> web.StreamResponse:
    """Answers with what ``body`` returns, as JSON.

    Args:
        size: Bytes that the engine sent.
    """
    response = web.Response(body=await offload(size, lambda: packed(body())), content_type="application/json")
    async with taken(request):
        await response.prepare(request)
        await response.write_eof()
    return response


@asynccontextmanager
async def taken(request: web.BaseRequest) -> AsyncIterator[None]:
    """Closes the connection of an agent that has left, or that does not read what is written in :data:`TAKEN_S`."""
    try:
        async with asyncio.timeout(TAKEN_S):
            yield
    except (TimeoutError, ConnectionResetError):
        if request.transport is not None:
            request.transport.abort()


def bearer_key(request: web.BaseRequest) -> bytes:
    """Returns the key of a request, from ``Authorization: Bearer`` or ``x-api-key``; empty without one."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    given = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return given.encode("utf-8", "surrogateescape")  # as it came: headers need not be UTF-8


def body_size(request: web.BaseRequest) -> int:
    """Returns the most bytes that a request's body may have, before it is read.

    Raises:
        CallError: More than :data:`MAX_BODY`.
    """
    length = request.content_length
    if length is None or request.headers.get("Content-Encoding"):
        return MAX_UNTOLD
    if length > MAX_BODY:
        raise CallError(413, f"the request's body: longer than {MAX_BODY >> 20} MiB")
    return length


async def read_object(request: web.BaseRequest, most: int) -> tuple[dict[str, Any], int]:
    """Reads a request's body of at most ``most`` bytes. Returns its JSON object and its estimated size.

    The size is :func:`~megaflow_hpc.model.json_text.effort`.

    Raises:
        CallError: The body is not a JSON object, is too long, or has too many values.
    """
    try:
        raw = await read_body(request, most)
        size = effort(raw)
        body = await offload(size, decoded, raw)
    except BadBody as error:
        raise CallError(error.status, str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CallError(400, f"the request's body: {error}") from None
    if not isinstance(body, dict):
        raise CallError(400, "the request's body: expected a JSON object")
    if len(body) > FIELDS:
        raise CallError(400, f"the request's body: {len(body)} fields; {FIELDS} are allowed")
    return body, size


def error_fields(error: Exception) -> tuple[int, str, str]:
    """Returns HTTP status, message and type for what ended a call."""
    if isinstance(error, CallError):
        return error.status, str(error), error.kind
    if isinstance(error, RecursionError):
        return 400, "the request's body: nested too deeply", "invalid_request_error"
    return 500, f"in the gateway: {type(error).__name__}: {error}", "server_error"


def refusal_fields(body: bytes) -> tuple[str, str]:
    """Returns message and type of an engine's refusal; a body without them is the message."""
    try:
        found = orjson.loads(body)
        error = found.get("error") or found
        return str(error["message"]), str(error.get("type") or "invalid_request_error")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return body[:2000].decode("utf-8", "replace"), "invalid_request_error"
