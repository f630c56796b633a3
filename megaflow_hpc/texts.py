"""Texts of others: JSON that may be anything, messages of conversations, and what of a text a terminal may see."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MOST = 4_000_000
"""Brackets that a JSON text may hold, those in its strings included: each may become an object of 64 bytes."""


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, nested more deeply than anything that was meant to be read, or of more
            lists and objects than :data:`MOST`.
    """
    if len(text) > MOST:
        counts = [text.count(b) for b in "[{"] if isinstance(text, str) else [text.count(b) for b in (b"[", b"{")]
        if sum(counts) > MOST:
            raise ValueError(f"more than {MOST} lists and objects")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns the value of a JSON text that is an object.

    Raises:
        ValueError: it is none.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ValueError(f"no JSON in UTF-8 ({error})") from None
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def containers_at(value: Any, depth: int) -> list[Any]:
    """Returns the objects and lists of a JSON value that lie inside ``depth`` others."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        if not level:
            break
        level = [c for v in level for c in (v.values() if isinstance(v, dict) else v) if isinstance(c, (dict, list))]
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
        said = function if isinstance(function, dict) else {}
        lines.append(f"→ {said.get('name', '?')}({said.get('arguments', '')})")
    return "\n".join(lines)


END_CHARACTERS, MESSAGE_CHARACTERS = 200_000, 20_000


def end_of(messages: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], int]:
    """Returns role and text of the last messages of a conversation, bounded, and how many come before them."""
    found: list[tuple[str, str]] = []
    left = END_CHARACTERS
    for message in reversed(messages):
        try:
            text = content_of(message)
        except Exception as error:  # whoever looks must not cost the rollouts beside this one
            text = f"it cannot be shown: {error!r}"
        if len(text) > MESSAGE_CHARACTERS:
            half = MESSAGE_CHARACTERS // 2
            text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
        left -= len(text)
        if left < 0 and found:
            break
        found.append((str(message.get("role", "?")), text))
    return found[::-1], len(messages) - len(found)


_STEERING = re.compile(
    "[^\n\t -~\u00a0-\U0010ffff]|[\u00ad\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
"""Control characters, marks that turn the direction of writing, ends of lines that are none, lone surrogates."""


def printable(text: str) -> str:
    """``text`` without what could steer a terminal: such characters become escapes; ends of lines and tabs stay."""
    return _STEERING.sub(lambda found: _escape(ord(found[0])), text)


def in_one_line(text: str) -> str:
    """:func:`printable`, with ends of lines and tabs as escapes too: a cell of a table, a name in a sentence."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
