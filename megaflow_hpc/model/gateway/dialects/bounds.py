"""Limits on JSON that an engine decodes, prints or compiles: nesting, size, and number of values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from megaflow_hpc.model.gateway.dialects.base import BadRequest
from megaflow_hpc.model.json_text import LARGE, brackets
from megaflow_hpc.texts import containers_at

MAX_NESTING = 64
"""Maximum nesting of objects and lists. Engines process them recursively, and respond with 500 beyond their own
limit."""
MAX_ARGUMENTS_LENGTH, MAX_ARGUMENTS_BRACKETS, MAX_ARGUMENTS_VALUES = 2**22, 10_000, 100_000
"""Limits for a tool call's arguments: characters, objects and lists, and values."""


def shallow(value: Any, field: str) -> None:
    """Raises :class:`BadRequest` if objects and lists nest deeper than :data:`MAX_NESTING`."""
    if too_deep(value):
        raise BadRequest(f"{field}: nested deeper than {MAX_NESTING} levels")


def too_deep(value: Any) -> bool:
    """Returns whether objects and lists nest deeper than :data:`MAX_NESTING`."""
    return any(containers_at(value, MAX_NESTING))  # an empty container adds no depth


def bounded(value: Any, field: str, max_bytes: int) -> None:
    """Raises :class:`BadRequest` if ``value`` encodes to more than ``max_bytes`` of JSON or is nested too deeply."""
    shallow(value, field)
    values, characters = _weight(value, max_bytes // 2, max_bytes)
    if 2 * values + characters <= max_bytes:  # more than this is too long in any encoding
        try:
            encoded = orjson.dumps(value)
        except TypeError:  # a lone surrogate
            encoded = json.dumps(value).encode()
        if len(encoded) <= max_bytes:
            return
    raise BadRequest(f"{field}: more than the {max_bytes} bytes of JSON that are allowed")


def _weight(value: Any, max_values: int, max_characters: int) -> tuple[int, int]:
    """Counts the values and characters in a value. Stops soon after either maximum is exceeded."""
    rest, values, characters = [value], 0, 0
    while rest and values <= max_values and characters <= max_characters:
        item = rest.pop()
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, list):
            values += len(item)
            rest += item
        elif isinstance(item, Mapping):
            values += len(item)
            characters += sum(map(len, item))
            rest += item.values()
    return values, characters


def bounded_arguments(text: str, field: str) -> str:
    """Checks a tool call's encoded arguments, which engines decode. They may be invalid JSON, because a model wrote
    them."""
    if len(text) > MAX_ARGUMENTS_LENGTH:
        raise BadRequest(f"{field}: {len(text)} characters; {MAX_ARGUMENTS_LENGTH} are allowed")
    opened = deepest = containers = values = 0
    for part, commas in brackets(text.encode("utf-8", "surrogatepass")):
        values += commas
        for bracket in part:
            opened += 1 if bracket in b"[{" else -1
            containers += bracket in b"[{"
            deepest = max(deepest, opened)
        if containers > MAX_ARGUMENTS_BRACKETS or values > MAX_ARGUMENTS_VALUES:
            limits = f"{MAX_ARGUMENTS_BRACKETS} objects and lists, or {MAX_ARGUMENTS_VALUES} values"
            raise BadRequest(f"{field}: over {limits}")
    if deepest > MAX_NESTING and (len(text) > LARGE or _decodes_deep(text)):
        raise BadRequest(f"{field}: nested deeper than {MAX_NESTING} levels")
    return text


def written_arguments(value: Any, field: str) -> str:
    """Encodes a tool call's arguments, which the agent sent as values, as JSON."""
    shallow(value, field)
    values, characters = _weight(value, MAX_ARGUMENTS_VALUES, MAX_ARGUMENTS_LENGTH)
    if values > MAX_ARGUMENTS_VALUES or characters > MAX_ARGUMENTS_LENGTH:
        raise BadRequest(f"{field}: over {MAX_ARGUMENTS_VALUES} values, or {MAX_ARGUMENTS_LENGTH} characters")
    return json.dumps(value, ensure_ascii=False)


def _decodes_deep(encoded: str) -> bool:
    try:
        return too_deep(json.loads(encoded))
    except RecursionError:
        return True
    except ValueError:
        return False  # an engine's decoder also stops at the syntax error
