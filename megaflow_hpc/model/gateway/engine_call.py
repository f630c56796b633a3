"""Posts an agent's request to one engine server, and decides who is at fault if the request fails.

Connections stay open between calls. If the endpoint file has a fingerprint, the client compares the server's
certificate with it before it sends any data. Host names and certificate authorities are then ignored. Cancelling a call
closes its connection, so the engine stops working on it.
"""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp

from megaflow_hpc.model.engine_api import CHAT, RENDER, WEIGHT_VERSION
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.router import Server
from megaflow_hpc.model.json_text import ANSWER, TooMuch, decoded, offload, packed
from megaflow_hpc.trajectory import Image, shown_images, with_images
from megaflow_hpc.types import Sampling

CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 20.0
"""Idle connections are closed after this many seconds. Servers keep idle connections open longer."""
MAX_ANSWER = 32 * 2**20
"""Maximum size of a response body, in bytes."""
SMALL_ANSWER = 2**20
"""Maximum size in bytes of a response body that a rollout may read without using its quota for large responses."""
GATE_TIMEOUT_S = 120.0
"""Maximum seconds that a large response waits for the quota. Meanwhile, it occupies a server that other clients
need."""
_HEADERS_LEFT_OUT = ("Accept", "Accept-Encoding", "User-Agent")
Gate = Callable[[], Awaitable[None]]
"""Coroutine function that returns once a large response may be read."""
_SERVER_AT_FAULT = frozenset({401, 402, 403, 408, 429})
"""HTTP statuses below 500 for which a call is retried at another server."""
_REFUSED = frozenset({408, 429})
"""HTTP status codes with which an endpoint rejects requests above its rate limit."""
_FORBIDDEN = frozenset({401, 402, 403})
"""HTTP statuses that may have two causes. The engine forbids the request or its credit is used up, or the proxy refuses
the key."""
_MAX_REFUSAL = 64 * 2**10
"""Maximum size in bytes of an engine's error response that is passed on to the agent."""
_MAX_VERSION_DIGITS = 9


# --- HTTP ------------------------------------------------------------------------------------------------------------


class ExchangeFailed(Exception):
    """The connection failed, the certificate did not match, or the response was incomplete or not HTTP."""


class AnswerTooLong(ExchangeFailed):
    """The response body is longer than :data:`MAX_ANSWER`. The request may be at fault."""


class GateTimeout(ExchangeFailed):
    """A large response waited longer than :data:`GATE_TIMEOUT_S` for the rollout's quota."""


@dataclass
class Response:
    """A complete response. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytearray


class EngineClient:
    """Posts JSON requests to engine servers. Use it from a single event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._fingerprints: dict[str, aiohttp.Fingerprint] = {}
        """aiohttp's object for each fingerprint. aiohttp reuses a connection only if it gets the same object again."""

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        key: str,
        fingerprint: str = "",
        timeout_s: float,
        gate: Gate | None = None,
    ) -> Response:
        """Posts a JSON body and returns the complete response.

        Args:
            url: ``http://`` or ``https://``, with port and path.
            key: Bearer token. It is sent after the certificate has been verified.
            fingerprint: SHA-256 of the server's certificate in hexadecimal. If empty, the system's CAs are used.
            timeout_s: Seconds for the whole exchange.
            gate: Called and awaited before more than :data:`SMALL_ANSWER` bytes of the response are read.

        Raises:
            AnswerTooLong: The response has more than :data:`MAX_ANSWER` bytes.
            GateTimeout: The gate did not open in time.
            ExchangeFailed: There was no complete response.
        """
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._exchange(url, body, key, fingerprint, gate)
                except aiohttp.ClientConnectorError:
                    raise
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # The server may have closed the idle connection just now, so retry once.
                    return await self._exchange(url, body, key, fingerprint, gate)
        except aiohttp.ServerFingerprintMismatch as error:
            message = "FingerprintMismatch: its certificate does not match its endpoint file; nothing was sent"
            raise ExchangeFailed(message) from error
        except TimeoutError:
            raise ExchangeFailed(f"no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ExchangeFailed(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def _exchange(self, url: str, body: bytes, key: str, fingerprint: str, gate: Gate | None) -> Response:
        async with self._open_session().post(
            url,
            data=io.BytesIO(body),  # aiohttp sends it in chunks, so a large body does not block the event loop
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            ssl=self._pinned(fingerprint) if fingerprint else True,
            allow_redirects=False,
        ) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return Response(answer.status, headers, await _read(answer, gate))

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_HEADERS_LEFT_OUT,
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    def _pinned(self, fingerprint: str) -> aiohttp.Fingerprint:
        if fingerprint not in self._fingerprints:
            self._fingerprints[fingerprint] = aiohttp.Fingerprint(bytes.fromhex(fingerprint))
        return self._fingerprints[fingerprint]


async def _read(answer: aiohttp.ClientResponse, gate: Gate | None) -> bytearray:
    """Reads a response body. While the gate is closed, TCP flow control keeps the server from sending more."""
    body = bytearray()
    while part := await answer.content.readany():
        body += part
        if len(body) > MAX_ANSWER:
            raise AnswerTooLong(f"its answer is longer than {MAX_ANSWER >> 20} MiB")
        if gate is not None and len(body) > SMALL_ANSWER:
            try:
                async with asyncio.timeout(GATE_TIMEOUT_S):
                    await gate()
            except TimeoutError:
                raise GateTimeout("the agent of this rollout has not read its other large answers") from None
            gate = None
    return body


# --- calls -----------------------------------------------------------------------------------------------------------


class Reply(dict[str, Any]):
    """A JSON object returned by an engine."""

    weight_version: int = 0
    """Version of the weights that sampled the response."""
    size: int = 0
    """Size of the response in bytes."""


class RefusedCall(Exception):
    """The engine rejected a request as invalid (4xx). The agent gets the error unchanged."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


class Unavailable(Exception):
    """The server is at fault, not the request. The call may be retried at this server or another."""

    def __init__(self, message: str, wait_s: float = 0.0, refused: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """Backoff in seconds that the server asks for in ``Retry-After``."""
        self.refused = refused
        """True if the server refused the call because of its rate limit (408, 429). It may still accept smaller
        requests."""


class UnusableAnswer(Exception):
    """The server sent a complete but unusable response. Either the server or the request may be at fault.

    The router does not back off from the server. Otherwise one agent could make the server unavailable to all other
    agents.
    """

    def __init__(self, message: str, retry: bool = True, by_request: bool = False) -> None:
        super().__init__(message)
        self.retry = retry
        """True if a retry at the same server may succeed."""
        self.by_request = by_request
        """True if the request, not the service, is at fault."""


class EngineRequest(NamedTuple):
    """A validated request of a rollout, before a server is chosen."""

    policy: str
    path: str
    """Path of the request in the engine's API."""
    body: Mapping[str, Any]
    recorder: Recorder
    size: int = 0
    """Size of the agent's request in bytes."""
    sampling: Sampling = Sampling()
    """The policy's sampling settings."""
    keep_thoughts: bool = False
    """True if earlier answers stay in the prompt as they were sampled, even if the chat template changes them."""
    free: bool = True
    """True if nothing in the request constrains the policy's choice of tokens."""
    limit: int = 0
    """Token limit per choice from the rollout's budget, used if the body sets no limit. 0 means no limit."""
    gate: Gate | None = None
    """Called and awaited before a large response is read. If ``None``, large responses are read immediately."""
    role: str = ""
    """Role that the agent called. Empty if there is no team."""
    api: str = ""
    """Path below ``/v1`` at which the agent made the call."""
    started_by: int | None = None
    """Number of the call that caused this one, if the agent named it."""
    images: Mapping[str, Image] = {}
    """Images in the messages, by SHA-256. The messages refer to them by this hash."""

    @property
    def chat(self) -> bool:
        """True if the request asks for a chat completion, false for a plain completion."""
        return self.path == CHAT

    @property
    def choices(self) -> int:
        """Number of choices requested. For a plain completion, the total over all prompts."""
        prompts, each = self.body.get("prompt"), int(self.body.get("n") or 1)
        if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
            return each * len(prompts)
        return each

    @property
    def asked_images(self) -> list[str | None]:
        """SHA-256 of each image in the prompt, in order. ``None`` stands for an image on another host."""
        return shown_images(self.body.get("messages") or ())

    @property
    def may_be_large(self) -> bool:
        """True if the request asks for several choices, or for log-probabilities of tokens that are not sampled."""
        return self.choices > 1 or bool(self.body.get("top_logprobs")) or (self.body.get("logprobs") or 0) > 1


class Call(NamedTuple):
    """A request to one specific server."""

    request: EngineRequest
    server: Server
    client: EngineClient
    timeout_s: float

    async def post(self, path: str, body: Mapping[str, Any], size: int = 0) -> Reply:
        """Posts a JSON request as part of the call, with the images of its messages, and returns the reply.

        Args:
            size: Size in bytes of the earlier engine response that ``body`` contains, if any.

        Raises:
            RefusedCall: The request is at fault.
            UnusableAnswer: The engine failed on the request, rejected it as forbidden, or exceeded a limit on
                responses.
            Unavailable: The server is at fault: it was unreachable, had a wrong certificate, or responded with 5xx or
                without valid JSON.
        """
        server, by_request = self.server, self.request.may_be_large
        encoded = await offload(max(self.request.size, size), _encoded, body, self.request.images)
        try:
            response = await self.client.post(
                server.url + path,
                encoded,
                key=server.key,
                fingerprint=server.tls_fingerprint,
                timeout_s=self.timeout_s,
                # A rendered prompt is about as long as the request, which the quota has already admitted.
                gate=None if path == RENDER else self.request.gate,
            )
        except AnswerTooLong as error:
            raise UnusableAnswer(f"{server.name}: {error}", retry=False, by_request=by_request) from error
        except GateTimeout as error:
            raise UnusableAnswer(str(error), retry=False, by_request=True) from error
        except ExchangeFailed as error:
            raise Unavailable(f"{server.name}: {error}") from error
        raw, status = response.body, response.status
        version_header = response.headers.get(WEIGHT_VERSION.lower())
        if status >= 300:
            message = f"{server.name}: HTTP {status}: {bytes(raw[:300]).decode('utf-8', 'replace')}"
            by_engine = version_header is not None  # responses by the proxy itself lack the header
            if status == 500 or (status in _FORBIDDEN and by_engine):
                raise UnusableAnswer(message)
            if status > 501 or status in _SERVER_AT_FAULT or status < 400:
                wait_s = retry_after_s(response.headers.get("retry-after", ""))
                raise Unavailable(message, wait_s, status in _REFUSED)
            raise RefusedCall(status, bytes(raw[:_MAX_REFUSAL]))
        try:
            answer = await offload(len(raw), decoded, raw, ANSWER)
        except TooMuch as error:
            message = f"{server.name}: the answer holds {error}"
            raise UnusableAnswer(message, retry=False, by_request=by_request) from error
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"{server.name}: the answer is not JSON: {bytes(raw[:100])!r}") from error
        if not isinstance(answer, dict):
            raise Unavailable(f"{server.name}: the answer is not a JSON object")
        reply = Reply(answer)
        reply.size = len(raw)
        version = parse_weight_version(version_header)
        reply.weight_version = server.weight_version if version is None else version
        return reply

    async def complete(self, **changes: Any) -> Reply:
        """Posts the agent's request with ``changes`` applied. Raises the same errors as :meth:`post`.

        Engines reject a token limit that exceeds the context space left after the prompt. The request is then sent
        again without a limit, because the remaining space limits the answer anyway.
        """
        if self.request.limit:
            try:
                return await self.post(self.request.path, self.asked(**changes, max_tokens=self.request.limit))
            except RefusedCall:
                pass
        return await self.post(self.request.path, self.asked(**changes))

    def asked(self, **changes: Any) -> dict[str, Any]:
        """Returns the body to send to the engine, with the engine's model name, no streaming, and ``changes``.

        Sampling settings that the agent did not set are taken from the policy, because engines have their own defaults,
        such as those in ``generation_config.json``. Engines that report no tokens may support only OpenAI's options, so
        neutral settings are omitted for them.
        """
        sampling = self.request.sampling
        settings = sampling.unusual if self.server.protocol == "text" else sampling.settings
        return {**settings, **self.request.body, "model": self.server.model_name, "stream": False, **changes}

    def rendering(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the body of a request to vLLM's render endpoint. The body asks for image positions without pixels,
        because pixels as JSON would take a hundred times the size of the image."""
        return {**asked, "mm_payload": "none"} if self.request.images else asked


def _encoded(body: Mapping[str, Any], images: Mapping[str, Image]) -> bytes:
    if images and "messages" in body:
        body = {**body, "messages": with_images(body["messages"], images)}
    return packed(body)


def parse_weight_version(text: Any) -> int | None:
    """Parses a weight version from a string or number. Returns ``None`` if it is invalid."""
    text = str(text)
    return int(text) if len(text) <= _MAX_VERSION_DIGITS and text.isascii() and text.isdecimal() else None


def retry_after_s(value: str) -> float:
    """Parses a ``Retry-After`` header, which may be a date. Returns 0 if it is missing or invalid."""
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
