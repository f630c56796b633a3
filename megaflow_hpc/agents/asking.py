"""Lets agents written in Python call the campaign's models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megaflow_hpc.errors import ModelServiceError, UserCodeError
from megaflow_hpc.host.chat import post_chat
from megaflow_hpc.types import CALL_HEADER, STARTED_BY_HEADER, ModelEndpoint

if TYPE_CHECKING:
    import aiohttp


@dataclass(frozen=True)
class ModelAnswer:
    """A model's answer to one call."""

    message: dict[str, Any]
    """The answer in OpenAI format. Append it to the conversation to continue."""
    call: int
    """Number of the call within the rollout, from 0. The recording uses it to link the first call of a sub-agent to
    this answer."""
    finish_reason: str

    @property
    def text(self) -> str:
        """Text of the answer; empty if the answer contains only tool calls."""
        return str(self.message.get("content") or "")


async def ask(
    model: ModelEndpoint,
    messages: str | Sequence[Mapping[str, Any]],
    role: str = "",
    *,
    started_by: ModelAnswer | None = None,
    **options: Any,
) -> ModelAnswer:
    """Calls a model once. Has no timeout, because the gateway limits how long it waits for an engine.

    Args:
        model: The endpoint that was passed to ``run``.
        messages: A conversation in OpenAI format, or the text of a single user message.
        role: Team role that answers. If empty, the rollout's own model answers.
        started_by: The answer that caused this call, for example the parent agent's. Pass it to the first call of a
            sub-agent to link the sub-agent to its parent in the record.
        options: Other fields of the request, such as ``max_tokens``. If they change the policy's sampling settings, the
            call's tokens are not trained on.

    Raises:
        ModelServiceError: The gateway refused the call or cannot be reached. If it refused because the rollout's budget
            is used up, the rollout is truncated but still verified.
        UserCodeError: The request is invalid.
    """
    if options.get("stream"):
        raise UserCodeError("model call: ask takes no stream; leave it out")
    headers = {} if started_by is None else {STARTED_BY_HEADER: str(started_by.call)}
    status, answered, answer = await post_chat(
        model, role or model.model_name, messages, options, "model call", headers
    )
    if status != 200:
        raise UserCodeError(f"model call: HTTP {status}: {answer}")
    choice = answer["choices"][0]
    return ModelAnswer(choice["message"], int(answered[CALL_HEADER]), str(choice.get("finish_reason") or ""))


# --- conversations ---------------------------------------------------------------------------------------------------

CALL_TIMEOUT_S = 3600.0
"""Timeout of one model call in seconds. It exceeds the gateway's own limits, so it only detects an unreachable
gateway."""


class CallRefused(Exception):
    """The engine or the gateway rejected the request (4xx), for example because of its length or an unknown parameter.

    ``too_long`` is true if the conversation is too long for the model, or has too many bytes or images.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the model refused the call (HTTP {status}): {message}")
        long = ("context length", "max_model_len", "context window", " images; ")  # the last phrase is the gateway's
        self.too_long = status == 413 or any(words in message for words in long)


class BudgetExceeded(Exception):
    """The rollout has used up its budget of calls or tokens (HTTP 429 from the gateway)."""


class Suspended(BaseException):
    """The rollout is suspended and will repeat this call in another allocation. An agent's ``except Exception`` does
    not catch it."""


class ChatClient:
    """Client for chat completions. Use it as an async context manager.

    Args:
        model: The model's endpoint.
        options: Fields to send with every call: ``temperature``, ``max_tokens``, …
    """

    def __init__(self, model: ModelEndpoint, options: Mapping[str, Any]) -> None:
        self._model, self._options = model, dict(options)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatClient:
        import aiohttp  # imported late, because planning creates agents and has no aiohttp

        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
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
    """Returns the message and type of an error in OpenAI's format. For other formats, returns the response body and an
    empty type."""
    try:
        body = json.loads(raw)
        error = body.get("error", body)
        return str(error["message"]), str(error.get("type", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return raw[:500].decode("utf-8", "replace"), ""
