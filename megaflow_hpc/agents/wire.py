"""Frames between the runner and the process of a Python agent: a length, then msgpack; and errors by name."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgpack

from megaflow_hpc import errors
from megaflow_hpc.errors import MegaflowError, UserCodeError

MAX_FRAME = 1 << 30


def frame(message: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return struct.pack("<I", len(packed)) + packed


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; ``None`` at the end."""
    try:
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        if length > MAX_FRAME:
            return None
        data = await reader.readexactly(length)
        found = msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    except (asyncio.IncompleteReadError, OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def told(error: BaseException) -> dict[str, str]:
    """An error as the other side raises it again."""
    if isinstance(error, MegaflowError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": UserCodeError.__name__, "text": repr(error)}


def raised(message: dict[str, Any]) -> MegaflowError:
    kind = getattr(errors, str(message["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, MegaflowError)):
        kind = UserCodeError
    return kind(str(message["text"]))
