"""The gateway's HTTP client: posts calls to engine servers, over connections that are kept alive.

The client compares a server's certificate with its fingerprint before it sends a byte. Names and certificate
authorities play no part then. A cancelled call closes its connection, so the engine stops working for it.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

CONNECT_S = 10.0
IDLE_S = 20.0
"""Seconds after which an unused connection is closed; servers close theirs later."""
MAX_ANSWER = 32 * 2**20
"""Bytes of an answer's body."""
SMALL_ANSWER = 2**20
"""Bytes of a body that are read before the quota for large answers is asked."""
PLACE_S = 120.0
"""Seconds that a large answer waits for the quota: the server that sends it has other clients to serve."""
_HEADERS_LEFT_OUT = ("Accept", "Accept-Encoding", "User-Agent")
Place = Callable[[], Awaitable[None]]
"""Waits until a large answer may be read."""


class Broken(Exception):
    """The exchange failed: no connection, a wrong certificate, half an answer, or an answer that is not HTTP."""


class TooLong(Broken):
    """The answer's body is longer than :data:`MAX_ANSWER`: the request may be at fault."""


class Crowded(Broken):
    """A large answer waited longer than :data:`PLACE_S` for the rollout's quota."""


@dataclass
class Response:
    """A whole answer. Names of ``headers`` are in lower case."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | bytearray = b""


class EngineClient:
    """Posts JSON requests to engine servers. Lives in one event loop."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._fingerprints: dict[str, aiohttp.Fingerprint] = {}
        """Connections are kept by server and fingerprint object, so each fingerprint has one object."""

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        key: str,
        fingerprint: str = "",
        timeout_s: float,
        place: Place | None = None,
    ) -> Response:
        """Posts a JSON body and returns the whole answer.

        Args:
            url: ``http://`` or ``https://``, with port and path.
            key: Sent as a bearer token, once the certificate has been compared.
            fingerprint: SHA-256 of the server's certificate in hexadecimal. Empty: the system's authorities decide.
            timeout_s: Seconds for all of it.
            place: Awaited before more than :data:`SMALL_ANSWER` of the answer is read.

        Raises:
            TooLong: The answer has more than :data:`MAX_ANSWER` bytes.
            Crowded: The answer is large, and others of the rollout are not read by their agent.
            Broken: There is no whole answer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._exchange(url, body, key, fingerprint, place)
                except aiohttp.ClientConnectorError:
                    raise
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    # The server may have closed a kept connection at this moment, which is no failure.
                    return await self._exchange(url, body, key, fingerprint, place)
        except aiohttp.ServerFingerprintMismatch as error:
            why = "another certificate than its endpoint file names; nothing was sent"
            raise Broken(f"FingerprintMismatch: {why}") from error
        except aiohttp.ClientError as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        except TimeoutError:
            raise Broken(f"no answer within {timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def _exchange(self, url: str, body: bytes, key: str, fingerprint: str, place: Place | None) -> Response:
        async with self._opened().post(
            url,
            data=io.BytesIO(body),  # aiohttp sends it in parts, so a large one does not hold the event loop
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            ssl=self._pinned(fingerprint) if fingerprint else True,
            allow_redirects=False,
        ) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return Response(answer.status, headers, await _read(answer, place))

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
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


async def _read(answer: aiohttp.ClientResponse, place: Place | None) -> bytes | bytearray:
    """Reads the body of an answer. Its server is slowed down while the answer waits for its place."""
    body = bytearray()
    while part := await answer.content.readany():
        body += part
        if len(body) > MAX_ANSWER:
            raise TooLong(f"its answer is longer than {MAX_ANSWER >> 20} MiB")
        if place is not None and len(body) > SMALL_ANSWER:
            await _wait_for(place)
            place = None
    return body


async def _wait_for(place: Place) -> None:
    try:
        async with asyncio.timeout(PLACE_S):
            await place()
    except TimeoutError:
        raise Crowded("other large answers of this rollout are not taken by its agent") from None
