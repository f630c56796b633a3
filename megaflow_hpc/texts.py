"""Texts of others: JSON that may be anything, and what of a text a terminal may see."""

from __future__ import annotations

import json
import re
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
