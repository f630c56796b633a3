"""What an engine's answer has to be before it is recorded and passed on.

The engine may be a stranger's endpoint, and what it says becomes rows of a file, messages that dialects convert, and an
agent's answer. So each field that anything here reads is of its type, in bounds, and nothing is nested deeply; fields
that nothing reads pass as they are.
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
"""Characters of the texts of an answer, all choices together."""
DEPTH = 64
"""Arrays and objects within one another, at most; tokens and log-probabilities that nobody asked for aside."""
_NAME = 256
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


class _Said(_Choice, kw_only=True):
    message: _Message


class _Completed(_Choice):
    text: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None


def check(reply: dict[str, Any], chat: bool, most: int) -> None:
    """Makes sure that an answer's choices are what an answer's are; drops other fields of it that are not.

    Args:
        reply: The answer of a chat endpoint, or of the one for plain completions.
        chat: Which of them.
        most: Choices that were asked for.

    Raises:
        ValueError: They are not.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or not 1 <= len(choices) <= most:
        found = len(choices) if isinstance(choices, list) else type(choices).__name__
        raise ValueError(f"choices: expected 1 to {most}, found {found}")
    try:
        msgspec.convert(choices, list[_Said] if chat else list[_Completed])
    except msgspec.ValidationError as error:
        raise ValueError(f"choices: {error}") from None
    for number, choice in enumerate(choices):
        choice.setdefault("index", number)
        if len(choice.get("finish_reason") or "") > _NAME:
            raise ValueError("finish_reason: too long")
    for name, kinds in (("id", str), ("object", str), ("created", int | float)):
        value = reply.get(name)
        if name in reply and (not isinstance(value, kinds) or (isinstance(value, str) and len(value) > _NAME)):
            del reply[name]
    try:
        msgspec.convert(reply.get("usage") or {}, _Usage)
    except msgspec.ValidationError:
        del reply["usage"]


def check_size(reply: Mapping[str, Any], size: int) -> None:
    """Makes sure that an answer is not nested deeply and has no endless texts.

    Args:
        reply: The answer, without what the agent did not ask for.
        size: Bytes that the engine sent.

    Raises:
        ValueError: It is; :class:`~megaflow_hpc.model.json_text.TooMuch` for its texts.
    """
    if containers_at(reply, DEPTH):
        raise ValueError(f"nested more than {DEPTH} deep")
    if size > MAX_TEXT:
        told = [{k: v for k, v in choice.items() if k != "logprobs"} for choice in reply["choices"]]
        if sum(map(len, _texts(told))) > MAX_TEXT:
            raise TooMuch(f"texts of more than {MAX_TEXT >> 20} million characters")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def ids(tokens: Any) -> array[int]:
    """Returns token ids.

    Raises:
        ValueError, TypeError, OverflowError: They are none.
    """
    found = array("i", _listed(tokens))
    if found and min(found) < 0:
        raise ValueError("a negative token id")
    return found


def scores(logprobs: Any, count: int) -> array[float]:
    """Returns log-probabilities of ``count`` tokens.

    Raises:
        ValueError, TypeError: They are none, or not as many.
    """
    found = array("f", _listed(logprobs))
    if len(found) != count:
        raise ValueError(f"{count} token ids, {len(found)} log-probabilities")
    if not math.isfinite(sum(found)):
        raise ValueError("a log-probability that is no number")
    return found


def _listed(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):  # of bytes and texts an array would take the memory
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value
