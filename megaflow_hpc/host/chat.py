"""Requests a chat completion at a rollout's address, for agents and judges written in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.types import ModelEndpoint

REFUSED = (400, 413, 422)
"""HTTP statuses of an invalid request. Any other error status is a failure of the model service."""


async def post_chat(
    endpoint: ModelEndpoint,
    model: str,
    messages: str | Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    who: str,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Mapping[str, str], Any]:
    """Sends a request without a timeout, because the gateway limits how long it waits for an engine.

    Args:
        messages: A conversation in OpenAI format, or the text of its only message.
        options: Other fields of the request.
        who: Name of the caller, for error messages.
        headers: Additional request headers.

    Returns:
        The HTTP status (200 or one of :data:`REFUSED`), the response headers, and the decoded response.

    Raises:
        ModelServiceError: No response arrived, or its status is a different one. Its ``answer`` is the decoded
            response.
    """
    import aiohttp  # imported late because planning imports agents and tasks too, and must stay fast

    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = {"model": model, "messages": conversation, **options}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(
                f"{endpoint.base_url}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {endpoint.api_key}", **(headers or {})},
            ) as response,
        ):
            answer = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ModelServiceError(f"{who}: {error!r}") from error
    if response.status != 200 and response.status not in REFUSED:
        failure = ModelServiceError(f"{who}: HTTP {response.status}: {answer}")
        failure.answer = answer
        raise failure
    return response.status, response.headers, answer
