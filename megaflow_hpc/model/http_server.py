"""Serves HTTP for gateways and proxies. It is aiohttp's server with connection limits that apply from accept on.

::

    accepted ──► waits for a key, at most KEY_TIMEOUT_S ──► belongs to the owner of the key ──► closed by either side
                     │                                         ▲      │
                     │ too many waiting:                       │      │ too many for one owner: the one idle longest
                     ▼ the oldest is closed                    │      ▼ is closed, otherwise the new one is refused
                   closed                                      └── the key is revoked: the connection waits again

So neither clients without a key nor a single owner can exhaust the server's file descriptors. The server accepts
connections itself, because asyncio would report a connection only after its TLS handshake. Malformed requests are
counted and get status 400. A request handler calls :meth:`HttpServer.admit` once it has seen a valid key.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from aiohttp import web

from megaflow_hpc.host.process import descriptor_limit

KEY_TIMEOUT_S = 10.0
"""Seconds from accept within which a client must send request headers with a valid key. The TLS handshake counts."""
BODY_TIMEOUT_S = 120.0
MAX_WAITING = 256
"""Maximum number of connections waiting for a key. The server lowers it if the process's limit on file descriptors is
low."""
MIN_CONNECTIONS = 4
"""Lower bound for the limits on waiting connections and on connections per owner."""
BACKLOG = 4096
"""Number of connections that may wait for accept. The kernel may lower it."""
ACCEPT_PAUSE_S = 0.2
"""Seconds to wait before accepting again if descriptors or memory are exhausted."""
STOP_TIMEOUT_S = 60.0
"""Maximum seconds to wait for requests in flight when the server stops."""
LINGER_S = 2.0
"""Seconds to keep reading a refused body, so that the client receives the response."""
LOG_INTERVAL_S = 60.0
"""Minimum seconds between two log lines about the same kind of event."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class BadBody(Exception):
    """The request body is refused with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the request's body: {message}")
        self.status = status


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytearray:
    """Reads and decompresses the whole body of a request.

    Raises:
        BadBody: The body is longer than ``max_bytes``, malformed, or incomplete after :data:`BODY_TIMEOUT_S`.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while part := await request.content.readany():
                body += part
                if len(body) > max_bytes:
                    raise BadBody(413, f"longer than {max_bytes >> 20} MiB")
    except web.RequestPayloadError:
        raise BadBody(400, "malformed") from None
    except TimeoutError:
        raise BadBody(408, f"incomplete after {BODY_TIMEOUT_S:g} s") from None
    return body


def bearer_key(request: web.BaseRequest) -> bytes:
    """Returns the key from ``Authorization: Bearer``, ``x-api-key`` or ``x-goog-api-key``, or an empty string."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    others = request.headers.get("x-api-key"), request.headers.get("x-goog-api-key")
    given = key if scheme.lower() == "bearer" else others[0] or others[1] or ""
    return given.encode("utf-8", "surrogateescape")  # headers may not be valid UTF-8


class BoundedLog:
    """Log of events caused by clients, limited to one line per minute and kind. Each line has the number of events.

    Also serves as aiohttp's logger. The first exception of each minute is logged with its traceback.

    Args:
        log: Receives the lines.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, tuple[float, int]] = {}
        """Time of the latest line and number of events since then, by kind."""

    def refused(self, kind: str, owner: str = "") -> None:
        """Counts one event.

        Args:
            kind: One of a few fixed strings, to bound the number of kinds.
            owner: Client that caused the event.
        """
        if number := self._due(kind):
            self._log.warning("refused: %s: %d%s", kind, number, f", the latest of {owner}" if owner else "")

    def exception(self, message: str, *arguments: object, exc_info: object = True) -> None:
        """Logs an exception with its traceback, or only counts it if the same message was logged in the past minute."""
        if number := self._due(message):
            self._log.error(message, *arguments, exc_info=exc_info)  # type: ignore[arg-type]
            if number > 1:
                self._log.error("%d more of these since the previous line", number - 1)

    def debug(self, *_: object, **__: object) -> None:
        """Discards aiohttp's debug messages."""

    def _due(self, kind: str) -> int:
        """Returns the number of events to log now, or 0 if this kind was logged too recently."""
        written_at, number = self._kinds.get(kind, (-LOG_INTERVAL_S, 0))
        now = time.monotonic()
        if now - written_at < LOG_INTERVAL_S:
            self._kinds[kind] = written_at, number + 1
            return 0
        self._kinds[kind] = now, 0
        return number + 1


class _Connection(web.RequestHandler):
    """A connection: aiohttp's protocol, and the owner of the key that the client sent."""

    def __init__(self, server: HttpServer, **options: Any) -> None:
        super().__init__(server, **options)
        self.owner = ""
        """Owner of the connection. Empty while the connection waits for a key."""
        self.busy = False
        """True while a request is being handled."""
        self.connecting: asyncio.Task[Any] | None = None
        self.key_timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """Closes the connection immediately."""
        if self.transport is not None:
            self.transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Counts a malformed body instead of logging it, if aiohttp noticed it while discarding the rest of a
        request."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            cast(BoundedLog, self.logger).refused("malformed requests")
        else:
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Replies with status 400 to input that is not HTTP, and counts it."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        cast(BoundedLog, self.logger).refused("malformed requests", str(request.remote))
        answer = web.Response(status=400, text="this is not a request of HTTP/1.1\n")
        answer.force_close()
        return answer


class HttpServer(web.Server):
    """Serves listening sockets. Use it from a single event loop.

    Args:
        handle: Request handler.
        log: Receives refusals, through a :class:`BoundedLog`.
        max_per_owner: Maximum number of connections per owner. The server lowers it if its file descriptors do not
            suffice for all owners.
    """

    def __init__(self, handle: Handler, log: logging.Logger, *, max_per_owner: int) -> None:
        self.log = BoundedLog(log)
        limit = descriptor_limit()
        self._max_waiting = min(MAX_WAITING, max(limit // 8, MIN_CONNECTIONS))
        self._max_per_owner = max_per_owner
        # A call takes two descriptors, one to the agent and one to the engine. A quarter is reserved for other uses.
        self._max_owned = max(limit * 3 // 8, MIN_CONNECTIONS)
        self._answer = handle
        self._waiting: dict[_Connection, None] = {}
        """Connections without a key, oldest first."""
        self._owned: dict[str, dict[_Connection, None]] = {}
        """Connections of each owner, by owner. Those that have been idle longest come first."""
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}
        super().__init__(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=self.log,
            lingering_time=LINGER_S,
        )

    def __call__(self) -> _Connection:
        """Returns aiohttp's protocol object for a new connection."""
        return _Connection(self, loop=self._loop, **self._kwargs)

    def listen(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Serves a listening socket, over TLS if ``context`` is given. :meth:`unlisten` or :meth:`stop` closes the
        socket."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting[listener] = self._loop.create_task(self._accept(listener, context))

    def unlisten(self, listener: socket.socket) -> None:
        """Closes a listening socket but keeps its connections open."""
        task = self._accepting.pop(listener, None)
        if task is not None:
            task.cancel()
            self._loop.remove_reader(listener)  # the cancelled task does so later, when the descriptor may be reused
            listener.close()

    async def stop(self) -> None:
        """Closes the listeners, waits for requests in flight, and closes all connections."""
        for listener in list(self._accepting):
            self.unlisten(listener)
        await asyncio.sleep(0)  # let a request that has just arrived begin
        self.pre_shutdown()
        for connection in list(self._waiting):
            self._drop(connection)
        await self.shutdown(STOP_TIMEOUT_S)

    def admit(self, request: web.BaseRequest, owner: str) -> bool:
        """Assigns a request's connection to the owner of the request's key. Returns False if the owner has too many
        connections."""
        connection = cast(_Connection, request.protocol)
        if connection.owner == owner or connection.transport is None:  # no transport: the connection was just closed
            return True
        self._forget(connection)
        owned = self._owned.setdefault(owner, {})
        share = min(self._max_per_owner, self._max_owned // len(self._owned))
        if len(owned) >= max(share, MIN_CONNECTIONS):
            longest_idle = next((other for other in owned if not other.busy), None)
            if longest_idle is None:
                self.log.refused("connections of a key that has too many", owner)
                self._wait_for_key(connection)
                return False
            self.log.refused("idle connections of a key that has too many", owner)
            self._drop(longest_idle)
        connection.owner = owner
        owned[connection] = None
        return True

    def release(self, owner: str) -> None:
        """Revokes an owner's key. Its connections stay open and wait for another key."""
        for connection in list(self._owned.get(owner, ())):
            self._forget(connection)
            self._wait_for_key(connection)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forgets a closed connection."""
        super().connection_lost(handler, exc)
        self._forget(cast(_Connection, handler))

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(_Connection, request.protocol)
        connection.busy = True
        try:
            return await self._answer(request)
        finally:
            connection.busy = False
            owned = self._owned.get(connection.owner, {})
            if connection in owned:  # move it to the end
                del owned[connection]
                owned[connection] = None

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        while True:
            try:
                client, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self.log.refused(f"new connections, for a while: {error.strerror}")
                    self._drop_oldest_waiting()
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                continue  # any other error means that the client disconnected
            connection = self()
            connection.connecting = self._connect(client, connection, context)
            self._wait_for_key(connection)
            await asyncio.sleep(0)  # let other requests proceed during a flood of connections

    def _connect(
        self, client: socket.socket, connection: _Connection, context: ssl.SSLContext | None
    ) -> asyncio.Task[Any]:
        """Connects an accepted socket to the protocol, after a TLS handshake if ``context`` is given."""
        connecting = self._loop.connect_accepted_socket(
            lambda: connection, client, ssl=context, ssl_handshake_timeout=KEY_TIMEOUT_S if context else None
        )
        task = self._loop.create_task(connecting)
        task.add_done_callback(partial(self._connected, client, connection))
        return task

    def _connected(self, client: socket.socket, connection: _Connection, task: asyncio.Task[Any]) -> None:
        connection.connecting = None
        # The transport is missing if the connection was dropped, the client disconnected, or the TLS handshake failed.
        if task.cancelled() or task.exception() is not None:
            self._forget(connection)
            client.close()

    def _wait_for_key(self, connection: _Connection) -> None:
        connection.owner = ""
        connection.key_timer = self._loop.call_later(KEY_TIMEOUT_S, self._expire, connection)
        self._waiting[connection] = None
        if len(self._waiting) > self._max_waiting:
            self._drop_oldest_waiting()

    def _expire(self, connection: _Connection) -> None:
        self.log.refused("connections without a whole request and a key in time")
        self._drop(connection)

    def _drop_oldest_waiting(self) -> None:
        if self._waiting:
            self.log.refused("connections without a key, because too many were waiting")
            self._drop(next(iter(self._waiting)))

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.abort()

    def _forget(self, connection: _Connection) -> None:
        """Removes a connection from the waiting list and from its owner."""
        if connection.key_timer is not None:
            connection.key_timer.cancel()
            connection.key_timer = None
        self._waiting.pop(connection, None)
        owned = self._owned.get(connection.owner)
        if owned is not None:
            owned.pop(connection, None)
            if not owned:
                del self._owned[connection.owner]
