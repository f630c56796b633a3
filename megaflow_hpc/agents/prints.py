"""What a Python agent prints, on its way to the pod's log: a line at a time, named, bounded, and without escapes."""

from __future__ import annotations

import asyncio
import os
import sys

from megaflow_hpc.texts import in_one_line

MOST = 64 * 1024
"""Bytes of one agent that are shown; what it prints beyond is read, so that it need not wait, and dropped."""
LINE = 4096
"""Bytes after which a line is broken."""
LAST_S = 5.0
"""Seconds after an agent's end in which what it left running may still print."""


class Prints(asyncio.Protocol):
    """Shows what comes through one pipe; made by :meth:`open`.

    Args:
        name: Stands before each line.
    """

    def __init__(self, name: str) -> None:
        self._name, self._left, self._rest = name, MOST, b""
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def open(cls, name: str) -> tuple[Prints, int]:
        """Returns what shows an agent's prints, and the descriptor to print to, which the caller closes."""
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
        while len(self._rest) > LINE:
            lines.append(self._rest[:LINE])
            self._rest = self._rest[LINE:]
        for line in lines:
            self._show(line)
        if not self._left:
            self._flush()
            self._show(f"(it prints more than {MOST} bytes; no more is shown)".encode())

    def connection_lost(self, error: Exception | None) -> None:
        self._flush()

    def end(self) -> None:
        """Stops soon: the agent has ended."""
        if self._transport is not None:
            asyncio.get_running_loop().call_later(LAST_S, self._transport.close)

    def _flush(self) -> None:
        if self._rest:
            self._show(self._rest)
            self._rest = b""

    def _show(self, line: bytes) -> None:
        text = in_one_line(line.removesuffix(b"\r").decode("utf-8", "backslashreplace"))
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)
