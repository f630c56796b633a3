"""What a message in OpenAI form means, whatever an agent's client made of its form: by it answers are known again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import orjson

from megaflow_hpc.model.json_text import LARGE, decoded, encoded, packed
from megaflow_hpc.texts import containers_at

RAW_ARGUMENT = "input"
"""Name of the one argument of a tool call whose arguments are no JSON object."""
DEPTH = 64
"""Arrays and objects within one another in a tool call's arguments."""
Answers = dict[str, list[tuple[int, Mapping[str, Any]]]]
"""Meaning of an answer, or ids of its tool calls → (number of preceding messages, answer as the engine wrote it)."""


def original(answers: Answers, message: Mapping[str, Any], position: int) -> Mapping[str, Any]:
    """Returns the recorded answer that ``message`` hands back, or ``message`` itself if there is none.

    Of several, the one with the same call ids and then the one at this position among the messages is preferred.
    """
    if not answers:
        return message
    ids = call_ids(message)
    known = answers.get(meaning(message)) or [
        found for found in answers.get(ids, ()) if ids and _completes(message, found[1])
    ]
    thought = _reasoning(message)
    fitting = [(at, answer) for at, answer in known if thought in ("", _reasoning(answer))]
    if not fitting:
        return message
    answer = dict(max(reversed(fitting), key=lambda found: (call_ids(found[1]) == ids, found[0] == position))[1])
    if ids:  # keep the agent's own ids, which its tool messages refer to
        given = [call.get("id") for call in message["tool_calls"]]
        answer["tool_calls"] = [{**c, "id": i} for c, i in zip(answer["tool_calls"], given, strict=True)]
    return answer


def digest(messages: Any, size: int = 0) -> str:
    """Returns a digest of a conversation in OpenAI form, independent of the order of keys.

    Args:
        messages: The conversation.
        size: Its bytes, if it may be large.
    """
    found = hashlib.blake2b(digest_size=12)
    if size > LARGE:
        for part in encoded(messages, sort_keys=True):
            found.update(part)
        return found.hexdigest()
    try:
        found.update(orjson.dumps(messages, option=orjson.OPT_SORT_KEYS))
    except TypeError:  # half a surrogate pair, or numbers as keys
        found.update(repr(messages).encode("utf-8", "backslashreplace"))
    return found.hexdigest()


def same_message(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two OpenAI messages mean the same, reasoning included; empty fields count as absent."""
    return meaning(one) == meaning(other) and _reasoning(one) == _reasoning(other)


def meaning(message: Mapping[str, Any]) -> str:
    """Returns a digest of what an OpenAI message says, without reasoning and the ids of tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text") or "") for part in content)
    calls = [
        [call.get("function", {}).get("name"), arguments_of(call.get("function", {}).get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    stripped = content.strip() if isinstance(content, str) else content
    said = [message.get("role"), stripped, calls]
    texts = [stripped, *(call.get("function", {}).get("arguments") for call in message.get("tool_calls") or ())]
    large = sum(len(text) for text in texts if text) > LARGE
    found = hashlib.blake2b(digest_size=16)
    for part in encoded(said, sort_keys=True) if large else [packed(said, sort_keys=True)]:
        found.update(part)
    return found.hexdigest()


def arguments_of(text: Any) -> dict[str, Any]:
    """Returns a tool call's arguments; text that is no JSON object becomes the one argument :data:`RAW_ARGUMENT`.

    So does one that is nested more than :data:`DEPTH` deep, which not every encoder would take.
    """
    if not text:
        return {}
    try:
        large = isinstance(text, str) and len(text) > LARGE
        found = decoded(text.encode("utf-8", "surrogatepass")) if large else json.loads(text)
    except (TypeError, ValueError, RecursionError):
        found = None
    deep = isinstance(text, str) and text.count("[") + text.count("{") > DEPTH and containers_at(found, DEPTH)
    return found if isinstance(found, dict) and not deep else {RAW_ARGUMENT: text}


def call_ids(message: Mapping[str, Any]) -> str:
    """Returns the ids of a message's tool calls, one per line."""
    return "\n".join(str(call.get("id") or "") for call in message.get("tool_calls") or ())


def _completes(message: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Returns whether a message means the same as the answer, except for further arguments of its tool calls."""
    pairs = zip(message["tool_calls"], answer["tool_calls"], strict=True)  # as many: their ids are the same
    for call, own in pairs:
        given = arguments_of(call["function"].get("arguments"))
        wanted = arguments_of(own["function"].get("arguments"))
        if call["function"].get("name") != own["function"]["name"] or {**given, **wanted} != given:
            return False
    bare = {"tool_calls": None}
    return meaning({**message, **bare}) == meaning({**answer, **bare})


def _reasoning(message: Mapping[str, Any]) -> str:
    return str(message.get("reasoning") or message.get("reasoning_content") or "").strip()
