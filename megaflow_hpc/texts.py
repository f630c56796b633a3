"""Handles untrusted text: parses JSON safely, renders conversation messages, and escapes text for a terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.trajectory import image_label

DIGITS = ((100.0, 0), (10.0, 1), (1.0, 2), (0.1, 3))
"""Pairs of (minimum absolute value, number of decimals) for :func:`number`."""
MAX_CONTAINERS = 4_000_000
"""Maximum number of opening brackets in a JSON text, including brackets inside strings. Each bracket may become a
64-byte object."""


def number(value: float) -> str:
    """Formats a number with about three significant digits and no exponent: ``16,320``, ``4.05``, ``0.0012``."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = next((digits for least, digits in DIGITS if abs(value) >= least), 4)
    if abs(value) < 0.00005:
        return "<0.0001" if value > 0 else ">-0.0001"
    return f"{value:,.{decimals}f}"


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: The text is not JSON, is not UTF-8, is nested too deeply, or has more than :data:`MAX_CONTAINERS`
            lists and objects.
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
    """Parses a JSON text that must be an object.

    Raises:
        ValueError: The text is not a JSON object.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not JSON in UTF-8 ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def containers_at(value: Any, depth: int) -> list[Any]:
    """Returns the objects and lists at nesting level ``depth`` of a JSON value. Level 0 is the value itself."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(depth):
        if not level:
            break
        children = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
        level = [child for child in children if isinstance(child, (dict, list))]
    return level


NO_LABELS: Mapping[str, str] = {}


def joined_parts(content: Any, labels: Mapping[str, str] = NO_LABELS) -> Any:
    """Joins a message's content parts into one string. Images are replaced by their labels, and other parts without
    text by ``(<type>)``. Content that is not a list is returned unchanged.

    Args:
        labels: Maps the SHA-256 of each image to its :attr:`~megaflow_hpc.trajectory.Image.label`.
    """
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if isinstance(part, dict) and isinstance(part.get("image_url"), dict):
            part = image_label(part, labels)
        elif isinstance(part, dict):
            part = part.get("text", f"({part.get('type', '?')})")
        parts.append(str(part))
    return "\n".join(parts)


def content_of(message: Mapping[str, Any], labels: Mapping[str, str] = NO_LABELS) -> str:
    """Renders a message in OpenAI format as text: its reasoning, its content, then its tool calls. ``labels`` is passed
    to :func:`joined_parts`."""
    content = joined_parts(message.get("content"), labels)
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


END_CHARACTERS = 200_000
"""Maximum total length of the texts that :func:`end_of` returns, in characters."""
MESSAGE_CHARACTERS = 20_000
"""Maximum length of each text that :func:`end_of` returns, in characters. Longer texts are truncated in the middle."""


def end_of(
    messages: Sequence[Mapping[str, Any]], labels: Mapping[str, str] = NO_LABELS
) -> tuple[list[tuple[str, str]], int]:
    """Returns the last messages of a conversation as (role, truncated text), and the number of earlier messages left
    out. ``labels`` is passed to :func:`joined_parts`."""
    last: list[tuple[str, str]] = []
    left = END_CHARACTERS
    for message in reversed(messages):
        try:
            text = content_of(message, labels)
        except Exception as error:  # a rendering error must not affect other rollouts
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
"""Matches control characters, bidirectional formatting marks, unusual line separators and lone surrogates."""


def printable(text: str) -> str:
    """Escapes characters that could control a terminal, except newlines and tabs."""
    return _STEERING.sub(lambda match: _escape(ord(match[0])), text)


def in_one_line(text: str) -> str:
    """Escapes the same characters as :func:`printable`, and also newlines and tabs. Use it for table cells and for
    names within a sentence."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
