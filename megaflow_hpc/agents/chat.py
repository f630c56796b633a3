"""A client for an OpenAI-style chat endpoint, used by the package's own agents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.types import ModelEndpoint

if TYPE_CHECKING:
    import aiohttp

TIMEOUT_S = 3600.0
"""Timeout of one call in seconds. Longer than the gateway's own limits, so it only detects an unreachable gateway."""


class CallRefused(Exception):
    """The engine rejected the request (4xx), for example because of its length or an unknown parameter."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the model refused the call (HTTP {status}): {message}")
        self.status = status
        self.too_long = "context length" in message or "max_model_len" in message or "context window" in message


class BudgetExceeded(Exception):
    """The rollout has used up its budget of calls or tokens (HTTP 429 from the gateway)."""


class Suspended(BaseException):
    """The rollout is suspended and will repeat this call in another allocation. An agent's ``except Exception`` does
    not catch it."""


class ChatClient:
    """Client for chat completions; an async context manager.

    Args:
        model: The model's endpoint.
        options: Fields to send with every call: ``temperature``, ``max_tokens``, …
    """

    def __init__(self, model: ModelEndpoint, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, dict(options)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatClient:
        import aiohttp  # imported late, because planning creates agents and has no aiohttp

        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self._model.api_key}"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Requests one completion. Returns the first choice of the response, with ``message`` and ``finish_reason``.

        Raises:
            ModelServiceError: No engine could respond, or the gateway is unreachable.
            CallRefused: The request is invalid.
            BudgetExceeded: The rollout has used up its budget.
            Suspended: The allocation is ending.
        """
        import aiohttp

        assert self._session is not None, "use it as an async context manager"
        body = {"model": self._model.model_name, "messages": list(messages), **self._options}
        try:
            async with self._session.post(f"{self._model.base_url}/chat/completions", json=body) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ModelServiceError(f"the model's address does not answer: {type(error).__name__}: {error}") from error
        if response.status == 200:
            choice: dict[str, Any] = json.loads(raw)["choices"][0]
            return choice
        message, kind = _error_fields(raw)
        if response.status == 429 and kind == "rollout_budget_exceeded":
            raise BudgetExceeded(message)
        if kind == "rollout_suspended":
            raise Suspended
        if response.status >= 500 or response.status in (401, 403, 429):
            raise ModelServiceError(f"HTTP {response.status}: {message}")
        raise CallRefused(response.status, message)


def _error_fields(raw: bytes) -> tuple[str, str]:
    """Returns the message and type of an error in OpenAI's format. Otherwise, returns the response body and an empty
    type."""
    try:
        body = json.loads(raw)
        error = body.get("error", body)
        return str(error["message"]), str(error.get("type", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return raw[:500].decode("utf-8", "replace"), ""
