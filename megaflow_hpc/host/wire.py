"""Messages between processes: msgpack maps, framed on sockets by a length of four bytes, little-endian.

A frame holds a *parcel*: one packed message or several, one behind another. A process between two ends passes parcels
on unopened, and what gathers while it is busy goes out as one. Text may hold lone surrogates, as undecodable output of
a sandbox does; they pass through unchanged.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

_HEADER = struct.Struct("<I")
MAX_MESSAGE = 512 * 1024 * 1024
"""Bytes; a longer frame is a broken peer, not a message."""

Message = dict[str, Any]


def pack(message: Any, strict: bool = False) -> bytes:
    """Packs one message, or a part of one.

    Args:
        strict: refuses values that msgpack does not know; else ``str`` of them is sent.

    Raises:
        TypeError: a value msgpack does not know, where ``strict``.
        ValueError, OverflowError: an integer or a length beyond 64 bits.
    """
    return msgpack.packb(message, unicode_errors="surrogatepass", default=None if strict else str)


def packer() -> Callable[[Any], bytes]:
    """Returns a :func:`pack` for one thread that packs many small messages: half of its time is saved."""
    return msgpack.Packer(unicode_errors="surrogatepass", default=str).pack


def unpack(data: bytes | bytearray | memoryview) -> Message:
    """Unpacks one message.

    Raises:
        ValueError: ``data`` is not exactly one.
    """
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    except (TypeError, ValueError) as error:  # TypeError: a map as the key of a map
        raise ValueError(f"{type(error).__name__}: {error}") from None  # msgpack's own carry what they read


def unpack_all(parcel: bytes | bytearray | memoryview) -> Iterator[Message]:
    """Yields the messages of a parcel, in order.

    Raises:
        ValueError: something in it is no message.
    """
    # The buffer's size bounds what a length in the parcel makes the unpacker ask for, too.
    unpacker = msgpack.Unpacker(
        unicode_errors="surrogatepass", strict_map_key=False, max_buffer_size=max(len(parcel), 1), read_size=1
    )
    unpacker.feed(parcel)
    try:
        for message in unpacker:
            if not isinstance(message, dict):
                raise ValueError(f"a {type(message).__name__} for a message")
            yield message
    except TypeError as error:  # a map as the key of a map
        raise ValueError(str(error)) from None


def frame(parcel: bytes) -> bytes:
    """Puts the length before a parcel."""
    return _HEADER.pack(len(parcel)) + parcel


async def read_parcel(reader: asyncio.StreamReader) -> bytes | None:
    """Reads the next frame; ``None`` when the peer has closed, or sends what is no frame."""
    try:
        (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return await reader.readexactly(length) if length <= MAX_MESSAGE else None
    except (asyncio.IncompleteReadError, OSError):
        return None


class WireLink:
    """Framed parcels over a connected socket, for code without an event loop. Reading never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._messages: list[Message] = []
        """Opened and not yet received, the next one last."""

    def fileno(self) -> int:
        """Returns the socket's file descriptor, by which ``select`` can wait for a link."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a parcel of one message. Raises OSError when the peer is gone."""
        self.send_parcel(pack(message))

    def send_parcel(self, parcel: bytes) -> None:
        """Sends a parcel; blocks until it has left. Raises OSError when the peer is gone."""
        self._socket.sendall(frame(parcel))

    def receive(self) -> Message | None:
        """Returns the next message, or ``None`` if there is none yet.

        Raises:
            EOFError: the peer closed, or is broken: what it sends is no message.
        """
        if not self._messages:
            parcel = self.receive_parcel(0)
            if parcel is not None:
                try:
                    self._messages = list(unpack_all(parcel))[::-1]
                except ValueError as error:
                    raise EOFError(f"what arrived is no message ({error})") from None
        return self._messages.pop() if self._messages else None

    def receive_parcel(self, enough: int = 1 << 20) -> bytes | None:
        """Returns what has arrived whole, as one parcel of about ``enough`` bytes at most, or ``None``.

        Raises:
            EOFError: the peer closed.
        """
        parcels: list[bytes] = []
        size = 0
        while True:
            parcel = self._take()
            if parcel is not None:
                parcels.append(parcel)
                size += len(parcel)
                if size >= enough:
                    break
                continue
            if not select.select([self._socket], [], [], 0)[0]:
                break
            try:
                data = self._socket.recv(1 << 18)
            except ConnectionError:
                data = b""
            if not data:
                if parcels:
                    break  # the next look finds the end again
                raise EOFError("peer closed")
            self._buffer += data
        return b"".join(parcels) if parcels else None

    def _take(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > MAX_MESSAGE:
            raise EOFError(f"frame of {length} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        parcel = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return parcel

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
