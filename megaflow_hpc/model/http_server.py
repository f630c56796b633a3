"""The HTTP server of gateway and proxy: aiohttp's, on connections that are counted and bounded from their first moment.

It accepts by itself, so that connections count before their TLS handshake has ended and descriptors that have run out
cost a pause, not a log. Who may keep a connection is settled by :mod:`.admission`; malformed requests are answered 400
and counted. A request handler calls :meth:`HttpServer.admit` as soon as it has seen a valid key.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web

from megaflow_hpc.host import descriptors
from megaflow_hpc.host.peers import name_of
from megaflow_hpc.model import admission
from megaflow_hpc.model.admission import Admission, Connection
from megaflow_hpc.model.bounded_log import BoundedLog

BACKLOG = 4096
"""Connections that the kernel keeps for us, where it allows so many."""
PAUSE_S = 0.2
"""Seconds until another try to accept where descriptors or memory have run out."""
STOP_S = 60.0
"""Seconds for which requests in flight are waited for when the server stops."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused body is read, so that its sender sees the answer."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Protocol(web.RequestHandler):
    """aiohttp's side of one connection; what is the client's mistake is counted, not logged."""

    __slots__ = ()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Counts a malformed body that turned up while it was read to be thrown away; the rest is aiohttp's."""
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
        """Answers a request that is not HTTP; everything else is aiohttp's."""
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
        log: Where refusals are logged, at most a line a minute and kind.
        of_one: Connections that one owner may have.
    """

    def __init__(self, handle: Handler, log: logging.Logger, *, of_one: int) -> None:
        self.log = BoundedLog(log)
        self.admission = Admission(descriptors.limit(), of_one, self.log.refused)
        self._answer = handle
        self._open: dict[web.RequestHandler, Connection] = {}
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}
        self._connecting: dict[asyncio.Task[None], socket.socket] = {}
        self._timer: asyncio.TimerHandle | None = None
        super().__init__(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=self.log,
            lingering_time=LINGER_S,
        )

    def __call__(self) -> web.RequestHandler:
        """Makes the protocol of a new connection."""
        return _Protocol(self, loop=self._loop, **self._kwargs)

    def listen(self, listener: socket.socket, context: ssl.SSLContext | None = None, peer: str = "") -> None:
        """Serves a listening socket until :meth:`unlisten`; takes it over.

        Args:
            context: For TLS.
            peer: Who is at the other end of all its connections; default: told by each connection's address.
        """
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting[listener] = self._loop.create_task(self._accept(listener, context, peer))

    def unlisten(self, listener: socket.socket) -> None:
        """Closes a listening socket; connections stay."""
        task = self._accepting.pop(listener, None)
        if task is not None:
            task.cancel()
            self._loop.remove_reader(listener)  # the task does so turns later, when the number may be a connection's
            listener.close()

    async def stop(self) -> None:
        """Closes the listeners, waits up to :data:`STOP_S` for requests in flight, and closes all connections."""
        for listener in list(self._accepting):
            self.unlisten(listener)
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.sleep(0)  # a request that has just arrived is begun
        self.pre_shutdown()
        self.admission.close_waiting()
        await self.shutdown(STOP_S)
        self.log.flush()

    def admit(self, request: web.BaseRequest, owner: str) -> bool:
        """Notes that a request has shown the key of ``owner``; ``False`` if its owner has too many connections."""
        connection = self._open.get(request.protocol)
        return connection is None or self.admission.admit(connection, owner)

    def release(self, owner: str) -> None:
        """Notes that an owner's key is no longer valid."""
        self.admission.release(owner, self._loop.time())
        self._watch()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Called by a connection's protocol at its end."""
        super().connection_lost(handler, exc)
        self._forget(handler)

    # --- requests ---

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = self._open.get(request.protocol)
        if connection is None:  # it was closed in this very moment
            return web.Response(status=503)
        connection.busy = True
        try:
            return await self._answer(request)
        finally:
            connection.busy, connection.used = False, self._loop.time()

    # --- connections ---

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext | None, peer: str) -> None:
        while True:
            try:
                client, address = await self._loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self.log.refused(f"new connections, for a while: {error.strerror}")
                    self.admission.crowd_out()
                    await asyncio.sleep(PAUSE_S)
                continue  # else: that client has gone already
            whose = peer or (name_of(address, client.getsockname()) if client.family == socket.AF_INET else "local")
            connection = Connection(whose, self._loop.time(), client.close)
            task = self._loop.create_task(self._connect(client, connection, context))
            self._connecting[task] = client
            task.add_done_callback(self._connected)
            connection.close = task.cancel
            self.admission.arrive(connection)
            self._watch()
            await asyncio.sleep(0)  # requests go on however many connections come

    async def _connect(self, client: socket.socket, connection: Connection, context: ssl.SSLContext | None) -> None:
        """Makes a connection of an accepted socket, by TLS where there is a context."""
        handler = self()
        self._open[handler] = connection
        try:
            handshake_s = admission.FIRST_REQUEST_S if context else None
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: handler, client, ssl=context, ssl_handshake_timeout=handshake_s
            )
            connection.close = transport.abort
        except (asyncio.CancelledError, OSError):  # closed by us; or it has gone, or speaks no TLS
            self._forget(handler)
            client.close()

    def _connected(self, task: asyncio.Task[None]) -> None:
        client = self._connecting.pop(task)
        if task.cancelled():  # before its first step
            client.close()

    def _forget(self, handler: web.RequestHandler) -> None:
        connection = self._open.pop(handler, None)
        if connection is not None:
            self.admission.leave(connection)

    def _watch(self) -> None:
        """Sees to it that connections without a key are closed in time."""
        if self._timer is None and self.admission.waiting:
            self._timer = self._loop.call_later(admission.FIRST_REQUEST_S, self._expire)

    def _expire(self) -> None:
        oldest = self.admission.expire(self._loop.time() - admission.FIRST_REQUEST_S)
        self._timer = None
        if oldest is not None:
            self._timer = self._loop.call_at(oldest + admission.FIRST_REQUEST_S, self._expire)
