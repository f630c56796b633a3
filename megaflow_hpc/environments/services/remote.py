"""Connects to services of other processes, over TLS or a Unix socket, with a key.

A client sends ``KEY PORT`` and a line feed. The server answers ``ok`` once the service accepts the connection, or
``busy`` if the service does not accept it in time. After ``ok``, both sides send chunks, each preceded by its length in
four bytes. Length 0 closes one direction, which TLS itself does not support.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megaflow_hpc.environments.services.forwarding import CHUNK_BYTES, Dialer, end
from megaflow_hpc.environments.services.running import PlannedService
from megaflow_hpc.errors import SandboxError, ServiceError

CONNECT_TIMEOUT_S = 20.0
BACKLOG = 1024
MAX_WAITING = 256
"""Maximum number of clients that have not sent the key. If another client connects, the connection of the oldest one is
closed."""
WAIT_S = 600.0
"""Seconds that a rollout waits for a service to become reachable. The service's job may have been requeued."""
POLL_S = 0.5
CHECK_S = 10.0
"""Interval in seconds between checks that a service still responds while a rollout runs."""
BUSY_S = 300.0
"""A service that does not answer a check may be busy. After this many seconds without an answer, it counts as ended."""
MAX_PAUSE_S = 10.0
"""Maximum interval in seconds between checks of a busy service. The interval starts at :data:`POLL_S` and doubles."""
_LENGTH_BYTES = 4
_OK, _BUSY = b"ok\n", b"busy\n"


@dataclass(frozen=True)
class Address:
    """Address and key of one start of a service."""

    url: str
    key: str
    fingerprint: str
    """SHA-256 of the server's certificate. Empty without TLS."""


class RemoteServices:
    """Services outside the rollout's process, located through their latest endpoint files."""

    def __init__(self) -> None:
        self._addresses: dict[str, Address] = {}
        self._failed: dict[str, str] = {}

    def update(self, endpoints: Mapping[str, Mapping[str, Any]]) -> None:
        """Replaces the endpoints of all services.

        Args:
            endpoints: Maps the name of each service to the content of its endpoint file or failure file.
        """
        self._addresses = {
            name: Address(str(file["url"]), str(file["key"]), str(file["tls_fingerprint"]))
            for name, file in endpoints.items()
            if file.get("url")
        }
        self._failed = {name: str(file.get("cause")) for name, file in endpoints.items() if file.get("all_failed")}

    def prepare(self, planned: PlannedService) -> None:
        """Does nothing, because a job of the campaign runs the service. Called before a rollout uses a service."""

    def address(self, name: str) -> Address | None:
        """Returns the current address of a service, or ``None`` if it is not running."""
        return self._addresses.get(name)

    def failed(self, name: str) -> str:
        """Returns the reason why a service has failed permanently, or an empty string if it has not."""
        return self._failed.get(name, "")


class RemoteService:
    """One rollout's access to one service. Bound to the start of the service that was running when the rollout began.

    Args:
        ports: Ports of the service. Checks connect to the first one.
    """

    def __init__(self, name: str, ports: tuple[int, ...], services: RemoteServices) -> None:
        self.name, self._port, self._services = name, ports[0], services
        self._address: Address | None = None
        self._carrying: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def begin(self) -> None:
        """Waits until the service can be reached.

        Raises:
            ServiceError: The service has failed permanently, or cannot be reached in time.
        """
        deadline = asyncio.get_running_loop().time() + WAIT_S
        problem = "it is not running"
        await asyncio.sleep(0)  # let a process that has just started the service clear earlier failures
        while True:
            if cause := self._services.failed(self.name):
                raise ServiceError(f"service {self.name}: {cause}")
            self._address = self._services.address(self.name)
            if self._address is not None:
                try:
                    await self._check()
                    return
                except (OSError, ValueError) as error:
                    problem = str(error) or type(error).__name__
            if asyncio.get_running_loop().time() > deadline:
                raise ServiceError(f"service {self.name}: not reached within {WAIT_S:g} s: {problem}")
            await asyncio.sleep(POLL_S)

    async def ended(self) -> str:
        """Waits until the service has ended or started again. Returns the reason."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            deadline = loop.time() + BUSY_S
            if await self.problem(deadline):
                await asyncio.sleep(POLL_S)  # a connection may be refused once
                if why := await self.problem(deadline):
                    return why

    async def problem(self, deadline: float | None = None) -> str:
        """Returns the reason why the rollout can no longer use the service, or an empty string if it can.

        A restarted service or a refused connection counts as a failure immediately. A slow service may be under load,
        so it is checked again.

        Args:
            deadline: Event loop time until which a slow service is checked again. Default: :data:`BUSY_S` from now.
        """
        loop = asyncio.get_running_loop()
        deadline, pause_s = deadline or loop.time() + BUSY_S, POLL_S
        while True:
            if self._services.address(self.name) not in (None, self._address):
                return "it was restarted"
            try:
                await self._check()
                return ""
            except (OSError, ValueError) as error:
                if not isinstance(error, TimeoutError) or loop.time() > deadline:
                    return f"it does not answer ({error or type(error).__name__})"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def dial(self, port: int) -> socket.socket:
        """Returns a socket connected to a port of the service.

        Raises:
            OSError: The service cannot be reached or was restarted.
        """
        reader, writer = await self._connect(port)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        task = asyncio.create_task(_carry(theirs, reader, writer))
        self._carrying[task] = writer
        task.add_done_callback(self._carrying.pop)
        return ours

    async def _check(self) -> None:
        """Connects to the service and disconnects, without waiting for the service to close its side."""
        _, writer = await self._connect(self._port)
        _abort(writer)

    async def _connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._address is None:
            raise ConnectionRefusedError(f"service {self.name} is not running")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await _connect(self._address, port)
        except TimeoutError:
            raise TimeoutError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None

    def close(self) -> None:
        """Closes all connections."""
        for task, writer in self._carrying.items():
            task.cancel()
            _abort(writer)  # do not wait for unsent data, which the other side may never read


async def _connect(address: Address, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(address.url)
    if parts.scheme == "unix":
        return await _greet(*await _open_socket(Path(parts.path)), address.key, port)
    context = None
    if address.fingerprint:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint is compared below
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
    try:
        if address.fingerprint:
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if hashlib.sha256(certificate).hexdigest() != address.fingerprint:
                raise ConnectionError("the certificate is not the service's; another program listens there")
    except BaseException:
        _abort(writer)
        raise
    return await _greet(reader, writer, address.key, port)


async def _open_socket(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        with _short(path) as short:
            await asyncio.get_running_loop().sock_connect(connection, short)
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yields an alias of a path that is short enough for a socket address."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


async def _greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        writer.write(f"{key} {port}\n".encode())
        answer = await reader.readline()
        if answer == _BUSY:
            raise TimeoutError
        if answer != _OK:
            raise ConnectionRefusedError(f"port {port} accepts no connection")
    except BaseException:
        _abort(writer)
        raise
    return reader, writer


def _abort(writer: asyncio.StreamWriter) -> None:
    """Closes a connection immediately and discards unsent data."""
    with suppress(AttributeError):  # Python 3.11 may raise this if a TLS transport is closed twice; it ends within 30 s
        writer.transport.abort()


class ServiceListener:
    """Answers the clients of one start of a service.

    Args:
        key: Clients must send this key.
        ports: Ports that may be reached.
        dialer: Connects to the service.
    """

    def __init__(self, key: str, ports: tuple[int, ...], dialer: Dialer) -> None:
        self._key, self._ports, self._dialer = key.encode(), ports, dialer
        self._clients: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], None] = {}
        """Clients that have not sent the key, oldest first."""
        self._accepting: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, context: ssl.SSLContext | None) -> None:
        """Listens on a port of the node that the kernel chooses."""
        server = socket.create_server(("", 0), backlog=BACKLOG)
        self.port = server.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(server, context))

    async def start_on_socket(self, path: Path) -> str:
        """Listens on a Unix socket in a private directory. Returns its URL."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(path) as short:
            server.bind(short)
        server.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept(server, None))
        return f"unix://{path}"

    def stop(self) -> None:
        """Closes the port and all connections."""
        if self._accepting is not None:
            self._accepting.cancel()
        for task in self._clients:
            task.cancel()

    async def _accept(self, server: socket.socket, context: ssl.SSLContext | None) -> None:
        server.setblocking(False)
        with server:
            while True:
                try:
                    client, _ = await asyncio.get_running_loop().sock_accept(server)
                except OSError:  # the client has left, or this process has too many open files
                    await asyncio.sleep(0.1)
                    continue
                task = asyncio.create_task(self._serve(client, context))
                self._clients.add(task)
                self._waiting[task] = None
                task.add_done_callback(self._ended)
                if len(self._waiting) > MAX_WAITING:
                    oldest = next(iter(self._waiting))
                    del self._waiting[oldest]
                    oldest.cancel()
                await asyncio.sleep(0)  # let others proceed during a flood of clients

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._clients.discard(task)
        self._waiting.pop(task, None)

    async def _serve(self, client: socket.socket, context: ssl.SSLContext | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        writer = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await _streams_of(client, context)
                key, _, port = (await reader.readline()).strip().partition(b" ")
            if not hmac.compare_digest(key, self._key) or int(port) not in self._ports:
                return
            self._waiting.pop(task, None)
            try:
                there = await self._dialer.connect(int(port))
            except TimeoutError:
                writer.write(_BUSY)
                return
            writer.write(_OK)
            await _carry(there, reader, writer)
        except (OSError, ValueError, SandboxError):
            pass
        finally:
            if writer is not None and (task in self._waiting or task.cancelling()):
                _abort(writer)
            elif writer is not None:
                writer.close()


async def _streams_of(
    client: socket.socket, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns the streams of an accepted connection, after a TLS handshake if there is a context. If the handshake
    fails, asyncio closes the connection."""
    loop = asyncio.get_running_loop()
    client.setblocking(False)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, client, ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _carry(plain: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forwards bytes between a plain socket and a chunked connection until both directions have ended."""
    ways = [asyncio.create_task(_to_chunks(plain, writer)), asyncio.create_task(_from_chunks(reader, plain))]
    with plain, suppress(OSError, asyncio.IncompleteReadError):
        try:
            await asyncio.gather(*ways)
        finally:
            await end(ways)
            writer.close()  # closes after sending pending data


async def _to_chunks(plain: socket.socket, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(plain, CHUNK_BYTES)
        writer.write(len(data).to_bytes(_LENGTH_BYTES) + data)
        await writer.drain()
        await asyncio.sleep(0)  # drain does not yield while there is buffer space
        if not data:
            return


async def _from_chunks(reader: asyncio.StreamReader, plain: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while size := int.from_bytes(await reader.readexactly(_LENGTH_BYTES)):
        if size > CHUNK_BYTES:
            raise ConnectionError("a chunk that is too long")
        await loop.sock_sendall(plain, await reader.readexactly(size))
    plain.shutdown(socket.SHUT_WR)
