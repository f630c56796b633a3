"""The smallest client of an OpenAI-style chat endpoint that an agent of ours needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import aiohttp

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.types import ModelEndpoint

TIMEOUT_S = 3600.0
"""Seconds for one call. The gateway has limits of its own below this; it only catches a gateway that is gone."""


class CallRefused(Exception):
    """The engine refused this request (4xx): too long, a parameter it does not know."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the model refused the call (HTTP {status}): {message}")
        self.status = status
        self.too_long = "context length" in message or "max_model_len" in message or "context window" in message


class BudgetExceeded(Exception):
    """This rollout has used up its calls or tokens (HTTP 429 of the gateway)."""


class Suspended(BaseException):
    """The rollout goes on in another allocation, with this very call. No ``except Exception`` of an agent holds it."""


class ChatClient:
    """An async context manager; ``complete`` makes one call.

    Args:
        model: Where, with which key, and the name of the model.
        options: Sent with every call: ``temperature``, ``max_tokens``, …
    """

    def __init__(self, model: ModelEndpoint, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, dict(options)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatClient:
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
        """The first choice of the answer: ``message`` and ``finish_reason``.

        Raises:
            ModelServiceError: No engine could answer, or the gateway is gone.
            CallRefused: The request is at fault.
            BudgetExceeded: The rollout may call no more.
            Suspended: The allocation ends.
        """
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
        message, kind = _error(raw)
        if response.status == 429 and kind == "rollout_budget_exceeded":
            raise BudgetExceeded(message)
        if kind == "rollout_suspended":
            raise Suspended
        if response.status >= 500 or response.status in (401, 403, 429):
            raise ModelServiceError(f"HTTP {response.status}: {message}")
        raise CallRefused(response.status, message)


def _error(raw: bytes) -> tuple[str, str]:
    """Message and type of an error in OpenAI's shape, or what there is."""
    try:
        body = json.loads(raw)
        error = body.get("error", body)
        return str(error["message"]), str(error.get("type", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return raw[:500].decode("utf-8", "replace"), ""
