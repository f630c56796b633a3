"""Requests and answers of the gateway's HTTP server: keys, JSON bodies, and errors with their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from megaflow_hpc.model.gateway import protocols

MODEL_SERVICE_ERROR = "model_service_error"
BUDGET_EXCEEDED = "rollout_budget_exceeded"
SUSPENDED = "rollout_suspended"
"""Types of errors that a client's retries do not help against."""


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
    return web.Response(body=protocols.packed(body), status=status, headers=headers, content_type="application/json")


def bearer_key(request: web.BaseRequest) -> str:
    """Returns the key of a request, from ``Authorization: Bearer`` or ``x-api-key``; empty without one."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_object(request: web.BaseRequest) -> dict[str, Any]:
    """Returns a request's body.

    Raises:
        CallError: It is no JSON object.
    """
    try:
        body = protocols.parsed(await request.read())
    except (ValueError, RecursionError) as error:
        raise CallError(400, f"the request's body: {error}") from None
    if not isinstance(body, dict):
        raise CallError(400, "the request's body: expected a JSON object")
    return body


def error_fields(error: Exception) -> tuple[int, str, str]:
    """Returns HTTP status, message and type for what ended a call."""
    if isinstance(error, CallError):
        return error.status, str(error), error.kind
    return 500, f"in the gateway: {type(error).__name__}: {error}", "server_error"


def refusal_fields(body: bytes) -> tuple[str, str]:
    """Returns message and type of an engine's refusal; a body without them is the message."""
    try:
        found = orjson.loads(body)
        error = found.get("error") or found
        return str(error["message"]), str(error.get("type") or "invalid_request_error")
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:2000].decode("utf-8", "replace"), "invalid_request_error"
