"""Messages between master, ranks and runners: msgpack maps, framed on sockets by a 4-byte length.

``op`` names a message. Master to worker: ``init`` ``start`` ``cancel`` ``endpoints`` ``images`` ``suspend`` ``beat``
``stop``.
Worker to master: ``ready`` ``result`` ``beat`` ``left``.

What travels is a *parcel*: one message or several, one packed behind another. A rank between the two ends passes
parcels on unopened, and what gathers while it is busy goes out as one.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgpack

_HEADER = struct.Struct("<I")
MAX_MESSAGE = 512 * 1024 * 1024
"""Bytes; a longer frame is a broken peer, not a message."""

Message = dict[str, Any]


def pack(message: Any) -> bytes:
    # Text from a sandbox may hold lone surrogates (undecodable bytes); they pass through unchanged.
    return msgpack.packb(message, use_bin_type=True, unicode_errors="surrogatepass", default=str)


def unpack(data: bytes | bytearray | memoryview) -> Message:
    return msgpack.unpackb(data, raw=False, unicode_errors="surrogatepass", strict_map_key=False)


def unpack_all(parcel: bytes | bytearray | memoryview) -> Iterator[Message]:
    """The messages of a parcel, in order."""
    unpacker = msgpack.Unpacker(
        raw=False,
        unicode_errors="surrogatepass",
        strict_map_key=False,
        max_buffer_size=MAX_MESSAGE,
        read_size=1 << 16,
    )
    unpacker.feed(parcel)
    yield from unpacker


BEAT, STOP = pack({"op": "beat"}), pack({"op": "stop"})
"""Each travels as a parcel of its own, so that a rank knows it unopened."""


def frame(message: Message) -> bytes:
    return frame_parcel(pack(message))


def frame_parcel(parcel: bytes) -> bytes:
    return _HEADER.pack(len(parcel)) + parcel


class Link:
    """Framed parcels over a connected socket, for code without an event loop. Reading never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._messages: list[Message] = []
        """Opened and not yet received, the next one last."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError when the peer is gone."""
        self.send_parcel(pack(message))

    def send_parcel(self, parcel: bytes) -> None:
        """Raises OSError when the peer is gone."""
        self._socket.sendall(frame_parcel(parcel))

    def receive(self) -> Message | None:
        """The next message, or ``None`` if there is none yet.

        Raises:
            EOFError: the peer closed.
        """
        if not self._messages:
            parcel = self.receive_parcel(0)
            if parcel is not None:
                self._messages = list(unpack_all(parcel))[::-1]
        return self._messages.pop() if self._messages else None

    def receive_parcel(self, enough: int = 1 << 20) -> bytes | None:
        """What has arrived whole, as one parcel of about ``enough`` bytes at most, or ``None``.

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
        self._socket.close()
