"""Messages between processes: msgpack maps, framed on sockets with a four-byte little-endian length.

A frame contains a *parcel*: one or more packed messages in a row. A process in the middle forwards parcels without
unpacking them. Messages that accumulate while that process is busy are forwarded as one parcel. Lone surrogates in
strings, which come from undecodable sandbox output, are preserved.
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
"""Maximum size of a frame in bytes. A longer frame means that the peer is broken."""

Message = dict[str, Any]


def pack(message: Any, strict: bool = False) -> bytes:
    """Packs one message or part of a message.

    Args:
        strict: Reject values that msgpack does not support. If false, sends their ``str`` instead.

    Raises:
        TypeError: ``strict`` is set and msgpack does not support a value.
        ValueError, OverflowError: An integer exceeds 64 bits, or an object is too large.
    """
    return msgpack.packb(message, unicode_errors="surrogatepass", default=None if strict else str)


def packer() -> Callable[[Any], bytes]:
    """Returns a variant of :func:`pack` that takes half the time for small messages. It is reusable, but not
    thread-safe."""
    return msgpack.Packer(unicode_errors="surrogatepass", default=str).pack


def unpack(data: bytes | bytearray | memoryview) -> Message:
    """Unpacks one message.

    Raises:
        ValueError: ``data`` is not exactly one message.
    """
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
    except (TypeError, ValueError) as error:  # TypeError: a map is used as a map key
        raise ValueError(f"{type(error).__name__}: {error}") from None  # msgpack's own errors include the data


def unpack_all(parcel: bytes | bytearray | memoryview) -> Iterator[Message]:
    """Yields the messages of a parcel, in order.

    Raises:
        ValueError: The parcel contains something other than messages.
    """
    # The buffer size also limits how much memory a length field in the parcel can make the unpacker allocate.
    unpacker = msgpack.Unpacker(
        unicode_errors="surrogatepass", strict_map_key=False, max_buffer_size=max(len(parcel), 1), read_size=1
    )
    unpacker.feed(parcel)
    try:
        for message in unpacker:
            if not isinstance(message, dict):
                raise ValueError(f"expected a message, found {type(message).__name__}")
            yield message
    except TypeError as error:  # a map is used as a map key
        raise ValueError(str(error)) from None


def frame(parcel: bytes) -> bytes:
    """Prepends the length header to a parcel."""
    return _HEADER.pack(len(parcel)) + parcel


async def read_parcel(reader: asyncio.StreamReader) -> bytes | None:
    """Reads the next frame. Returns ``None`` if the peer has closed the connection or sent an invalid frame."""
    try:
        (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return await reader.readexactly(length) if length <= MAX_MESSAGE else None
    except (asyncio.IncompleteReadError, OSError):
        return None


class WireLink:
    """Sends and receives framed parcels over a connected socket without an event loop. Receiving never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._messages: list[Message] = []
        """Unpacked messages not yet returned by :meth:`receive`, in reverse order."""

    def fileno(self) -> int:
        """Returns the socket's file descriptor, so that ``select`` can wait for the link."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends one message as a parcel. Raises OSError if the peer has closed the connection."""
        self.send_parcel(pack(message))

    def send_parcel(self, parcel: bytes) -> None:
        """Sends a parcel, blocking until it is sent. Raises OSError if the peer has closed the connection."""
        self._socket.sendall(frame(parcel))

    def receive(self) -> Message | None:
        """Returns the next message, or ``None`` if none has arrived.

        Raises:
            EOFError: The peer has closed the connection or sent an invalid message.
        """
        if not self._messages:
            parcel = self.receive_parcel(0)
            if parcel is not None:
                try:
                    self._messages = list(unpack_all(parcel))[::-1]
                except ValueError as error:
                    raise EOFError(f"the peer sent an invalid message ({error})") from None
        return self._messages.pop() if self._messages else None

    def receive_parcel(self, enough: int = 1 << 20) -> bytes | None:
        """Returns the complete frames that have arrived as one parcel, of about ``enough`` bytes at most.

        Returns ``None`` if no complete frame has arrived.

        Raises:
            EOFError: The peer closed the connection.
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
                    break  # the next call will detect the end again
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
        self._socket.close()
