"""Runs the only TCP listener in front of an engine, with TLS, a key, and an allowlist of paths.

The engine itself listens on a Unix socket that other users cannot open. Inference and rendering paths require the key
in the endpoint file. With the same key, the policy's other servers can copy weights (:mod:`.weight_copies`). All other
paths are refused.

A pool's server also accepts the keys of the pool's members, within each user's cap and fair share (:mod:`.tenants`).

Every response names the version of the weights that sampled it (:data:`.engine_api.WEIGHT_VERSION`). While the weights
change, the proxy holds requests back, so that each response is sampled by one version (:meth:`Proxy.hold`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import json
import logging
import re
import secrets
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.address import listen_everywhere
from megaflow_hpc.model.engine_api import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    DERENDER,
    DETOKENIZE,
    GENERATE,
    RENDER,
    TEXTS,
    TOKENIZE,
    WEIGHT_VERSION,
)
from megaflow_hpc.model.engines import upstream
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.http_server import BadBody, HttpServer, bearer_key, read_body
from megaflow_hpc.model.json_text import ANSWER, TooMuch, check_bounds, decoded, offload, packed
from megaflow_hpc.model.server.tenants import Tenants
from megaflow_hpc.model.server.weight_copies import ROOT, WeightCopies
from megaflow_hpc.rundir.endpoints import Load
from megaflow_hpc.rundir.weights import Version

SAMPLING = frozenset(("POST", path) for path in (GENERATE, CHAT, COMPLETIONS, CLASSIFY))
MODEL_PATHS = SAMPLING | {("GET", "/health"), ("GET", "/v1/models")}
MODEL_PATHS |= {("POST", path) for path in (RENDER, DERENDER, TEXTS, TOKENIZE, DETOKENIZE)}
"""Paths that gateways use. All other engine APIs are blocked, because their options bypass the gateway's checks."""
PASSED = ("accept", "content-type", "x-request-id", "traceparent", "tracestate", "anthropic-version")
"""Request headers forwarded to the engine."""
NOT_RETURNED = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
)
"""Response headers not forwarded to the client."""
MAX_BODY = 256 * 2**20
"""Maximum size of a request body, in bytes."""
MAX_TENANT_BODY = 64 * 2**20
MAX_ANSWER = 32 * 2**20
"""Maximum size of an external endpoint's reply, in bytes."""
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)
"""Exceptions raised by converting a malformed request or reply."""
CAMPAIGN = "the campaign"
VALIDITY_DAYS = 3650
"""Number of days for which the certificate is valid. Gateways ignore this, but some TLS stacks reject certificates that
expire soon."""
QUEUE_METRIC = re.compile(
    r"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE
)
"""Matches the queue length in the metrics of vLLM and SGLang."""
LOG = logging.getLogger(__name__)


class Serving(NamedTuple):
    """The weights with which an engine samples."""

    weights: Version
    adapter_name: str = ""
    """The engine's name for the weights if they are a LoRA adapter. This name replaces the model name in requests."""


class Proxy:
    """Reverse proxy in front of one engine.

    Args:
        tenants: The users of a pool, or ``None`` if the server is not in a pool.
    """

    def __init__(self, tenants: Tenants | None = None) -> None:
        self.tenants = tenants
        self.key = secrets.token_urlsafe(32)
        self.port = 0
        self.requests = 0
        """Number of POST requests forwarded so far."""
        self.in_flight = 0
        """Number of requests of any kind that are waiting for the engine's response."""
        self.last_request = time.monotonic()
        self.draining = False
        self.down = ""
        """Reason why the engine did not answer the latest request. Empty if it did answer."""
        self.serving = Serving(Version())
        self.copies: WeightCopies | None = None
        """Copies of weight versions, whose files the proxy serves to other servers."""
        self.opened = True
        """False until the version of the attached engine's weights is known."""
        self._sampling = {True: 0, False: 0}
        """Number of requests being sampled by the generate endpoint (``True``) and by other endpoints (``False``)."""
        self._measured_requests, self._measured_at = 0, 0.0
        """Number of requests answered before the latest call of :meth:`load`, and the time of that call."""
        self._gate = asyncio.Event()
        self._gate.set()
        self._holds = 0
        self._engine: Launch | None = None
        self._session: aiohttp.ClientSession | None = None
        self._server: HttpServer | None = None

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        """Starts listening on all addresses, with TLS if ``context`` is given. The kernel chooses ``port``."""
        self._server = HttpServer(self._handle, LOG, max_per_owner=sys.maxsize)
        listener = listen_everywhere()
        self.port = listener.getsockname()[1]
        self._server.listen(listener, context)

    async def stop(self) -> None:
        """Closes the listener and the connections to the engine."""
        if self._server is not None:
            await self._server.stop()
        await self.attach(None)

    async def attach(self, engine: Launch | None) -> None:
        """Forwards requests to this engine from now on. If ``None``, requests are refused with 503."""
        old_session, self._engine, self._session = self._session, engine, None
        if old_session is not None:
            await old_session.close()
        if engine is not None:
            connector = aiohttp.UnixConnector(engine.uds, limit=0) if engine.uds else aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
            # Only an external engine may need the site's HTTP proxy.
            proxied = not engine.command and not engine.uds
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                trust_env=proxied,
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},  # replies are converted, and scanned for the key
            )

    @property
    def attached(self) -> bool:
        """True if an engine is attached."""
        return self._session is not None

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests and waits up to ``seconds`` for requests in flight.

        Returns:
            True if all of them completed.
        """
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not self.in_flight

    @contextlib.asynccontextmanager
    async def hold(self, *, continued: bool) -> AsyncIterator[None]:
        """Holds back new requests for the duration of the context. Enters the context once no request is being sampled.

        Args:
            continued: Do not wait for requests to the generate endpoint, because its responses report each token's
                version.
        """
        self._gate.clear()
        self._holds += 1
        try:
            while self._sampling[False] or (self._sampling[True] and not continued):
                await asyncio.sleep(0.01)
            yield
        finally:
            self._holds -= 1
            if not self._holds:  # the last hold has ended
                self._gate.set()

    async def ask(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, str]:
        """Sends one of the server's own requests to the engine. Returns status and text.

        Args:
            body: JSON body of a POST request. If ``None``, a GET request is sent.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: There was no response within ``timeout_s`` seconds.
        """
        assert self._engine is not None
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        engine = self._engine
        try:
            url = upstream.url_of(engine, path)
            request = None if body is None else upstream.request_of(engine, path, body)
        except upstream.Unsupported as error:
            return 400, str(error)
        async with self._session.request(
            "GET" if body is None else "POST",
            url,
            json=request,
            headers=upstream.headers_of(engine),
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            text = upstream.without_key(await response.read(), engine.key).decode("utf-8", "replace")
            if response.status != 200 or not engine.api:
                return response.status, text
        try:
            return 200, json.dumps(upstream.answer_of(engine, path, json.loads(text)))
        except _MALFORMED as error:
            return 502, f"an answer that is not one of {engine.api}'s API: {error!r}: {text[:300]}"

    async def load(self, now: float) -> Load:
        """Returns the server's current load, and the estimated seconds until its queue is empty.

        Args:
            now: ``time.monotonic()``.
        """
        engine, in_flight = self._engine, self.in_flight
        waiting = max(0, in_flight - engine.slots) if engine and engine.slots else 0
        if engine and engine.metrics:
            metrics = await self._metrics()
            if metrics:
                waiting = round(sum(float(value) for value in QUEUE_METRIC.findall(metrics)))
        if self.tenants is not None:
            waiting += self.tenants.waiting
        answered = self.requests - in_flight
        rate = max(answered - self._measured_requests, 1) / max(now - self._measured_at, 1e-3)
        self._measured_requests, self._measured_at = answered, now
        return Load(in_flight, waiting, round(waiting / rate, 1))

    async def _metrics(self) -> str:
        """Returns the text of the engine's ``/metrics``, or an empty string if it is unavailable."""
        try:
            status, text = await self.ask("/metrics", None, 10.0)
            return text if status == 200 else ""
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError):
            return ""

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._server is not None
        endpoint = (request.method, request.path)
        given = bearer_key(request)
        is_campaign = hmac.compare_digest(given, self.key.encode())
        tenant = None
        if self.tenants and not is_campaign and given.isascii():
            tenant = self.tenants.user(given.decode())
        if not is_campaign and tenant is None:
            return _refuse(401, "no key, or a wrong one")
        owner = CAMPAIGN if tenant is None else f"user {tenant}"
        if not self._server.admit(request, owner):
            answer = _refuse(429, "too many connections with this key")
            answer.force_close()
            return answer
        if self.copies is not None and tenant is None and request.method == "GET" and request.path.startswith(ROOT):
            return await self.copies.reply(request, self.serving.weights.version)
        if endpoint not in MODEL_PATHS:
            return _refuse(404, f"{request.method} {request.path} is not served here")
        if tenant is not None and self.tenants is not None and endpoint in SAMPLING:
            async with self.tenants.admit(tenant):
                return await self._pass(request, endpoint, tenant)
        return await self._pass(request, endpoint, tenant)

    async def _pass(
        self, request: web.BaseRequest, endpoint: tuple[str, str], tenant: str | None
    ) -> web.StreamResponse:
        while endpoint in SAMPLING and not self._gate.is_set():  # another hold may have begun in the meantime
            await self._gate.wait()
        if self.draining or not self.opened or self._engine is None or self._session is None:
            return _refuse(503, "this server is leaving" if self.draining else "the engine is being restarted")
        self.in_flight += 1
        self._sampling[request.path == GENERATE] += endpoint in SAMPLING
        if request.method == "POST":
            self.requests += 1
            self.last_request = time.monotonic()
        try:
            return await self._forward(request, self._engine, self._session, tenant)
        finally:
            self.in_flight -= 1
            self._sampling[request.path == GENERATE] -= endpoint in SAMPLING
            self.last_request = time.monotonic() if request.method == "POST" else self.last_request

    async def _forward(
        self, request: web.BaseRequest, engine: Launch, session: aiohttp.ClientSession, tenant: str | None
    ) -> web.StreamResponse:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return _refuse(415, "no compressed bodies")
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        headers |= upstream.headers_of(engine)
        response: web.StreamResponse | None = None
        body: bytes | bytearray
        try:
            body = await read_body(request, MAX_BODY if tenant is None else MAX_TENANT_BODY)
            if tenant is not None:
                await offload(len(body), check_bounds, body)
        except BadBody as error:
            return _refuse(error.status, str(error))
        except TooMuch as error:
            return _refuse(400, f"the request's body: {error}")
        if body and self.serving.adapter_name and (request.method, request.path) in SAMPLING:
            body = await offload(len(body), _with_model, body, self.serving.adapter_name)
        converted = bool(engine.api or engine.options) and (request.method, request.path) in SAMPLING
        url = engine.url(request.path)
        if converted:
            try:
                url, own, body = await offload(len(body), _converted, engine, request.path, body)
                headers |= own
            except upstream.Unsupported as error:
                return _refuse(400, str(error), self.serving.weights.version)
            except _MALFORMED as error:
                return _refuse(400, f"the request's body: {error!r}", self.serving.weights.version)
        try:
            async with session.request(
                request.method,
                url,
                data=body if request.method == "POST" else None,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                self.down = ""
                if converted or (engine.key and answer.status >= 300):
                    return await self._read(answer, engine, request.path, converted)
                response = web.StreamResponse(status=answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in NOT_RETURNED:
                        response.headers[name] = value
                response.headers[WEIGHT_VERSION] = str(self.serving.weights.version)
                response.content_length = answer.content_length
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the session was just closed
            if request.transport is None or request.transport.is_closing():
                return _refuse(502, "the client has disconnected")
            if response is not None:
                raise  # part of the response was sent: abort the connection, so that the client notices
            self.down = f"{url} does not answer: {type(error).__name__}"
            return _refuse(502, f"the engine does not answer: {type(error).__name__}")

    async def _read(self, answer: aiohttp.ClientResponse, engine: Launch, path: str, converted: bool) -> web.Response:
        """Returns an external endpoint's complete reply, converted to OpenAI's API. Redacts the key in errors."""
        headers = {WEIGHT_VERSION: str(self.serving.weights.version)}
        if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
            return _refuse(502, f"the endpoint's answer is compressed ({encoding:.20}), although that was not accepted")
        raw = bytearray()
        async for chunk in answer.content.iter_any():
            raw += chunk
            if len(raw) > MAX_ANSWER:
                return _refuse(502, f"the endpoint's answer is longer than {MAX_ANSWER >> 20} MiB")
        body = bytes(raw)
        if answer.status >= 300:
            body = upstream.without_key(body, engine.key)
            if not engine.api and b"max_tokens" in body and b"max_completion_tokens" in body:
                said = body[:1000].decode("utf-8", "replace")
                remedy = "this is OpenAI's own API; set engine: openai for the model in the campaign file"
                return _refuse(answer.status, f"{said}: {remedy}", self.serving.weights.version)
            if wait_s := answer.headers.get("Retry-After") or upstream.retry_after(body):
                headers["Retry-After"] = wait_s
        elif converted:
            try:
                body = await offload(len(body), _answered, engine, path, body)
            except _MALFORMED as error:
                return _refuse(502, f"an answer that is not one of the endpoint's API: {error!r}")
        return web.Response(status=answer.status, headers=headers, body=body, content_type="application/json")


def _converted(engine: Launch, path: str, body: bytes | bytearray) -> tuple[str, dict[str, str], bytes]:
    """Returns URL, headers and body of a request to an external endpoint."""
    asked = decoded(body)
    url, headers = upstream.url_of(engine, path, asked), upstream.headers_of(engine, asked)
    return url, headers, packed(upstream.request_of(engine, path, asked))


def _answered(engine: Launch, path: str, body: bytes) -> bytes:
    return packed(upstream.answer_of(engine, path, decoded(body, ANSWER)))


def _with_model(body: bytes | bytearray, model: str) -> bytes | bytearray:
    """Replaces ``model`` in a request body. A body that is not a JSON object is returned unchanged."""
    try:
        request = decoded(body)
        return packed({**request, "model": model}) if isinstance(request, dict) else body
    except (ValueError, RecursionError):
        return body


def _refuse(status: int, message: str, version: int | None = None) -> web.Response:
    """Returns an error response of the proxy itself.

    Args:
        version: Version of the weights, reported if the request is at fault, as if the engine had refused it.
    """
    error = {"message": message, "type": "server_error" if status >= 500 else "invalid_request_error", "code": status}
    headers = None if version is None else {WEIGHT_VERSION: str(version)}
    return web.json_response({"error": error}, status=status, headers=headers)


def make_context(private: Path) -> tuple[ssl.SSLContext, str]:
    """Returns a TLS context with a new certificate, and the SHA-256 of that certificate in hexadecimal.

    Clients trust the certificate by this fingerprint alone, which the endpoint file contains. The gateway checks it
    after the handshake, before it sends any data. So a process that takes over a dead server's port sees neither the
    key nor a prompt.

    Args:
        private: A directory of mode 0700. The private key is stored in it only until it is loaded.

    Raises:
        ConfigError: The package ``cryptography`` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ConfigError(f"{error}: TLS needs it; install it with: pip install cryptography") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "megaflow-hpc engine")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALIDITY_DAYS))
        .sign(key, hashes.SHA256())
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = private / "tls.pem"
    file.touch(mode=0o600)
    file.write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(file)
    file.unlink()
    return context, hashlib.sha256(der).hexdigest()
