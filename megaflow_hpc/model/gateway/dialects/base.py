"""Helpers that the dialects share: message parts, identifiers, checks of a request's fields."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

Event = tuple[str, Any]
"""One server-sent event: its name (empty: no name is sent) and its data (text as it is, else sent as JSON)."""


class BadRequest(ValueError):
    """The request cannot be served; the message names field, value and remedy."""


def new_id(prefix: str) -> str:
    """Returns a new identifier, ``prefix_`` and 24 hexadecimal digits."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def text_part(text: str) -> dict[str, Any]:
    """Returns a text part of a chat message."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Returns an image part of a chat message; ``url`` may be a ``data:`` URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: Sequence[Mapping[str, Any]], glue: str = "\n") -> str | list[dict[str, Any]]:
    """Returns chat content: text alone as one string, which every chat template takes, else the parts."""
    if all(part["type"] == "text" for part in parts):
        return glue.join(part["text"] for part in parts)
    return [dict(part) for part in parts]


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """Returns a function as chat requests offer it; ``parameters`` is a JSON schema."""
    function = {"name": name, "parameters": parameters}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Returns a message's reasoning, which engines put into a field of either of two names."""
    return message.get("reasoning") or message.get("reasoning_content") or ""


def expect_list(value: Any, field: str) -> list[Any]:
    """Returns ``value``; raises :class:`BadRequest`, which names ``field``, if it is no list."""
    if not isinstance(value, list):
        raise BadRequest(f"{field}: expected a list, found {type(value).__name__}")
    return value


def expect_object(value: Any, field: str) -> Mapping[str, Any]:
    """Returns ``value``; raises :class:`BadRequest`, which names ``field``, if it is no object."""
    if not isinstance(value, Mapping):
        raise BadRequest(f"{field}: expected an object, found {type(value).__name__}")
    return value


def expect_text(value: Any, field: str) -> str:
    """Returns ``value``; raises :class:`BadRequest`, which names ``field``, if it is no text."""
    if not isinstance(value, str):
        raise BadRequest(f"{field}: expected a text, found {type(value).__name__}")
    return value
