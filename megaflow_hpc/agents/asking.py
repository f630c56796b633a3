"""Model calls for agents in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.errors import ModelServiceError, UserCodeError
from megaflow_hpc.types import CALL_HEADER, STARTED_BY_HEADER, ModelEndpoint


@dataclass(frozen=True)
class ModelAnswer:
    """A model's answer."""

    message: dict[str, Any]
    """The answer in OpenAI format. Append it to the conversation to continue."""
    call: int
    """Number of the call in the rollout, from 0. :func:`ask` takes it as ``started_by``."""
    finish_reason: str

    @property
    def text(self) -> str:
        """Text of the answer; empty if it has only tool calls."""
        return str(self.message.get("content") or "")


async def ask(
    model: ModelEndpoint,
    messages: str | Sequence[Mapping[str, Any]],
    role: str = "",
    *,
    started_by: ModelAnswer | None = None,
    **options: Any,
) -> ModelAnswer:
    """Makes one model call, and waits as long as the gateway does for an engine.

    Args:
        model: the address that ``run`` got.
        messages: a conversation in OpenAI format, or the text of its only message.
        role: role of the campaign's team that answers. Default: the rollout's own model.
        started_by: the answer that caused this call, such as a parent agent's. It links the first call of a sub-agent
            to its parent in the record.
        options: further fields of the request, such as ``max_tokens``. Tokens of calls that change the policy's
            sampling are not trained on.

    Raises:
        ModelServiceError: the gateway refuses the call or cannot be reached. If the rollout is out of budget, it is
            truncated and verified nevertheless.
        UserCodeError: the request is invalid.
    """
    import aiohttp  # planning imports agents too, and takes no time for it

    if options.get("stream"):
        raise UserCodeError("model call: ask takes no stream; leave it out")
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    body = {"model": role or model.model_name, "messages": conversation, **options}
    headers = {"Authorization": f"Bearer {model.api_key}"}
    if started_by is not None:
        headers[STARTED_BY_HEADER] = str(started_by.call)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as response,
        ):
            answer = await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ModelServiceError(f"model call: {error!r}") from error
    if response.status != 200:
        kind = UserCodeError if response.status in (400, 413, 422) else ModelServiceError
        raise kind(f"model call: HTTP {response.status}: {answer}")
    choice = answer["choices"][0]
    return ModelAnswer(choice["message"], int(response.headers[CALL_HEADER]), str(choice.get("finish_reason") or ""))
