"""Messages between the runner and a Python agent's process. Each frame holds one map; errors are sent by class name."""

from __future__ import annotations

import asyncio
from typing import Any

from megaflow_hpc import errors
from megaflow_hpc.errors import MegaflowError, UserCodeError
from megaflow_hpc.host import wire


def frame(message: dict[str, Any]) -> bytes:
    """Packs and frames one message. Raises TypeError, ValueError or OverflowError if it cannot be packed."""
    return wire.frame(wire.pack(message, strict=True))


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Reads the next message. Returns ``None`` on end-of-file or if the message is invalid."""
    parcel = await wire.read_parcel(reader)
    try:
        message = None if parcel is None else wire.unpack(parcel)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def encode_error(error: BaseException) -> dict[str, str]:
    """Encodes an exception for :func:`decode_error` on the other side."""
    if isinstance(error, MegaflowError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": UserCodeError.__name__, "text": repr(error)}


def decode_error(message: dict[str, Any]) -> MegaflowError:
    """Decodes an exception. Classes that this package does not define become
    :class:`~megaflow_hpc.errors.UserCodeError`."""
    kind = getattr(errors, str(message["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, MegaflowError)):
        kind = UserCodeError
    return kind(str(message["text"]))
