"""Copies a Python agent's output to the pod's log: line by line, with a label, limited, and without escape sequences.
Copies a Python agent's output to the pod's log: line by line, with a label, limited, and without escape sequences."""

from __future__ import annotations

import asyncio
import os
import sys

from megaflow_hpc.texts import in_one_line

MAX_SHOWN_BYTES = 64 * 1024
"""Maximum bytes shown of one agent. Further output is read and dropped, so that the agent does not block."""
MAX_LINE_BYTES = 4096
"""Bytes after which a line is broken."""
DRAIN_S = 5.0
"""Seconds after an agent's end in which its remaining processes may still print."""


class Prints(asyncio.Protocol):
    """Shows the output of one pipe; created by :meth:`open`.

    Args:
        name: Label in front of each line.
    """

    def __init__(self, name: str) -> None:
        self._name, self._left, self._rest = name, MAX_SHOWN_BYTES, b""
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def open(cls, name: str) -> tuple[Prints, int]:
        """Returns a new instance and the descriptor for the agent's output, which the caller must close."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        shows = cls(name)
        await asyncio.get_running_loop().connect_read_pipe(lambda: shows, os.fdopen(ours, "rb", buffering=0))
        return shows, theirs

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._left:
            return
        *lines, self._rest = (self._rest + data[: self._left]).split(b"\n")
        self._left -= len(data[: self._left])
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        for line in lines:
            self._show(line)
        if not self._left:
            self._flush()
            self._show(f"(it printed more than {MAX_SHOWN_BYTES} bytes; the rest is not shown)".encode())

    def connection_lost(self, error: Exception | None) -> None:
        self._flush()

    def end(self) -> None:
        """Closes the pipe after a short delay, because the agent has ended."""
        if self._transport is not None:
            asyncio.get_running_loop().call_later(DRAIN_S, self._transport.close)

    def _flush(self) -> None:
        if self._rest:
            self._show(self._rest)
            self._rest = b""

    def _show(self, line: bytes) -> None:
        text = in_one_line(line.removesuffix(b"\r").decode("utf-8", "backslashreplace"))
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)
