"""Lets agents written in Python call the campaign's models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.errors import UserCodeError
from megaflow_hpc.host.chat import post_chat
from megaflow_hpc.types import CALL_HEADER, STARTED_BY_HEADER, ModelEndpoint


@dataclass(frozen=True)
class ModelAnswer:
    """A model's answer to one call."""

    message: dict[str, Any]
    """The answer in OpenAI format. Append it to the conversation to continue."""
    call: int
    """Number of the call in the rollout, from 0. The record uses it to link calls that this answer starts."""
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
    """Calls a model once. Has no timeout of its own; the gateway limits the wait for an engine.

    Args:
        model: the endpoint that was passed to ``run``.
        messages: a conversation in OpenAI format, or the text of a single user message.
        role: team role that answers. Empty: the rollout's own model.
        started_by: the answer that caused this call, for example the parent agent's. Pass it to the first call of a
            sub-agent to link the sub-agent to its parent in the record.
        options: other fields of the request, such as ``max_tokens``. If they change the policy's sampling settings, the
            call's tokens are not trained on.

    Raises:
        ModelServiceError: the gateway refused the call or cannot be reached. If it refused because the rollout's budget
            is used up, the rollout is truncated but still verified.
        UserCodeError: the request is invalid.
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
