"""Represents a call as a text that identifies it in any format."""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.model.gateway.trees.clients import Said
from tests.model.gateway.trees.engine import EngineAnswer

Key = str


def packed(*parts: Any) -> Key:
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def key_of(one: EngineAnswer) -> Key:
    told = one.tells_tokens
    columns = brief(one.prompt, one.tokens, one.logprobs) if told else brief([], [], [])
    return packed(asked_form(one.asked), exact(one.message), *columns, one.finish_reason, one.model)


def stored_key(asked: Sequence[Any], answer: Any, turn: Any, columns: Mapping[str, Sequence[Any]]) -> Key:
    tokens, scores = columns.get("tokens", []), columns.get("logprobs", [])
    span = slice(turn.token_start, turn.token_end)
    kept = brief(tokens[: turn.token_start], tokens[span], scores[span])
    return packed(asked_form(asked), exact(answer), *kept, turn.finish_reason, turn.policy)


def brief(prompt: Sequence[int], tokens: Sequence[int], scores: Sequence[float]) -> list[str]:
    """Returns columns as texts that are short enough to be read in a message."""
    columns = array("i", prompt), array("i", tokens), array("f", scores)
    return [f"{len(column)}:{zlib.crc32(column.tobytes()):x}" for column in columns]


def exact(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without empty fields, its text as a text."""
    found = {name: value for name, value in message.items() if value not in (None, "", [])}
    if "content" in found:
        found["content"] = text_of(message)
    return found


def asked_form(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages of a call without the ids of tool calls: a client may give them anew, and the answer is
    stored as the engine wrote it."""
    found = [exact(message) for message in messages]
    for message in found:
        if "tool_calls" in message:
            message["tool_calls"] = [{**call, "id": ""} for call in message["tool_calls"]]
    return found


def plain_id(name: str) -> str:
    """Returns the id of a tool call in the characters that Anthropic allows, as LiteLLM sends it back."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def atif_key(one: EngineAnswer) -> Key:
    steps: list[Any] = []
    for message in one.asked:
        if message["role"] != "tool":
            steps.append(_as_step(message))
        elif not steps:
            steps.append(["system", "", "", []])
    told = one.tells_tokens
    columns = brief([], one.tokens, one.logprobs) if told else brief([], [], [])
    # An engine that tells no ids reports the tokens of a call once, for all of its choices.
    prompt = len(one.prompt) if told or one.choice == 0 else None
    return packed(steps, _as_step(one.message), prompt, *columns, one.finish_reason, f"{one.model}.0")


def _as_step(message: Mapping[str, Any]) -> list[Any]:
    source = {"assistant": "agent"}.get(message["role"], message["role"])
    return [source, text_of(message), thought_of(message), values_of(message)]


def step_of(step: Mapping[str, Any]) -> list[Any]:
    calls = [(c["function_name"], c["arguments"]) for c in step.get("tool_calls", ())]
    return [step["source"], step["message"], step.get("reasoning_content", ""), calls]


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def thought_of(message: Mapping[str, Any]) -> str:
    return message.get("reasoning") or message.get("reasoning_content") or ""


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    return [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"] or "{}"))
        for c in message.get("tool_calls") or ()
    ]


def values_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [call[1:] for call in calls_of(message)]


def named(message: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    for call in message.get("tool_calls") or ():
        yield call, call["function"]["name"]


def meant(said: Said) -> Any:
    """Returns the meaning of a message, without what clients change."""
    return said.role, said.text.strip(), [(c.id, c.name) for c in said.calls], said.result_of
