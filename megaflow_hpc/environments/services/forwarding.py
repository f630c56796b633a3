"""Forwards connections from listening sockets to the ports of a service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import Address
from megaflow_hpc.errors import SandboxError

CHUNK_BYTES = 1 << 16
BATCH = 16
"""Number of sockets to make in a service's network at once, because each batch starts a process."""
MAX_CONNECTIONS = 256
"""Maximum number of open connections from an agent's sandbox to services. The same limit applies separately to
connections among the services of a rollout. Further connections wait."""
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
            OSError: Nothing listens on the port.
            SandboxError: The sandbox has ended.
        """
        async with self._making:
            if not self._free:
                self._free = await self._sandbox.unconnected(BATCH)
            connection = self._free.pop()
        try:
            address = ("127.0.0.1", port)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(connection, address)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Closes the sockets kept for later connections."""
        while self._free:
            self._free.pop().close()


class Forwarding:
    """Accepts connections on listening sockets and forwards each to a service, until :meth:`close`.

    Args:
        slots: Limits the number of concurrent connections. Several instances may share it.
    """

    def __init__(
        self, listeners: Mapping[Address, socket.socket], dials: Mapping[Address, Dial], slots: asyncio.Semaphore
    ) -> None:
        self._slots = slots
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
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError:  # the connection was closed in the meantime, or this process has too many open files
                    await asyncio.sleep(0.1)
                    continue
                connection.setblocking(False)
                try:
                    await self._slots.acquire()
                except BaseException:
                    connection.close()
                    raise
                task = asyncio.create_task(_carry(connection, dial))
                self._connections.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._slots.release()


async def _carry(connection: socket.socket, dial: Dial) -> None:
    """Forwards bytes both ways until both sides have closed, or one fails. Then closes the connection."""
    with connection:
        try:
            there = await dial()
        except (OSError, SandboxError, TimeoutError):
            return
        with there, suppress(OSError):
            ways = [asyncio.create_task(_copy(connection, there)), asyncio.create_task(_copy(there, connection))]
            try:
                await asyncio.gather(*ways)
            finally:
                await end(ways)


async def end(ways: Sequence[asyncio.Task[None]]) -> None:
    """Cancels the tasks that use a socket, and waits until the event loop has forgotten its descriptor."""
    for way in ways:
        way.cancel()
    await asyncio.wait(ways)


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK_BYTES):
        await loop.sock_sendall(target, data)
        await asyncio.sleep(0)  # yield, because neither call does while there is data and buffer space
    target.shutdown(socket.SHUT_WR)
