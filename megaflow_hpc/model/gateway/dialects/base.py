"""Helpers shared by the dialects: typed and bounded request fields, message parts, identifiers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from megaflow_hpc.model.json_text import LARGE, brackets, packed
from megaflow_hpc.texts import containers_at

Event = tuple[str, Any]
"""A server-sent event: its name (omitted if empty) and its data. Strings are sent unchanged, other data as JSON."""
Check = Callable[[Any, str], Any]
"""Function that takes a value and its field's name, and returns the value to pass on. Raises :class:`BadRequest` if the
value is invalid."""


MAX_NESTING = 64
"""Maximum nesting of objects and lists. Engines process them recursively, and fail with 500 if they are too deep."""
MAX_ARGUMENTS_LENGTH, MAX_ARGUMENTS_BRACKETS, MAX_ARGUMENTS_VALUES = 2**22, 10_000, 100_000
"""Maximum numbers of characters, of brackets, and of values in a tool call's arguments."""


class BadRequest(ValueError):
    """The request cannot be served. The message names field, value and remedy."""


def typed(value: Any, kind: Any, field: str) -> Any:
    """Converts ``value`` to ``kind``, which is any type that msgspec supports. Drops unknown fields of structs.

    Raises:
        BadRequest: The value has the wrong type. The message names the field, the expected type and the actual type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(_explained(error, value, kind, field)) from None
    except UnicodeEncodeError:  # a lone surrogate in a key
        raise BadRequest(f"{field}: the name of a field is not valid Unicode") from None


def of(kind: Any) -> Check:
    """Returns a function that checks whether a value has the given type."""

    def check(value: Any, field: str) -> Any:
        return typed(value, kind, field)

    return check


_PATH = re.compile(r" - at `\$(.*)`\Z", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _explained(error: msgspec.ValidationError, value: Any, kind: Any, field: str) -> str:
    """Rewrites msgspec's error as a sentence that starts with the field."""
    match = _PATH.search(str(error))
    path = match[1] if match else ""
    where = field + path
    if error.__cause__ is not None:  # raised by one of this package's structs, so it already starts with a field
        return f"{where}.{error.__cause__}"
    cause = _PATH.sub("", str(error))
    if missing := _MISSING.fullmatch(cause):
        return f"{where}.{missing[1]}: expected a value, found nothing"
    if ", got" in cause or "[...]" in path:  # for values in a map, msgspec does not give the key
        return f"{where}: {_lower(cause).replace(', got', ', found')}"
    wrong, choices = _value_at(value, kind, path)
    if choices:
        cause = f"expected one of {', '.join(choices)}"
    return f"{where}: {_lower(cause)}" + ("" if isinstance(wrong, dict | list) else f", found {shown(wrong)}")


def _value_at(value: Any, kind: Any, path: str) -> tuple[Any, list[str]]:
    """Returns the value at a path, and the literals or struct tags that are valid there."""
    kinds = _members(inspect.type_info(kind))
    for name, number in _STEP.findall(path):
        tags = [str(kind.tag) for kind in kinds if isinstance(kind, inspect.StructType) and kind.tag_field == name]
        if tags:
            return value[name], tags
        kinds = [inner for kind in kinds for inner in _within(kind, value, name)]
        value = value[name or int(number)]
    literals = [kind.values for kind in kinds if isinstance(kind, inspect.LiteralType)]
    return value, [str(choice) for choices in literals for choice in choices]


def _within(kind: inspect.Type, value: Any, name: str) -> Iterator[inspect.Type]:
    """Yields the possible types of the field ``name`` of ``value``, or of its items if ``name`` is empty."""
    if not name and isinstance(kind, inspect.ListType):
        yield from _members(kind.item_type)
    elif isinstance(kind, inspect.StructType) and kind.tag in (None, value.get(kind.tag_field, kind.tag)):
        for field in kind.fields:
            if field.encode_name == name:
                yield from _members(field.type)


def _members(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def shown(value: Any) -> str:
    """Formats a value for an error message, in one line. Large values are represented by their type."""
    if isinstance(value, str | bool | float) or value is None:
        return repr(value[:100] if isinstance(value, str) else value)
    if isinstance(value, int) and abs(value) < 2**70:
        return str(value)
    return f"a value of type {type(value).__name__}"


# --- limits ----------------------------------------------------------------------------------------------------------


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
    if len(packed(value)) > max_bytes:
        raise BadRequest(f"{field}: more than the {max_bytes} bytes of JSON that are allowed")


def bounded_arguments(text: str, field: str) -> str:
    """Checks a tool call's encoded arguments, because engines decode them. A model wrote them, so they may be invalid
    JSON."""
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
    """Encodes a tool call's arguments as JSON, for APIs in which agents send them as values."""
    bounded(value, field, MAX_ARGUMENTS_LENGTH)
    return json.dumps(value, ensure_ascii=False)


def _decodes_deep(encoded: str) -> bool:
    try:
        return too_deep(json.loads(encoded))
    except RecursionError:
        return True
    except ValueError:
        return False  # an engine's decoder also stops at the syntax error


# --- parts of messages -----------------------------------------------------------------------------------------------


def new_id(prefix: str) -> str:
    """Returns a new identifier: ``prefix_`` and 24 hexadecimal digits."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def text_part(text: str) -> dict[str, Any]:
    """Returns a text part for a chat message."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Returns an image part of a chat message. ``url`` may be a ``data:`` URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns the content of a chat message: the list of parts or, if all parts are text, a string, because every chat
    template accepts strings."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return [dict(part) for part in parts]


def text_of(parts: Sequence[Mapping[str, Any]], glue: str = "") -> str:
    """Returns the concatenated text parts of chat content."""
    return glue.join(part["text"] for part in parts if part["type"] == "text")


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function tool for a chat request. ``parameters`` is a JSON schema."""
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}
