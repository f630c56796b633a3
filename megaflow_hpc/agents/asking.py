"""Lets agents written in Python call the campaign's models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.errors import ModelServiceError, UserCodeError
from megaflow_hpc.host.chat import post_chat
from megaflow_hpc.types import CALL_HEADER, STARTED_BY_HEADER, ModelEndpoint


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


class CallRefused(Exception):
    """The request was rejected (HTTP 400, 413 or 422), for example because of its length or an unknown parameter.

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


async def complete(
    model: ModelEndpoint, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Requests one completion. Returns the first choice of the response, with ``message`` and ``finish_reason``.

    Args:
        model: The model's endpoint.
        messages: A conversation in OpenAI format.
        options: Other fields of the request, such as ``temperature``.

    Raises:
        ModelServiceError: No engine could respond, or the gateway is unreachable.
        CallRefused: The request is invalid.
        BudgetExceeded: The rollout has used up its budget.
        Suspended: The allocation is ending.
    """
    try:
        status, _, answer = await post_chat(model, model.model_name, messages, options, "model call")
    except ModelServiceError as error:
        text, kind = _error_fields(error.answer)
        if kind == "rollout_budget_exceeded":
            raise BudgetExceeded(text) from None
        if kind == "rollout_suspended":
            raise Suspended from None
        raise
    if status != 200:
        raise CallRefused(status, _error_fields(answer)[0])
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def _error_fields(answer: Any) -> tuple[str, str]:
    """Returns the message and type of an error in OpenAI's format. In other formats, the type is empty."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return str(error), ""
    return str(error.get("message", error)), str(error.get("type", ""))
