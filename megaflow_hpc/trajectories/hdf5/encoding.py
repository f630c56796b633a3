"""Encodes text so that a campaign file can hold it.

HDF5 strings hold neither NUL nor lone surrogates (bytes of a program that were not UTF-8). In string columns they are
written as the escapes ``\\x00`` and ``\\udc80``. Messages lose nothing: there the same escapes are JSON's own, and
parsing the JSON gives the original string back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson


def escape(text: str) -> str:
    """Returns the text as an HDF5 string can hold it."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def message_json(message: Mapping[str, Any]) -> bytes:
    """Returns a message as strict JSON in UTF-8; numbers that JSON lacks become null, other values strings."""
    try:
        return orjson.dumps(message, default=_text)  # several times as fast; refuses lone surrogates and large integers
    except TypeError:
        text = json.dumps(_plain(message), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_text)
        return text.encode("utf-8", "backslashreplace")


def reward_name(name: str) -> str:
    """Returns a verifier's name for a reward as the name of a dataset: never a path, never empty."""
    plain = escape(name).replace("/", "_")
    return plain if plain.strip(".") else f"_{plain}"


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


DEEPEST = 200
"""Levels of a message; what lies deeper is left out, since few readers of JSON would take it."""


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= DEEPEST and isinstance(value, Mapping | list | tuple):
        return None
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _text(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return value
