"""Reduces OpenAI messages to canonical forms, in order to recognise messages that a client has rewritten."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import orjson

from megaflow_hpc.model.json_text import LARGE, decoded, packed
from megaflow_hpc.texts import containers_at

RAW_ARGUMENT = "input"
"""Name of the single argument of a tool call whose arguments are not a JSON object."""
MAX_DEPTH = 64
"""Maximum nesting of arrays and objects in a tool call's arguments."""


def conversation_digest(messages: Any) -> str:
    """Returns a digest of a conversation, independent of key order."""
    try:
        text = orjson.dumps(messages, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # lone surrogates, or non-string keys
        text = repr(messages).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def message_digest(message: Mapping[str, Any]) -> str:
    """Returns a digest of a message. Empty fields are ignored. A string counts as equal to a list with one text
    part."""
    fields = {name: value for name, value in message.items() if value not in (None, "", [])}
    content = fields.get("content")
    if isinstance(content, list) and len(content) == 1 and set(content[0]) == {"type", "text"}:
        fields["content"] = content[0]["text"]
    return conversation_digest(fields)


def meaning_digest(message: Mapping[str, Any]) -> str:
    """Returns a digest of a message's role, text and tool calls. Ignores reasoning and tool-call ids."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if isinstance(content, str):
        content = content.strip()
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    calls = [[function.get("name"), arguments_of(function.get("arguments"))] for function in functions]
    fields = [message.get("role"), content, calls]
    return hashlib.blake2b(packed(fields, sort_keys=True), digest_size=16).hexdigest()


def same_message(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two messages have equal role, text, tool calls and reasoning. Empty fields count as absent."""
    return meaning_digest(one) == meaning_digest(other) and reasoning_of(one) == reasoning_of(other)


def arguments_of(text: Any) -> dict[str, Any]:
    """Decodes a tool call's arguments.

    Text that is not a JSON object, or is nested deeper than :data:`MAX_DEPTH`, becomes the single argument
    :data:`RAW_ARGUMENT`, because some encoders reject it.
    """
    if not text:
        return {}
    try:
        large = isinstance(text, str) and len(text) > LARGE
        arguments = decoded(text.encode("utf-8", "surrogatepass")) if large else json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {RAW_ARGUMENT: text}
    if not isinstance(arguments, dict):
        return {RAW_ARGUMENT: text}
    may_be_deep = isinstance(text, str) and text.count("[") + text.count("{") > MAX_DEPTH
    return {RAW_ARGUMENT: text} if may_be_deep and containers_at(arguments, MAX_DEPTH) else arguments


def call_ids(message: Mapping[str, Any]) -> str:
    """Returns the tool-call ids of a message, one per line."""
    return "\n".join(str(call.get("id") or "") for call in message.get("tool_calls") or ())


def completes(message: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Returns whether a message is an answer that a client sent back, possibly with added arguments.

    Compares role, text, tool calls and their ids. Ignores arguments that only the message has, because clients fill in
    defaults.
    """
    if len(message["tool_calls"]) != len(answer["tool_calls"]):  # an id may contain the separator
        return False
    for call, own in zip(message["tool_calls"], answer["tool_calls"], strict=True):
        given = arguments_of(call["function"].get("arguments"))
        expected = arguments_of(own["function"].get("arguments"))
        if call["function"].get("name") != own["function"]["name"] or {**given, **expected} != given:
            return False
    without_calls = {"tool_calls": None}
    return meaning_digest({**message, **without_calls}) == meaning_digest({**answer, **without_calls})


def raw_reasoning_of(message: Mapping[str, Any]) -> str:
    """Returns a message's reasoning. Engines use one of two field names for it."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Returns a message's reasoning without leading and trailing whitespace."""
    return str(raw_reasoning_of(message)).strip()
