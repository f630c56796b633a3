"""Messages between master, ranks and runners: msgpack maps, framed on sockets by a 4-byte length.

``op`` names a message. Master to worker: ``init`` ``start`` ``endpoints`` ``images`` ``beat`` ``stop``. Worker
to master: ``ready`` ``result`` ``beat`` ``left``.
"""

from __future__ import annotations

import select
import socket
import struct
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


def frame(message: Message) -> bytes:
    data = pack(message)
    return _HEADER.pack(len(data)) + data


class Link:
    """Framed messages over a connected socket, for code without an event loop. Reading never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError when the peer is gone."""
        self._socket.sendall(frame(message))

    def receive(self) -> Message | None:
        """The next message, or ``None`` if there is none yet.

        Raises:
            EOFError: the peer closed.
        """
        while True:
            message = self._take()
            if message is not None:
                return message
            if not select.select([self._socket], [], [], 0)[0]:
                return None
            try:
                data = self._socket.recv(1 << 18)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("peer closed")
            self._buffer += data

    def _take(self) -> Message | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > MAX_MESSAGE:
            raise EOFError(f"frame of {length} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        message = unpack(bytes(self._buffer[_HEADER.size : end]))
        del self._buffer[:end]
        return message

    def close(self) -> None:
        self._socket.close()
