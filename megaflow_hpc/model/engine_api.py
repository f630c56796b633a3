"""Defines the engines' HTTP API: paths, headers, and the checks of responses before they are recorded and passed on.

An engine may be a third-party endpoint. Its responses are recorded, converted to the agent's API and passed on to
agents. So every field that this package reads must have the right type and be within bounds, and deep nesting is
rejected. Other fields are passed on unchanged.
"""

from __future__ import annotations

import ast
import base64
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from megaflow_hpc.model.json_text import TooMuch
from megaflow_hpc.texts import containers_at

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
CLASSIFY = "/classify"
"""vLLM's endpoint for reward models."""
GENERATE = "/inference/v1/generate"
"""vLLM's tokens-in, tokens-out endpoint (``--enable-scale-out``)."""
RENDER, DERENDER = f"{CHAT}/render", f"{CHAT}/derender"
"""vLLM's endpoints that convert messages to token ids and back."""
TEXTS = f"{COMPLETIONS}/derender"
"""vLLM's endpoint that decodes token ids to plain text."""
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
"""SGLang's endpoints that render messages to token ids and decode ids to text."""
WEIGHT_VERSION = "X-Megaflow-Weight-Version"
"""Response header set by the proxy: the version of the weights that sampled the response."""
MAX_TEXT = 8 * 2**20
"""Maximum total length of all strings in a response, in characters."""
MAX_DEPTH = 64
"""Maximum nesting of arrays and objects, not counting tokens and log-probabilities that the agent did not request."""
_MAX_NAME = 256
"""Maximum length of an identifier, in characters."""
_MAGIC, _HEADER_AT = b"\x93NUMPY\x01\x00", 10
"""First bytes of a version 1 ``.npy`` file, and the offset of its header. The two bytes before the header contain its
length."""
_BYTES = {"|u1": 1, "<u2": 2}
"""Item size in bytes of each supported array dtype."""


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
    """Validates the choices of a response and drops other fields with invalid values.

    Args:
        reply: The decoded response.
        chat: True for a chat completion, false for a plain completion.
        max_choices: Number of choices requested.

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
    """Checks the nesting and total text length of a response.

    Args:
        reply: The response, without fields that the agent did not request.
        size: Size of the engine's response in bytes.

    Raises:
        ValueError: The response is nested too deeply.
        TooMuch: Its strings are too long.
    """
    if containers_at(reply, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if size > MAX_TEXT:
        choices = [{k: v for k, v in choice.items() if k != "logprobs"} for choice in reply["choices"]]
        if sum(map(len, _texts(choices))) > MAX_TEXT:
            raise TooMuch(f"strings of more than {MAX_TEXT >> 20} million characters in total")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def token_ids(values: Any) -> array[int]:
    """Validates and packs token ids.

    Raises:
        ValueError, TypeError, OverflowError: A value is not a valid token id.
    """
    tokens = array("i", _checked_list(values))
    if tokens and min(tokens) < 0:
        raise ValueError("a negative token id")
    return tokens


def log_probabilities(values: Any, count: int) -> array[float]:
    """Validates and packs the log-probabilities of ``count`` tokens.

    Raises:
        ValueError, TypeError: A value is not a valid log-probability, or the count differs.
    """
    logprobs = array("f", _checked_list(values))
    if len(logprobs) != count:
        raise ValueError(f"{count} token ids, {len(logprobs)} log-probabilities")
    if not math.isfinite(sum(logprobs)):
        raise ValueError("a log-probability that is not a finite number")
    return logprobs


@dataclass(frozen=True)
class RoutedExperts:
    """The experts to which the model routed consecutive tokens of a prompt and its answer."""

    start: int
    """Index of the first token with known experts. The prompt starts at 0."""
    layers: int
    per_token: int
    row: int
    """Bytes per token."""
    data: bytes


def routed_experts(value: Any, tokens: int, start: int = 0) -> RoutedExperts | None:
    """Decodes a choice's ``routed_experts``. Returns ``None`` if the engine does not report experts.

    vLLM with ``enable-return-routed-experts`` sends a base64-encoded ``.npy`` file. Its array has the shape (tokens,
    layers, experts per token) and the type uint8, or uint16 for more than 256 experts. It covers the prompt from
    ``routed_experts_prompt_start`` on, and all sampled tokens except the last, which was never an input. Entries of
    layers without experts are zero.

    Args:
        tokens: Number of tokens in the prompt and the answer.
        start: Number of prompt tokens that the request told the engine to omit.

    Raises:
        ValueError, TypeError: The value is not such an array, or covers a different number of tokens.
    """
    if value is None:
        return None
    file = base64.b64decode(value, validate=True)
    if not file.startswith(_MAGIC):
        raise ValueError("routed_experts: expected a .npy file of version 1")
    data_at = _HEADER_AT + int.from_bytes(file[_HEADER_AT - 2 : _HEADER_AT], "little")
    try:
        header = ast.literal_eval(file[_HEADER_AT:data_at].decode("latin-1").strip())
        size, (rows, layers, per_token) = _BYTES[header["descr"]], header["shape"]
    except (KeyError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"routed_experts: expected uint8 or uint16 in three dimensions ({error!r})") from None
    row, data = layers * per_token * size, file[data_at:]
    if header["fortran_order"] or min(rows, layers, per_token) < 1 or len(data) != rows * row:
        raise ValueError(f"routed_experts: {len(data)} bytes for the shape {header['shape']}")
    if rows != tokens - 1 - start:
        raise ValueError(f"routed_experts: {rows} tokens, expected {tokens - 1 - start}")
    return RoutedExperts(start, layers, per_token, row, data)


def _checked_list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):  # array() would interpret bytes and strings as raw memory
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value
