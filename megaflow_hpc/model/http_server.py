"""The HTTP server of gateway and proxy: aiohttp's server with limits on connections, starting when one is accepted.

::

    accepted ──► waits for a key, at most KEY_TIMEOUT_S ──► belongs to the owner of the key ──► closed by either side
                     │                                         ▲      │
                     │ too many wait:                          │      │ one owner has too many: the longest idle one
                     ▼ the oldest is closed                    │      ▼ is closed, or else the new one is refused
                   closed                                      └── the owner is gone: the connection waits again

So neither clients without a key nor one owner can take all of a server's descriptors. The server accepts connections
itself, because asyncio would report them only after their TLS handshake. Malformed requests are answered 400 and
counted. A request handler calls :meth:`HttpServer.admit` once it has seen a valid key.
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

from megaflow_hpc.host import descriptors

KEY_TIMEOUT_S = 10.0
"""Seconds from accepting a connection to the end of the head of a request with a key, including a TLS handshake."""
BODY_TIMEOUT_S = 120.0
MAX_WAITING = 256
"""Connections that may wait for a key; fewer if the process may have few descriptors."""
MIN_CONNECTIONS = 4
"""Lowest limit for the connections that wait, and for those of an owner."""
BACKLOG = 4096
"""Connections that the kernel queues, if it allows that many."""
ACCEPT_PAUSE_S = 0.2
"""Seconds until the next accept after descriptors or memory have run out."""
STOP_TIMEOUT_S = 60.0
"""Seconds to wait for requests in flight when the server stops."""
LINGER_S = 2.0
"""Seconds to read the rest of a refused body, so that its sender sees the answer."""
LOG_INTERVAL_S = 60.0
"""Seconds between two lines of the log about the same kind of event."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class BadBody(Exception):
    """A body is refused with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the request's body: {message}")
        self.status = status


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytearray:
    """Returns the whole body of a request, decompressed.

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
        raise BadBody(408, f"not whole within {BODY_TIMEOUT_S:g} s") from None
    return body


class BoundedLog:
    """Logs events that clients cause: at most one line a minute for each kind, with the number of events.

    It also serves aiohttp as a logger. The first exception of each minute has a traceback.

    Args:
        log: Gets the lines.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, tuple[float, int]] = {}
        """Kind → time of its latest line, and events since."""

    def refused(self, kind: str, owner: str = "") -> None:
        """Counts one event.

        Args:
            kind: One of few fixed texts.
            owner: Who caused the event.
        """
        if number := self._due(kind):
            self._log.warning("refused: %s: %d%s", kind, number, f", the latest of {owner}" if owner else "")

    def exception(self, message: str, *arguments: object, exc_info: object = True) -> None:
        """Logs an exception with its traceback, or counts it."""
        if number := self._due(message):
            self._log.error(message, *arguments, exc_info=exc_info)  # type: ignore[arg-type]
            if number > 1:
                self._log.error("the same: %d times more since the one before", number - 1)

    def debug(self, *_: object, **__: object) -> None:
        """Drops the debug messages of aiohttp."""

    def flush(self) -> None:
        """Writes the counts that are not written yet."""
        for kind, (_, number) in self._kinds.items():
            if number:
                self._log.warning("%s: %d more", kind, number)
        self._kinds.clear()

    def _due(self, kind: str) -> int:
        """Returns the count to write now; 0 if the latest line of this kind is too recent."""
        written_at, number = self._kinds.get(kind, (-LOG_INTERVAL_S, 0))
        now = time.monotonic()
        if now - written_at < LOG_INTERVAL_S:
            self._kinds[kind] = written_at, number + 1
            return 0
        self._kinds[kind] = now, 0
        return number + 1


class _Connection(web.RequestHandler):
    """One connection: aiohttp's protocol, and the owner of the key that its client has sent."""

    def __init__(self, server: HttpServer, **options: Any) -> None:
        super().__init__(server, **options)
        self.owner = ""
        """Empty while the connection waits for a key."""
        self.busy = False
        """True while a request is being answered."""
        self.connecting: asyncio.Task[Any] | None = None
        self.key_timer: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """Closes the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Counts a malformed body, which aiohttp noticed when it discarded the rest of a request."""
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
        """Answers a request that is not HTTP, and counts it."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        cast(BoundedLog, self.logger).refused("malformed requests", str(request.remote))
        answer = web.Response(status=400, text="this is not a request of HTTP/1.1\n")
        answer.force_close()
        return answer


class HttpServer(web.Server):
    """Serves listening sockets. Lives in one event loop.

    Args:
        handle: Answers a request.
        log: Gets refusals, through a :class:`BoundedLog`.
        max_per_owner: Connections that one owner may have; fewer if the process may have few descriptors.
    """

    def __init__(self, handle: Handler, log: logging.Logger, *, max_per_owner: int) -> None:
        self.log = BoundedLog(log)
        limit = descriptors.limit()
        self._max_waiting = min(MAX_WAITING, max(limit // 8, MIN_CONNECTIONS))
        self._max_per_owner = max_per_owner
        # A call takes two descriptors, one to the agent and one to the engine. A quarter is left for other purposes.
        self._max_owned = max(limit * 3 // 8, MIN_CONNECTIONS)
        self._answer = handle
        self._waiting: dict[_Connection, None] = {}
        """Connections without a key, the oldest first."""
        self._owned: dict[str, dict[_Connection, None]] = {}
        """Owner → its connections, the longest idle first."""
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}
        super().__init__(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=self.log,
            lingering_time=LINGER_S,
        )

    def __call__(self) -> _Connection:
        """Returns the protocol of a new connection."""
        return _Connection(self, loop=self._loop, **self._kwargs)

    def listen(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Takes over a listening socket and serves it until :meth:`unlisten`, with TLS if there is a ``context``."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting[listener] = self._loop.create_task(self._accept(listener, context))

    def unlisten(self, listener: socket.socket) -> None:
        """Closes a listening socket; connections stay."""
        task = self._accepting.pop(listener, None)
        if task is not None:
            task.cancel()
            self._loop.remove_reader(listener)  # the cancelled task would do so after the descriptor may be reused
            listener.close()

    async def stop(self) -> None:
        """Closes the listeners, waits for requests in flight, and closes all connections."""
        for listener in list(self._accepting):
            self.unlisten(listener)
        await asyncio.sleep(0)  # let a request begin that has just arrived
        self.pre_shutdown()
        for connection in list(self._waiting):
            self._drop(connection)
        await self.shutdown(STOP_TIMEOUT_S)
        self.log.flush()

    def admit(self, request: web.BaseRequest, owner: str) -> bool:
        """Assigns a request's connection to the owner of its key. Returns False if the owner has too many."""
        connection = cast(_Connection, request.protocol)
        if connection.owner == owner or connection.transport is None:  # no transport: it has just been closed
            return True
        self._forget(connection)
        owned = self._owned.setdefault(owner, {})
        share = min(self._max_per_owner, self._max_owned // len(self._owned))
        if len(owned) >= max(share, MIN_CONNECTIONS):
            longest_idle = next((other for other in owned if not other.busy), None)
            if longest_idle is None:
                self.log.refused("connections of one key, too many at once", owner)
                self._wait_for_key(connection)
                return False
            self.log.refused("idle connections of one key, too many at once", owner)
            self._drop(longest_idle)
        connection.owner = owner
        owned[connection] = None
        return True

    def release(self, owner: str) -> None:
        """Revokes an owner's key. Its connections then wait for another key."""
        for connection in list(self._owned.get(owner, ())):
            self._forget(connection)
            self._wait_for_key(connection)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forgets a connection that has ended."""
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
                continue  # after any other error, the client has gone
            connection = self()
            connection.connecting = self._connect(client, connection, context)
            self._wait_for_key(connection)
            await asyncio.sleep(0)  # let requests be answered, however many connections come

    def _connect(
        self, client: socket.socket, connection: _Connection, context: ssl.SSLContext | None
    ) -> asyncio.Task[Any]:
        """Connects an accepted socket to the protocol, with a TLS handshake if there is a context."""
        connecting = self._loop.connect_accepted_socket(
            lambda: connection, client, ssl=context, ssl_handshake_timeout=KEY_TIMEOUT_S if context else None
        )
        task = self._loop.create_task(connecting)
        task.add_done_callback(partial(self._connected, client, connection))
        return task

    def _connected(self, client: socket.socket, connection: _Connection, task: asyncio.Task[Any]) -> None:
        connection.connecting = None
        # There is no transport if the connection was dropped, the client has left, or it does not support TLS.
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
            self.log.refused("connections without a key, too many at once")
            self._drop(next(iter(self._waiting)))

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.abort()

    def _forget(self, connection: _Connection) -> None:
        """Removes a connection from the waiting ones and from its owner's."""
        if connection.key_timer is not None:
            connection.key_timer.cancel()
            connection.key_timer = None
        self._waiting.pop(connection, None)
        owned = self._owned.get(connection.owner)
        if owned is not None:
            owned.pop(connection, None)
            if not owned:
                del self._owned[connection.owner]
