"""Digests of messages in OpenAI form: of the exact text, and of the meaning, which clients' changes of form keep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import orjson

from megaflow_hpc.model.json_text import LARGE, decoded, packed
from megaflow_hpc.texts import containers_at

RAW_ARGUMENT = "input"
"""Name of the one argument of a tool call whose arguments are no JSON object."""
DEPTH = 64
"""Arrays and objects within one another in a tool call's arguments."""


def digest(messages: Any) -> str:
    """Returns a digest of a conversation in OpenAI form, independent of the order of keys."""
    try:
        text = orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # half a surrogate pair, or numbers as keys
        text = repr(messages).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def same_message(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two OpenAI messages mean the same, reasoning included; empty fields count as absent."""
    return meaning(one) == meaning(other) and reasoning_of(one) == reasoning_of(other)


def fingerprint(message: Mapping[str, Any]) -> str:
    """Returns a digest of a message. Ignores empty fields, and whether the text is a string or a list of one part."""
    found = {name: value for name, value in message.items() if value not in (None, "", [])}
    content = found.get("content")
    if isinstance(content, list) and len(content) == 1 and set(content[0]) == {"type", "text"}:
        found["content"] = content[0]["text"]
    return digest(found)


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
    return hashlib.blake2b(packed(said, sort_keys=True), digest_size=16).hexdigest()


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


def completes(message: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Returns whether a message means the same as an answer with the same tool-call ids. Extra arguments are ignored,
    because clients fill in defaults."""
    if len(message["tool_calls"]) != len(answer["tool_calls"]):  # an id may hold the separator
        return False
    for call, own in zip(message["tool_calls"], answer["tool_calls"], strict=True):
        given = arguments_of(call["function"].get("arguments"))
        wanted = arguments_of(own["function"].get("arguments"))
        if call["function"].get("name") != own["function"]["name"] or {**given, **wanted} != given:
            return False
    bare = {"tool_calls": None}
    return meaning({**message, **bare}) == meaning({**answer, **bare})


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Returns the reasoning text of an answer."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "").strip()
