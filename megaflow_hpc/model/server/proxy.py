"""The only TCP listener before an engine: TLS, two keys, and a list of paths that pass.

The engine itself sits on a Unix socket that other users cannot open. Paths that answer or render pass with the key in
the endpoint file; paths that change the engine pass with the admin key only; all others are refused, whatever the
engine serves there.

A pool's server also answers its members' keys, each user's requests within that user's caps and fair share
(:mod:`.guests`).

Every answer carries the version of the weights that sampled it (:data:`~megaflow_hpc.model.api.WEIGHT_VERSION`). While
the weights change, the proxy holds requests back until each of them is sampled by one version (:meth:`Proxy.hold`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from megaflow_hpc.model.api import CHAT, COMPLETIONS, GENERATE, WEIGHT_VERSION
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.server.tenants import Guests

_DIALECTS = (CHAT, COMPLETIONS, "/v1/messages", "/v1/responses")
MODEL_PATHS = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("POST", GENERATE),
        *(("POST", dialect + tail) for dialect in _DIALECTS for tail in ("", "/render", "/derender")),
    }
)
SAMPLING = frozenset({("POST", GENERATE), *(("POST", dialect) for dialect in _DIALECTS)})
ADMIN_PATHS = frozenset(
    {("GET", p) for p in ("/metrics", "/weight_info", "/is_paused", "/is_sleeping")}
    | {
        ("POST", p)
        for p in (
            *("/collective_rpc", "/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"),
            *("/update_weight_version", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        )
    }
)
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"})
DRAINING = 503


class Proxy:
    """Listens for one engine. ``requests`` counts what passed on to a model; ``last_request`` is ``time.monotonic``."""

    def __init__(
        self, context: ssl.SSLContext | None = None, host: str = "0.0.0.0", guests: Guests | None = None
    ) -> None:
        self.guests = guests
        self.key, self.admin_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.host, self.port = host, 0
        self.requests, self.in_flight = 0, 0
        self.last_request = time.monotonic()
        self.draining = False
        self.weight_version = 0
        """Of the weights that the engine samples with now."""
        self.served_as = ""
        """The model's name at the engine, where it is not the one that is asked for (a LoRA adapter)."""
        self.opened = True
        """Whether an engine that is attached may be asked by others: not before its version is known."""
        self._sampling = {True: 0, False: 0}
        """Requests that the engine samples for now: by generate, and others."""
        self._gate = asyncio.Event()
        self._gate.set()
        self._context = context
        self._engine: Launch | None = None
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=256 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 0, ssl_context=self._context, backlog=1024).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self.attach(None)

    async def attach(self, engine: Launch | None) -> None:
        """From now on requests go to this engine."""
        before, self._engine, self._session = self._session, engine, None
        if before is not None:
            await before.close()
        if engine is not None:
            connector = aiohttp.UnixConnector(engine.uds, limit=0) if engine.uds else aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
            # An external engine may lie beyond the site's HTTP proxy; a local one never does.
            proxied = not engine.command and not engine.uds
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, trust_env=proxied, auto_decompress=False
            )

    @property
    def attached(self) -> bool:
        """Whether there is an engine to ask."""
        return self._session is not None

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests and waits for those in flight; whether all were answered."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self.in_flight

    @contextlib.asynccontextmanager
    async def hold(self, *, continued: bool) -> AsyncIterator[None]:
        """Nothing new is sampled inside, and what is being sampled has been answered.

        Args:
            continued: Not those by generate, whose answer tells the version of every token.
        """
        self._gate.clear()
        try:
            while self._sampling[False] or (self._sampling[True] and not continued):
                await asyncio.sleep(0.01)
            yield
        finally:
            self._gate.set()

    async def ask(self, path: str, body: dict[str, Any], timeout_s: float) -> tuple[int, str]:
        """A request of our own to the engine: status and text."""
        assert self._engine is not None
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.post(
            self._url(path), json=body, headers=self._headers(self._engine), timeout=timeout
        ) as response:
            return response.status, await response.text()

    async def metrics(self) -> str:
        """The engine's ``/metrics``; empty where it has none now."""
        if self._engine is None or self._session is None:
            return ""
        timeout = aiohttp.ClientTimeout(total=10)
        try:
            async with self._session.get(
                self._url("/metrics"), headers=self._headers(self._engine), timeout=timeout
            ) as r:
                return await r.text() if r.status == 200 else ""
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError):
            return ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        place = (request.method, request.path)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        is_model = hmac.compare_digest(given, self.key.encode())
        is_admin = hmac.compare_digest(given, self.admin_key.encode())
        guest = self.guests.user(given.decode()) if self.guests and not is_model and not is_admin else None
        if not is_model and not is_admin and guest is None:
            return _refuse(401, "no key, or a wrong one")
        if place not in MODEL_PATHS and not (is_admin and place in ADMIN_PATHS):
            return _refuse(404, f"{request.method} {request.path} is not served here")
        if guest is not None and self.guests is not None and place in SAMPLING:
            async with self.guests.room(guest):
                return await self._pass(request, place)
        return await self._pass(request, place)

    async def _pass(self, request: web.Request, place: tuple[str, str]) -> web.StreamResponse:
        while place in SAMPLING and not self._gate.is_set():  # it may have been closed again meanwhile
            await self._gate.wait()
        if self.draining or not self.opened or self._engine is None or self._session is None:
            return _refuse(DRAINING, "this server is leaving" if self.draining else "the engine is being restarted")
        self.in_flight += 1
        self._sampling[request.path == GENERATE] += place in SAMPLING
        if request.method == "POST":
            self.requests += 1
            self.last_request = time.monotonic()
        try:
            return await self._forward(request, self._engine, self._session)
        finally:
            self.in_flight -= 1
            self._sampling[request.path == GENERATE] -= place in SAMPLING
            self.last_request = time.monotonic() if request.method == "POST" else self.last_request

    async def _forward(
        self, request: web.Request, engine: Launch, session: aiohttp.ClientSession
    ) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP | {"authorization", "x-api-key"}}
        headers |= self._headers(engine)
        body = await request.read() if request.can_read_body else None
        if body and self.served_as and (request.method, request.path) in SAMPLING:
            body = _renamed(body, self.served_as)
        try:
            async with session.request(
                request.method, self._url(request.path_qs), data=body, headers=headers, allow_redirects=False
            ) as answer:
                response = web.StreamResponse(status=answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in HOP:
                        response.headers[name] = value
                response.headers[WEIGHT_VERSION] = str(self.weight_version)
                response.content_length = answer.content_length
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the engine was just given up
            if request.transport is None or "response" in locals():
                raise  # half an answer was sent: break the connection, so that nobody takes it for a whole one
            return _refuse(502, f"the engine does not answer: {type(error).__name__}")

    def _url(self, path: str) -> str:
        assert self._engine is not None
        return ("http://engine" if self._engine.uds else self._engine.base_url) + path

    @staticmethod
    def _headers(engine: Launch) -> dict[str, str]:
        return {"Authorization": f"Bearer {engine.key}"} if engine.key else {}


def _renamed(body: bytes, model: str) -> bytes:
    """The same request of another model; what is no request stays as it is."""
    try:
        asked = json.loads(body)
    except ValueError:
        return body
    return json.dumps({**asked, "model": model}).encode() if isinstance(asked, dict) else body


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "server_error", "code": status}}, status=status)
