"""Messages between the runner and the process of a Python agent: frames with one map each, and errors by name."""

from __future__ import annotations

import asyncio
from typing import Any

from megaflow_hpc import errors
from megaflow_hpc.errors import MegaflowError, UserCodeError
from megaflow_hpc.host import wire


def frame(message: dict[str, Any]) -> bytes:
    """Frames one message. Raises TypeError, ValueError or OverflowError if it cannot be packed."""
    return wire.frame(wire.pack(message, strict=True))


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Reads the next message; returns ``None`` at the end, or if the peer sends an invalid message."""
    parcel = await wire.read_parcel(reader)
    try:
        message = None if parcel is None else wire.unpack(parcel)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def encode_error(error: BaseException) -> dict[str, str]:
    """Encodes an error for :func:`decode_error` on the other side."""
    if isinstance(error, MegaflowError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": UserCodeError.__name__, "text": repr(error)}


def decode_error(message: dict[str, Any]) -> MegaflowError:
    """Decodes an error; it is a :class:`~megaflow_hpc.errors.UserCodeError` if its class is not part of this
    package."""
    kind = getattr(errors, str(message["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, MegaflowError)):
        kind = UserCodeError
    return kind(str(message["text"]))
