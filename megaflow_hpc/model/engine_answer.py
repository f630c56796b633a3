"""Validates an engine's answer before it is recorded and passed on.

The engine may be another party's endpoint. Its answer becomes rows of a file, messages that dialects convert, and an
agent's answer. So every field that this package reads must have its type and be within bounds, and nothing may be
nested deeply. Other fields pass unchanged.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from megaflow_hpc.model.json_text import TooMuch
from megaflow_hpc.texts import containers_at

MAX_TEXT = 8 * 2**20
"""Characters of all texts of an answer."""
MAX_DEPTH = 64
"""Nesting of arrays and objects, without tokens and log-probabilities that the agent did not ask for."""
_MAX_NAME = 256
"""Characters of an identifier."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _ChatChoice(_Choice, kw_only=True):
    message: _Message


class _TextChoice(_Choice):
    text: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None


def check(reply: dict[str, Any], chat: bool, max_choices: int) -> None:
    """Checks the choices of an answer, and drops invalid values of its other fields.

    Args:
        reply: The answer.
        chat: True for an answer of the chat endpoint, false for one of the endpoint for plain completions.
        max_choices: Choices that were asked for.

    Raises:
        ValueError: The choices are invalid.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or not 1 <= len(choices) <= max_choices:
        given = len(choices) if isinstance(choices, list) else type(choices).__name__
        raise ValueError(f"choices: expected 1 to {max_choices}, found {given}")
    try:
        msgspec.convert(choices, list[_ChatChoice] if chat else list[_TextChoice])
    except msgspec.ValidationError as error:
        raise ValueError(f"choices: {error}") from None
    for number, choice in enumerate(choices):
        choice.setdefault("index", number)
        if len(choice.get("finish_reason") or "") > _MAX_NAME:
            raise ValueError("finish_reason: too long")
    for name, kinds in (("id", str), ("object", str), ("created", int | float)):
        value = reply.get(name)
        if name in reply and (not isinstance(value, kinds) or (isinstance(value, str) and len(value) > _MAX_NAME)):
            del reply[name]
    try:
        msgspec.convert(reply.get("usage") or {}, _Usage)
    except msgspec.ValidationError:
        del reply["usage"]


def check_size(reply: Mapping[str, Any], size: int) -> None:
    """Checks the nesting and the texts of an answer.

    Args:
        reply: The answer, without what the agent did not ask for.
        size: Bytes that the engine sent.

    Raises:
        ValueError: It is nested too deeply.
        TooMuch: Its texts are too long.
    """
    if containers_at(reply, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if size > MAX_TEXT:
        choices = [{k: v for k, v in choice.items() if k != "logprobs"} for choice in reply["choices"]]
        if sum(map(len, _texts(choices))) > MAX_TEXT:
            raise TooMuch(f"texts of more than {MAX_TEXT >> 20} million characters")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def token_ids(values: Any) -> array[int]:
    """Returns token ids.

    Raises:
        ValueError, TypeError, OverflowError: The values are no token ids.
    """
    tokens = array("i", _checked_list(values))
    if tokens and min(tokens) < 0:
        raise ValueError("a negative token id")
    return tokens


def log_probabilities(values: Any, count: int) -> array[float]:
    """Returns the log-probabilities of ``count`` tokens.

    Raises:
        ValueError, TypeError: The values are no log-probabilities, or their number differs.
    """
    logprobs = array("f", _checked_list(values))
    if len(logprobs) != count:
        raise ValueError(f"{count} token ids, {len(logprobs)} log-probabilities")
    if not math.isfinite(sum(logprobs)):
        raise ValueError("a log-probability that is no number")
    return logprobs


def _checked_list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):  # an array would read bytes and texts as memory
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value
