"""The HTTP server of gateway and proxy: aiohttp's, with limits on connections from their first moment.

::

    accepted ──► waits for a key, at most KEY_S ──► belongs to the owner of the key ──► closed by either side
                     │                                    ▲      │
                     │ too many wait:                     │      │ too many of one owner: the longest idle one closes;
                     ▼ the oldest closes                  │      ▼ if none is idle, the new one is refused
                   closed                                 └── the owner is gone: it waits again

So clients without a key cannot take all of a server's descriptors, and neither can one owner. The server accepts
connections itself, because asyncio would count them only after their TLS handshake. Malformed requests are answered 400
and counted. A request handler calls :meth:`HttpServer.admit` once it has seen a valid key.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from aiohttp import web

from megaflow_hpc.host import descriptors
from megaflow_hpc.model.bounded_log import BoundedLog

KEY_S = 10.0
"""Seconds from accepting a connection to the end of the head of a request with a key, a TLS handshake included."""
READ_S = 120.0
"""Seconds to read a body."""
MAX_WAITING = 256
"""Connections that may wait for a key, fewer if the process may have few descriptors."""
MIN_CONNECTIONS = 4
"""Connections that may wait, or that an owner may have, in any case."""
BACKLOG = 4096
"""Connections that the kernel queues, if it allows that many."""
PAUSE_S = 0.2
"""Seconds until the next accept after descriptors or memory have run out."""
STOP_S = 60.0
"""Seconds to wait for requests in flight when the server stops."""
LINGER_S = 2.0
"""Seconds to read the rest of a refused body, so that its sender sees the answer."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class BadBody(Exception):
    """A body is refused.

    Args:
        status: HTTP status.
        message: Why.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the request's body: {message}")
        self.status = status


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytearray:
    """Returns the whole body of a request, decompressed.

    Raises:
        BadBody: The body is longer than ``max_bytes``, malformed, or not there within :data:`READ_S`.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            while part := await request.content.readany():
                body += part
                if len(body) > max_bytes:
                    raise BadBody(413, f"longer than {max_bytes >> 20} MiB")
    except web.RequestPayloadError:
        raise BadBody(400, "malformed") from None
    except TimeoutError:
        raise BadBody(408, f"not whole within {READ_S:g} s") from None
    return body


class _Connection(web.RequestHandler):
    """One connection: aiohttp's protocol, and the owner of the key that it has shown."""

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
        """Counts a malformed body that aiohttp met while it discarded the rest of a request."""
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
        log: Gets refusals, at most a line a minute and kind.
        max_per_owner: Connections that one owner may have; fewer if the process may have few descriptors.
    """

    def __init__(self, handle: Handler, log: logging.Logger, *, max_per_owner: int) -> None:
        self.log = BoundedLog(log)
        limit = descriptors.limit()
        self._max_waiting = min(MAX_WAITING, max(limit // 8, MIN_CONNECTIONS))
        self._max_per_owner = max_per_owner
        # A call takes two descriptors, one to the agent and one to the engine. A quarter is left to other things.
        self._max_owned = max(limit * 3 // 8, MIN_CONNECTIONS)
        self._answer = handle
        self._waiting: dict[_Connection, None] = {}
        """Connections without a key, the oldest first."""
        self._owned: dict[str, dict[_Connection, None]] = {}
        """Owner → its connections, the longest unused first."""
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}
        super().__init__(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=self.log,
            lingering_time=LINGER_S,
        )

    def __call__(self) -> _Connection:
        """Makes the protocol of a new connection."""
        return _Connection(self, loop=self._loop, **self._kwargs)

    def listen(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Serves a listening socket, by TLS if there is a ``context``, until :meth:`unlisten`. Takes it over."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting[listener] = self._loop.create_task(self._accept(listener, context))

    def unlisten(self, listener: socket.socket) -> None:
        """Closes a listening socket; connections stay."""
        task = self._accepting.pop(listener, None)
        if task is not None:
            task.cancel()
            self._loop.remove_reader(listener)  # the cancelled task would remove it when the number may be reused
            listener.close()

    async def stop(self) -> None:
        """Closes the listeners, waits up to :data:`STOP_S` for requests in flight, and closes all connections."""
        for listener in list(self._accepting):
            self.unlisten(listener)
        await asyncio.sleep(0)  # a request that has just arrived begins
        self.pre_shutdown()
        for connection in list(self._waiting):
            self._drop(connection)
        await self.shutdown(STOP_S)
        self.log.flush()

    def admit(self, request: web.BaseRequest, owner: str) -> bool:
        """Notes that a request has shown the key of ``owner``; ``False`` if its owner has too many connections."""
        connection = cast(_Connection, request.protocol)
        if connection.owner == owner or connection.transport is None:  # it has just been closed
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
        """Notes that an owner's key is no longer valid: its connections have to show another one in time."""
        for connection in list(self._owned.get(owner, ())):
            self._forget(connection)
            self._wait_for_key(connection)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Called by a connection when it has ended."""
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
            if connection in owned:  # it becomes the last one
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
                    await asyncio.sleep(PAUSE_S)
                continue  # after any other error, the client has gone
            connection = self()
            connection.connecting = self._connect(client, connection, context)
            self._wait_for_key(connection)
            await asyncio.sleep(0)  # requests are answered however many connections come

    def _connect(
        self, client: socket.socket, connection: _Connection, context: ssl.SSLContext | None
    ) -> asyncio.Task[Any]:
        """Makes a connection of an accepted socket, with a TLS handshake if there is a context."""
        making = self._loop.connect_accepted_socket(
            lambda: connection, client, ssl=context, ssl_handshake_timeout=KEY_S if context else None
        )
        task = self._loop.create_task(making)
        task.add_done_callback(partial(self._connected, client, connection))
        return task

    def _connected(self, client: socket.socket, connection: _Connection, task: asyncio.Task[Any]) -> None:
        connection.connecting = None
        # A connection that was dropped has no transport, nor has one whose client has gone or does not speak TLS.
        if task.cancelled() or task.exception() is not None:
            self._forget(connection)
            client.close()

    def _wait_for_key(self, connection: _Connection) -> None:
        connection.owner = ""
        connection.key_timer = self._loop.call_later(KEY_S, self._expire, connection)
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
        """Removes a connection from those that wait and from its owner's."""
        if connection.key_timer is not None:
            connection.key_timer.cancel()
            connection.key_timer = None
        self._waiting.pop(connection, None)
        owned = self._owned.get(connection.owner)
        if owned is not None:
            owned.pop(connection, None)
            if not owned:
                del self._owned[connection.owner]
