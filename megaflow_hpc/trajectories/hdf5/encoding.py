"""Encodes text so that a campaign file can hold it.

HDF5 strings can hold neither NUL nor lone surrogates (bytes of a program that were not UTF-8). String columns hold the
escapes ``\\x00`` and ``\\udc80`` instead. Messages lose nothing, because JSON has the same escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson


def escape(text: str) -> str:
    """Returns the text with escapes for NUL and lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def message_json(message: Mapping[str, Any]) -> bytes:
    """Returns a message as strict JSON in UTF-8. NaN and infinities become null; unknown types become strings."""
    try:
        return orjson.dumps(message, default=_text)  # several times as fast; refuses lone surrogates and large integers
    except TypeError:
        text = json.dumps(_plain(message), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_text)
        return text.encode("utf-8", "backslashreplace")


def reward_name(name: str) -> str:
    """Returns a dataset name for a verifier's reward. It is never a path and never empty."""
    plain = escape(name).replace("/", "_")
    return plain if plain.strip(".") else f"_{plain}"


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


MAX_DEPTH = 200
"""Maximum nesting of a message. Deeper values are left out, since few JSON parsers accept them."""


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        return None
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _text(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return value
