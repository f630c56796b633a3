"""Request smuggling: requests that two readers may interpret differently reach no engine and hide no second request.

Each is sent with a valid key and followed by a second request, to gateway, proxy and the scripted engine. The proxy
forwards only what it has read, with a new Content-Length.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megaflow_hpc.model.server.proxy import Proxy
from tests.support.backends import proxy_of_script, proxy_of_witness
from tests.support.serving import Servers, conversation

BODY = json.dumps({"messages": conversation("hello")}).encode()
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
INNER = b"GET /v1/smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
LENGTH = b"Content-Length: %d" % len(BODY)
CODED = b"Transfer-Encoding: chunked"

AMBIGUOUS: dict[str, tuple[bytes, bytes]] = {
    # name: headers without their last line's end, body
    "length and chunks": (LENGTH + b"\r\n" + CODED, CHUNKED),
    "chunks and length": (CODED + b"\r\nContent-Length: 4", CHUNKED),
    "two lengths": (b"Content-Length: 3\r\n" + LENGTH, BODY),
    "two equal lengths": (LENGTH + b"\r\n" + LENGTH, BODY),
    "a list of lengths": (LENGTH + b", %d" % len(BODY), BODY),
    "a signed length": (b"Content-Length: +%d" % len(BODY), BODY),
    "a negative length": (b"Content-Length: -1", BODY),
    "a hexadecimal length": (b"Content-Length: 0x%x" % len(BODY), BODY),
    "a length with a blank": (b"Content-Length: 1 2", BODY),
    "a length of 65 bits": (b"Content-Length: %d" % (2**64 + len(BODY)), BODY),
    "a blank before the colon": (b"Transfer-Encoding : chunked\r\n" + LENGTH, BODY),
    "a tab before the colon": (b"Content-Length\t: 3\r\n" + LENGTH, BODY),
    "a blank before the name": (b" Content-Length: 3\r\n" + LENGTH, BODY),
    "a folded header": (b"Transfer-Encoding:\r\n chunked\r\n" + LENGTH, BODY),
    "a folded value": (b"X: a\r\n\tTransfer-Encoding: chunked\r\n" + LENGTH, BODY),
    "an unknown coding": (b"Transfer-Encoding: xchunked", CHUNKED),
    "chunked, then another": (b"Transfer-Encoding: chunked, identity", CHUNKED),
    "chunked twice": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", CHUNKED),
    "another, then chunked": (b"Transfer-Encoding: gzip, chunked", CHUNKED),
    "two codings": (b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked", CHUNKED),
    "a quoted coding": (b'Transfer-Encoding: "chunked"', CHUNKED),
    "a coding after a vertical tab": (b"Transfer-Encoding: \x0bchunked", CHUNKED),
    "lines that end in LF": (CODED.replace(b"\r\n", b"\n") + b"\nX: a", CHUNKED),
    "lines that end in CR": (b"X: a\r" + CODED, CHUNKED),
    "a zero byte in a header": (b"X: a\0b\r\n" + LENGTH, BODY),
    "a header without a name": (b": a\r\n" + LENGTH, BODY),
    "a header without a colon": (b"Content-Length\r\n" + LENGTH, BODY),
    "an underscore": (b"Content_Length: 3\r\nTransfer_Encoding: chunked\r\n" + LENGTH, BODY),
    "a chunk of a negative size": (CODED, b"-1\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a chunk of a size with 0x": (CODED, b"0x%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "a chunk of a size of 65 bits": (CODED, b"1%016x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "a chunk extension": (CODED, b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "a chunk extension with LF": (CODED, b"%x;a\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "a chunk extension with a request": (CODED, b"%x;\n%x\r\n%b\r\n0\r\n\r\n" % (2, len(BODY), BODY)),
    "chunk lines that end in LF": (CODED, b"%x\n%b\n0\n\n" % (len(BODY), BODY)),
    "a chunk longer than it says": (CODED, b"5\r\n%b\r\n0\r\n\r\n" % BODY),
    "a chunk without an end": (CODED, b"%x\r\n%b0\r\n\r\n" % (len(BODY), BODY)),
    "blanks after a size": (CODED, b"%x  \r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "trailers": (CODED, CHUNKED[:-2] + b"Content-Length: 3\r\nAuthorization: Bearer x\r\n\r\n"),
    "a trailer that is a request": (CODED, CHUNKED[:-2] + INNER),
    "a connection header that names others": (b"Connection: content-length, keep-alive\r\n" + LENGTH, BODY),
    "an upgrade": (b"Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n" + LENGTH, BODY),
    "a websocket": (b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n" + LENGTH, BODY),
    "an expectation": (b"Expect: 100-continue\r\n" + LENGTH, BODY),
    "another method": (b"X-HTTP-Method-Override: GET\r\nX-Original-URL: /metrics\r\n" + LENGTH, BODY),
    "a host of another": (b"Host: b\r\nX-Forwarded-Host: c\r\n" + LENGTH, BODY),
}
LINES = {
    "HTTP/1.0": b"POST %b HTTP/1.0",
    "an absolute address": b"POST http://elsewhere%b HTTP/1.1",
    "two blanks": b"POST  %b  HTTP/1.1",
    "a tab": b"POST\t%b\tHTTP/1.1",
    "a fragment": b"POST %b#/metrics HTTP/1.1",
    "a query that looks like a path": b"POST %b?/../../metrics HTTP/1.1",
    "percent": b"POST %b%%20HTTP/1.1%%0d%%0aX:%%20a HTTP/1.1",
    "dots": b"POST /metrics/..%b HTTP/1.1",
    "dots in percent": b"POST /x/%%2e%%2e%b HTTP/1.1",
    "slashes": b"POST //%b HTTP/1.1",
    "a null byte": b"POST %b\0 HTTP/1.1",
    "bytes": b"POST %b\xff HTTP/1.1",
    "HTTP/0.9": b"POST %b",
    "HTTP/9.9": b"POST %b HTTP/9.9",
    "lower case": b"post %b http/1.1",
    "an empty line before": b"\r\nPOST %b HTTP/1.1",
}
CASES = {**AMBIGUOUS, **{name: (LENGTH, BODY) for name in LINES}}


def request(name: str, path: str, key: str) -> bytes:
    """Returns the request of this name, followed by a second one."""
    headers, body = CASES[name]
    line = LINES.get(name, b"POST %b HTTP/1.1") % path.encode()
    head = line + b"\r\nHost: a\r\nAuthorization: Bearer " + key.encode() + b"\r\n"
    return head + headers + b"\r\n\r\n" + body + INNER


def check_answers(told: bytes) -> None:
    """Checks that there are at most two answers and nothing else. The second one refuses the second request."""
    statuses = [int(line.split(b" ")[1]) for line in told.splitlines() if line.startswith(b"HTTP/1.")]
    statuses = [status for status in statuses if status >= 200]
    assert len(statuses) <= 2, told
    assert all(status in (200, 400, 401, 404, 413, 415, 501, 505) for status in statuses), told
    assert statuses[1:] in ([], [400], [401], [404]), told


async def each_case(check: Callable[[str], Awaitable[None]]) -> None:
    """Checks all cases, a few at a time, because each waits a second for nothing to arrive."""
    turns = asyncio.Semaphore(8)

    async def one(name: str) -> None:
        async with turns:
            await check(name)

    await asyncio.gather(*map(one, CASES))


@pytest.mark.slow
async def test_the_proxy_passes_on_one_unambiguous_request_or_none() -> None:
    async def check(name: str) -> None:
        async with proxy_of_witness() as (proxy, witness):
            told = await listen_to(proxy, request(name, "/v1/chat/completions", proxy.key))
            check_answers(told)
            requests = witness.requests()
            assert len(requests) <= 1, (name, requests)
            if not requests:
                return
            (heard,) = witness.heard
            head, _, body = bytes(heard).partition(b"\r\n\r\n")
            assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n"), (name, head)
            names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
            assert len(names) == len(set(names)), (name, head)
            assert set(names) <= {
                b"host",
                b"accept",
                b"accept-encoding",
                b"user-agent",
                b"content-length",
                b"content-type",
            }
            assert b"\r\nContent-Length: %d\r\n" % len(body) in head + b"\r\n", (name, head)
            assert body == BODY, (name, body)

    await each_case(check)


async def listen_to(proxy: Proxy, data: bytes) -> bytes:
    """Returns everything that is answered. Closes the connection if the proxy keeps it open."""
    return await answers_on(*await asyncio.open_connection("127.0.0.1", proxy.port), data)


async def answers_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """Returns everything that is answered on a connection."""
    told = b""
    try:
        writer.write(data)
        while part := await asyncio.wait_for(reader.read(1 << 16), 1.0):
            told += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return told


@pytest.mark.slow
async def test_the_gateway_makes_one_call_or_none_of_an_ambiguous_request(servers: Servers) -> None:
    servers.script({"default": ["fine"]})
    async with servers.gateway() as gateway:

        async def check(name: str) -> None:
            rollout = f"t/default/{list(CASES).index(name)}"
            model = await gateway.open(rollout, "default")
            path = "/" + model.base_url.split("/", 3)[3] + "/chat/completions"
            check_answers(await listen_to(gateway, request(name, path, model.api_key)))  # type: ignore[arg-type]
            recording = await gateway.close(rollout)
            assert len(recording.calls) <= 1, name
            assert all(turn.server == "default.0" for turn in recording.turns)

        await each_case(check)


@pytest.mark.slow
async def test_the_scripted_engine_answers_one_request_or_none(tmp_path: Path) -> None:
    async with proxy_of_script(tmp_path):

        async def check(name: str) -> None:
            connection = await asyncio.open_unix_connection(str(tmp_path / "engine.sock"))
            check_answers(await answers_on(*connection, request(name, "/v1/chat/completions", "k")))

        await each_case(check)
