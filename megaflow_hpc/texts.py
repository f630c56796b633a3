"""Untrusted texts: parses JSON safely, renders messages of conversations, and escapes text for a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CONTAINERS = 4_000_000
"""Opening brackets that a JSON text may hold, including those in strings. Each may become an object of 64 bytes."""


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, nested too deeply, or has more than :data:`MAX_CONTAINERS` lists and
            objects.
    """
    if len(text) > MAX_CONTAINERS:
        brackets: tuple[Any, Any] = ("[", "{") if isinstance(text, str) else (b"[", b"{")
        if sum(map(text.count, brackets)) > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} lists and objects")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns the value of a JSON text that is an object.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"no JSON in UTF-8 ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def containers_at(value: Any, depth: int) -> list[Any]:
    """Returns the objects and lists of a JSON value that are nested inside ``depth`` others."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        if not level:
            break
        children = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
        level = [child for child in children if isinstance(child, (dict, list))]
    return level


def content_of(message: Mapping[str, Any]) -> str:
    """Returns the text of a message in OpenAI form: reasoning, content, then its tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", f"({part.get('type', '?')})") if isinstance(part, dict) else part for part in content]
        content = "\n".join(str(part) for part in parts)
    lines = [] if content in (None, "") else [str(content)]
    for field in ("reasoning_content", "reasoning"):
        if message.get(field):
            lines.insert(0, f"({field}) {message[field]}")
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        lines.append(f"→ {function.get('name', '?')}({function.get('arguments', '')})")
    return "\n".join(lines)


END_CHARACTERS, MESSAGE_CHARACTERS = 200_000, 20_000


def end_of(messages: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], int]:
    """Returns role and text of the last messages of a conversation, shortened, and the number of earlier messages."""
    last: list[tuple[str, str]] = []
    left = END_CHARACTERS
    for message in reversed(messages):
        try:
            text = content_of(message)
        except Exception as error:  # a viewer must not harm the other rollouts
            text = f"it cannot be shown: {error!r}"
        if len(text) > MESSAGE_CHARACTERS:
            half = MESSAGE_CHARACTERS // 2
            text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
        left -= len(text)
        if left < 0 and last:
            break
        last.append((str(message.get("role", "?")), text))
    return last[::-1], len(messages) - len(last)


_STEERING = re.compile(
    "[^\n\t -~\u00a0-\U0010ffff]|[\u00ad\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
"""Control characters, marks of writing direction, unusual line separators, lone surrogates."""


def printable(text: str) -> str:
    """Escapes characters that could control a terminal. Newlines and tabs stay."""
    return _STEERING.sub(lambda match: _escape(ord(match[0])), text)


def in_one_line(text: str) -> str:
    """Escapes newlines and tabs too, for a cell of a table or a name in a sentence; see :func:`printable`."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
