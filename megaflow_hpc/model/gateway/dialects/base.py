"""Helpers shared by the dialects: typed request fields, message parts, identifiers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

Event = tuple[str, Any]
"""A server-sent event: its name (omitted if empty) and its data (a string is sent unchanged, anything else as JSON)."""
Check = Callable[[Any, str], Any]
"""(value, field name) → the value to pass on. Raises :class:`BadRequest` if the value is invalid."""


class BadRequest(ValueError):
    """The request cannot be served. The message names field, value and remedy."""


def typed(value: Any, kind: Any, field: str) -> Any:
    """Converts ``value`` to ``kind``, any type that msgspec supports. Unknown fields of a struct are dropped.

    Raises:
        BadRequest: The value has another type. The message names the field, the expected type and the actual one.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(_explained(error, value, kind, field)) from None
    except UnicodeEncodeError:  # a lone surrogate in a key
        raise BadRequest(f"{field}: the name of a field is not valid Unicode") from None


def of(kind: Any) -> Check:
    """Returns a check that values have the given type."""

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
    if error.__cause__ is not None:  # raised by one of this package's structs; already starts with a field
        return f"{where}.{error.__cause__}"
    cause = _PATH.sub("", str(error))
    if missing := _MISSING.fullmatch(cause):
        return f"{where}.{missing[1]}: expected a value, found nothing"
    if ", got" in cause or "[...]" in path:  # msgspec does not name the value in a map
        return f"{where}: {_lower(cause).replace(', got', ', found')}"
    wrong, choices = _value_at(value, kind, path)
    if choices:
        cause = f"expected one of {', '.join(choices)}"
    return f"{where}: {_lower(cause)}" + ("" if isinstance(wrong, dict | list) else f", found {shown(wrong)}")


def _value_at(value: Any, kind: Any, path: str) -> tuple[Any, list[str]]:
    """Returns the value at a path, and the strings that its type allows there: literals or struct tags."""
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
    """Yields the possible types of a field of ``value``, or of its items if ``name`` is empty."""
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
    """Formats a value for a message in at most one line. A large value is represented by its type."""
    if isinstance(value, str | bool | float) or value is None:
        return repr(value[:100] if isinstance(value, str) else value)
    if isinstance(value, int) and abs(value) < 2**70:
        return str(value)
    return f"a value of type {type(value).__name__}"


def new_id(prefix: str) -> str:
    """Returns a new identifier: ``prefix_`` and 24 hexadecimal digits."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def text_part(text: str) -> dict[str, Any]:
    """Returns a text part of a chat message."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Returns an image part of a chat message; ``url`` may be a ``data:`` URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: Sequence[Mapping[str, Any]], glue: str = "\n") -> str | list[dict[str, Any]]:
    """Returns chat content: a single string if there is only text, which every chat template accepts, otherwise the
    parts."""
    if all(part["type"] == "text" for part in parts):
        return glue.join(part["text"] for part in parts)
    return [dict(part) for part in parts]


def text_of(parts: Sequence[Mapping[str, Any]], glue: str = "") -> str:
    """Returns the concatenated text parts of chat content."""
    return glue.join(part["text"] for part in parts if part["type"] == "text")


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function tool for a chat request; ``parameters`` is a JSON schema."""
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}
