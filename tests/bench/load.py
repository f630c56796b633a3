"""A closed loop of chat completions over raw sockets, cheap enough not to affect the measurement.

Each of ``clients`` workers keeps one connection and one request in flight. The first requests are spread over
``spread_s``, so that a fixed engine does not answer all of them at once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

T = TypeVar("T")
Address = tuple[str, str]
"""``http://HOST:PORT/…/v1`` and a key."""


@dataclass
class Load:
    """The results of a load: seconds of each answered call, and errors of failed calls."""

    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    answered: int = 0
    """Calls, including those before counting began."""

    @property
    def rate(self) -> float:
        """Counted calls a second."""
        return len(self.latencies) / self.seconds


def run_fast(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` in uvloop's faster event loop if that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def body_of(prompt: str) -> bytes:
    """Returns the JSON body of a completion request."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4096}).encode()


def request_to(address: Address, body: bytes) -> bytes:
    """Returns a whole HTTP request to ``address``."""
    url = urlsplit(address[0])
    head = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {address[1]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Client(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._got = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # not a base class of uvloop's transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(ConnectionError("the connection was closed"))
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0 or self._answer is None or self._answer.done():
            return
        head = bytes(self._got[:end]).lower()
        _, found, rest = head.partition(b"content-length:")
        if found:
            whole = len(self._got) >= end + 4 + int(rest.split(b"\r\n", 1)[0])
        else:
            whole = self._got.endswith(b"\r\n0\r\n\r\n")  # chunked
        if whole:
            answer, self._got = bytes(self._got), bytearray()
            self._answer.set_result(answer)

    async def ask(self, request: bytes) -> bytes:
        """Sends a request and returns the whole answer, head and body.

        Raises:
            ConnectionError: the connection is missing, or was closed before the answer.
            TimeoutError: no answer came within 120 s.
        """
        if self._transport is None:
            raise ConnectionError("not connected")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await asyncio.wait_for(self._answer, 120)

    def close(self) -> None:
        """Closes the connection, if it is open."""
        if self._transport is not None:
            self._transport.close()


async def closed_loop(
    address: Callable[[int], Address], prompt: str, *, clients: int, seconds: float, spread_s: float = 0.0
) -> Load:
    """Calls until ``seconds`` are over. Does not count the calls of the first second, or the first of each worker.

    Args:
        address: returns where worker *n* sends its next call.
    """
    load, body = Load(), body_of(prompt)
    warm_s = min(1.0, seconds / 4) + spread_s
    began = time.perf_counter()
    counted_from, until = began + warm_s, began + warm_s + seconds

    async def worker(number: int) -> None:
        await asyncio.sleep(spread_s * number / clients)
        client: _Client | None = None
        sent = None
        while time.perf_counter() < until:
            place = address(number)
            if client is None:
                url = urlsplit(place[0])
                _, client = await asyncio.get_running_loop().create_connection(
                    _Client, url.hostname or "", url.port or 80
                )
            if sent is None or sent[0] != place:
                sent = (place, request_to(place, body))
            started = time.perf_counter()
            try:
                answer = await client.ask(sent[1])
            except (ConnectionError, TimeoutError) as error:
                load.failures.append(repr(error))
                client.close()
                client = None
                continue
            ended = time.perf_counter()
            if not answer.startswith(b"HTTP/1.1 200"):
                load.failures.append(answer[:300].decode("utf-8", "replace"))
                await asyncio.sleep(0.05)
                continue
            load.answered += 1
            if counted_from <= ended < until:
                load.latencies.append(ended - started)
        if client is not None:
            client.close()

    await asyncio.gather(*(worker(n) for n in range(clients)))
    load.seconds = seconds
    return load
