"""The gateway's HTTP client: posts calls to engine servers over keep-alive connections.

If a fingerprint is given, the client checks the server's certificate against it before it sends any data, and ignores
host names and certificate authorities. Cancelling a call closes its connection, so the engine stops working on it.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 20.0
"""Seconds after which an idle connection is closed. Servers keep theirs open longer."""
MAX_ANSWER = 32 * 2**20
"""Maximum size of a response body, in bytes."""
SMALL_ANSWER = 2**20
"""Bytes of a response body that are read without the rollout's quota for large responses."""
GATE_TIMEOUT_S = 120.0
"""Maximum seconds that a large response waits for the quota, because its server has other clients."""
_HEADERS_LEFT_OUT = ("Accept", "Accept-Encoding", "User-Agent")
Gate = Callable[[], Awaitable[None]]
"""Returns once a large response may be read."""


class ExchangeFailed(Exception):
    """The connection failed, the certificate is wrong, or the response is incomplete or not HTTP."""


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
    """Posts JSON requests to engine servers. Confined to one event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._fingerprints: dict[str, aiohttp.Fingerprint] = {}
        """One object per fingerprint, because aiohttp reuses connections only for the same fingerprint object."""

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
            key: Bearer token, sent once the certificate has been verified.
            fingerprint: SHA-256 of the server's certificate in hexadecimal. If empty, the system's CAs are used.
            timeout_s: Seconds for the whole exchange.
            gate: Awaited before more than :data:`SMALL_ANSWER` bytes of the response are read.

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
            message = "FingerprintMismatch: another certificate than its endpoint file names; nothing was sent"
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
    """Reads a response body. While the gate is closed, TCP flow control slows down the server."""
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
                raise GateTimeout("other large answers of this rollout are not taken by its agent") from None
            gate = None
    return body
