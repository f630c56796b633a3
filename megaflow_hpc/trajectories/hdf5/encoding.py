r"""Encodes text so that HDF5 can store it.

HDF5 strings cannot contain NUL or lone surrogates (undecodable bytes from program output). String columns store the
escapes ``\x00`` and ``\udc80`` instead. Messages are stored losslessly, because JSON has equivalent escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import orjson


def escape(text: str) -> str:
    """Escapes NUL and lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def message_json(message: Mapping[str, Any]) -> bytes:
    """Encodes a message as strict UTF-8 JSON. NaN and infinities become null; unsupported types become strings."""
    try:
        return orjson.dumps(message, default=_text)  # much faster, but rejects lone surrogates and large integers
    except TypeError:
        text = json.dumps(_plain(message), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_text)
        return text.encode("utf-8", "backslashreplace")


def reward_name(name: str) -> str:
    """Converts a verifier's reward name to a dataset name, which is never a path and never empty."""
    plain = escape(name).replace("/", "_")
    return plain if plain.strip(".") else f"_{plain}"


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


MAX_DEPTH = 200
"""Maximum nesting depth of a message. Deeper values are dropped, since few JSON parsers accept them."""


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
