"""Carries connections from listening sockets to the ports of a service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import Address
from megaflow_hpc.errors import SandboxError

CHUNK_BYTES = 1 << 16
BATCH = 16
"""Number of sockets to make in a service's network at a time. Making them starts a process."""
MAX_CONNECTIONS = 256
"""Maximum number of open connections of a sandbox to its services. Others wait."""
CONNECT_TIMEOUT_S = 10.0

Dial = Callable[[], Awaitable[socket.socket]]
"""Connects to a service. Raises OSError or SandboxError if that fails."""


class Dialer:
    """Connects to programs that listen on 127.0.0.1 in a sandbox."""

    def __init__(self, sandbox: ApptainerSandbox) -> None:
        self._sandbox = sandbox
        self._free: list[socket.socket] = []
        self._making = asyncio.Lock()

    async def connect(self, port: int) -> socket.socket:
        """Returns a connected, non-blocking socket.

        Raises:
            OSError: nothing listens on the port.
            SandboxError: the sandbox has ended.
        """
        async with self._making:
            if not self._free:
                self._free = await self._sandbox.unconnected(BATCH)
            connection = self._free.pop()
        try:
            address = ("127.0.0.1", port)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(connection, address), CONNECT_TIMEOUT_S)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Closes the sockets that are kept for later connections."""
        while self._free:
            self._free.pop().close()


class Forwarding:
    """Accepts the connections of listening sockets, and carries each to a service until :meth:`close`."""

    def __init__(self, listeners: Mapping[Address, socket.socket], dials: Mapping[Address, Dial]) -> None:
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting = [
            asyncio.create_task(self._accept(listener, dials[address])) for address, listener in listeners.items()
        ]

    def close(self) -> None:
        """Closes the listening sockets and all connections."""
        for task in (*self._accepting, *self._connections):
            task.cancel()

    async def _accept(self, listener: socket.socket, dial: Dial) -> None:
        with listener:
            while True:
                await self._slots.acquire()
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError:  # the connection was closed meanwhile, or this process has too many open files
                    self._slots.release()
                    await asyncio.sleep(0.1)
                    continue
                except BaseException:
                    self._slots.release()
                    raise
                connection.setblocking(False)
                task = asyncio.create_task(_carry(connection, dial))
                self._connections.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._slots.release()


async def _carry(connection: socket.socket, dial: Dial) -> None:
    """Carries bytes both ways until both sides have closed, or one fails. Then closes the connection."""
    with connection:
        try:
            there = await dial()
        except (OSError, SandboxError, TimeoutError):
            return
        with there, suppress(OSError):
            ways = [asyncio.ensure_future(_copy(connection, there)), asyncio.ensure_future(_copy(there, connection))]
            try:
                await asyncio.gather(*ways)
            finally:
                for way in ways:
                    way.cancel()


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK_BYTES):
        await loop.sock_sendall(target, data)
    target.shutdown(socket.SHUT_WR)
