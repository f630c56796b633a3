"""Messages between the runner and the process of a Python agent: frames of one map each, and errors by name."""

from __future__ import annotations

import asyncio
from typing import Any

from megaflow_hpc import errors
from megaflow_hpc.errors import MegaflowError, UserCodeError
from megaflow_hpc.host import wire


def frame(message: dict[str, Any]) -> bytes:
    """Frames one message. Raises TypeError, ValueError or OverflowError for what cannot be packed."""
    return wire.frame(wire.pack(message, strict=True))


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Reads the next message; ``None`` at the end, and where the peer sends what is no message."""
    parcel = await wire.read_parcel(reader)
    try:
        found = None if parcel is None else wire.unpack(parcel)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def encode_error(error: BaseException) -> dict[str, str]:
    """Returns an error as :func:`decode_error` makes it again on the other side."""
    if isinstance(error, MegaflowError):
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": UserCodeError.__name__, "text": repr(error)}


def decode_error(message: dict[str, Any]) -> MegaflowError:
    """Returns the error of a message, :class:`~megaflow_hpc.errors.UserCodeError` where its class is not ours."""
    kind = getattr(errors, str(message["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, MegaflowError)):
        kind = UserCodeError
    return kind(str(message["text"]))
