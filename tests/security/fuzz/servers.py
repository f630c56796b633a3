"""HTTP of gateway and proxy: whole requests as bytes, and bodies within valid ones.

Gateway, proxy and a scripted engine run in a thread, joined as in a campaign but for TLS. Each input has a
connection of its own; then a valid request is answered, and nothing was logged that the request could make grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.scripted.scale_out import SplitEngine
from megaflow_hpc.model.engines.scripted.script import Script
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.model.server.proxy import Proxy
from tests.security.fuzz.target import Broken, Feed, Target

KEY, ROOT = b"@KEY@", b"@ROOT@"
"""Stand in inputs for the key, and for the path of the rollout at the gateway; the proxy's is ``/v1``."""
_ENOUGH_S = 30.0
_QUIET_S = 0.03
"""Seconds without a byte after which a request is taken to be unfinished."""


class _Log(logging.Handler):
    """Keeps what a server says of errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.bad: list[str] = []
        self.bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        self.bytes += len(text)
        if record.exc_info or record.levelno >= logging.ERROR:
            self.bad.append(text)


class Site:
    """The servers in their thread."""

    def __init__(self, protocol: str) -> None:
        self.log = _Log()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.log.bad.append(repr(context)))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._protocol = protocol
        self.proxy = Proxy(host="127.0.0.1")
        self.gateway = ModelGateway(wait_s=2.0)
        self.key, self.root = "", ""
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Site:
        logging.getLogger().addHandler(self.log)
        self._thread.start()
        self.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_ENOUGH_S)
        logging.getLogger().removeHandler(self.log)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the servers' thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_ENOUGH_S)

    async def _start(self) -> None:
        self._runner = web.AppRunner(SplitEngine(Script(), "m").application(), access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        await self.proxy.start()
        await self.proxy.attach(Launch(base_url=f"http://127.0.0.1:{port}", model_name="m"))
        await self.gateway.start()
        served = {
            "server": "default.0",
            "policy": "default",
            "url": f"http://127.0.0.1:{self.proxy.port}",
            "key": self.proxy.key,
        }
        self.gateway.update_endpoints([{**served, "model_name": "m", "protocol": self._protocol}])
        await self.renew()

    async def renew(self) -> None:
        """A rollout without a history."""
        if self.key:
            await self.gateway.close("fuzz")
        endpoint = await self.gateway.open("fuzz", "default")
        self.key, self.root = endpoint.api_key, "/" + endpoint.base_url.split("/", 3)[3]

    async def _stop(self) -> None:
        await self.gateway.stop()
        await self.proxy.stop()
        assert self._runner is not None
        await self._runner.cleanup()


def exchange(port: int, data: bytes, quiet_s: float) -> bytes:
    """Sends bytes and returns what comes back until nothing does for a while."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), _ENOUGH_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.settimeout(_ENOUGH_S)
            connection.sendall(data)
            connection.settimeout(quiet_s)
            with contextlib.suppress(TimeoutError):
                while len(received) < 1 << 24 and (more := connection.recv(1 << 16)):
                    received += more
                    if _whole(received):
                        break
    return received


def _whole(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if end and line.startswith(b"content-length:"):
            return len(body) == int(line.partition(b":")[2])
    return False


class _Sent:
    """What http.client reads an answer from."""

    def __init__(self, data: io.BytesIO) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return self._data


def statuses(data: bytes) -> list[int]:
    """The statuses of the answers in what was received, as far as they can be told apart."""
    found = []
    stream = io.BytesIO(data)
    stream.close = lambda: None  # type: ignore[method-assign]
    while stream.tell() < len(data):
        answer = http.client.HTTPResponse(_Sent(stream))  # type: ignore[arg-type]
        try:
            answer.begin()
            found.append(answer.status)
            answer.read()
        except (http.client.HTTPException, ValueError, AttributeError):
            break
    return found


def _checked(site: Site, port: int, data: bytes, alive: bytes) -> None:
    before = site.log.bytes
    data = data.replace(KEY, site.key.encode()).replace(ROOT, site.root.encode())
    found = statuses(exchange(port, data, _QUIET_S))
    began = time.monotonic()
    answered = exchange(port, alive.replace(KEY, site.key.encode()).replace(ROOT, site.root.encode()), _ENOUGH_S)
    if statuses(answered) != [200]:
        raise Broken("a valid request is not answered", f"{time.monotonic() - began:.0f} s: {answered[:500]!r}")
    if bad := [status for status in found if status >= 500 and status not in (501, 505)]:
        raise Broken(f"status {bad[0]}")
    if site.log.bad:
        text = site.log.bad.pop()
        raise Broken(f"logged {_name_of(text)}", text[-4000:])
    if site.log.bytes - before > 4096:
        raise Broken("a long log", f"{site.log.bytes - before} bytes")


def _name_of(text: str) -> str:
    """The class of the exception in what was logged."""
    found = [line for line in text.splitlines() if re.match(r"[A-Za-z_.]+(:|$)", line)]
    return found[-1].split(":")[0] if found else "no exception"


def request(path: bytes, body: bytes, *more: bytes, method: bytes = b"POST") -> bytes:
    """A request that is whole."""
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: x", b"Authorization: Bearer " + KEY, *more]
    if body:
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
BODIES: list[tuple[bytes, dict[str, Any]]] = [
    (b"/chat/completions", _CHAT),
    (
        b"/chat/completions",
        {
            **_CHAT,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "max_tokens": 5,
            "tools": [_TOOL],
            "n": 1,
            "stop": ["x"],
            "seed": 3,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (
        b"/chat/completions",
        {
            **_CHAT,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": "u"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "out"},
            ],
        },
    ),
    (b"/completions", {"model": "default", "prompt": "text", "max_tokens": 3}),
    (b"/completions", {"prompt": [1, 2, 3], "stream": True, "echo": False}),
    (
        b"/messages",
        {
            "model": "m",
            "max_tokens": 10,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
            ],
            "stream": True,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
        },
    ),
    (b"/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    (b"/responses", {"model": "m", "input": "text", "instructions": "i", "stream": True, "max_output_tokens": 9}),
    (
        b"/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ),
]


def _whole_requests() -> list[bytes]:
    chat = json.dumps(_CHAT).encode()
    found = [request(ROOT + path, json.dumps(body).encode()) for path, body in BODIES[:4]]
    chunked = b"%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (len(chat), chat)
    found.append(
        request(ROOT + b"/chat/completions", b"", b"Transfer-Encoding: chunked", b"Content-Type: application/json")
        + chunked
    )
    found.append(request(ROOT + b"/models", b"", method=b"GET") * 3)
    found.append(
        request(
            ROOT + b"/chat/completions",
            chat,
            b"Expect: 100-continue",
            b"Connection: keep-alive, Upgrade",
            b"Upgrade: websocket",
        )
    )
    found.append(
        request(b"/", b"", method=b"HEAD")
        + request(ROOT + b"/models/x", b"", b"Cookie: a=b", b"X-Api-Key: k", method=b"GET")
    )
    found.append(b"GET http://x" + ROOT + b"/models HTTP/1.0\r\nAuthorization: Basic " + KEY + b"\r\n\r\n")
    return found


_ALIVE = request(ROOT + b"/models", b"", b"Connection: close", method=b"GET")
_WORDS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: +5\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Encoding: br\r\n",
    b"Content-Type: text/plain; charset=utf-99\r\n",
    b"Content-Type: ;;\r\n",
    b"Expect: x\r\n",
    b"Authorization: Bearer \xff\xfe\r\n",
    b"Host: a\r\nHost: b\r\n",
    b"ffffffffffffffff\r\n",
    b"-1\r\n",
    b"%2f..%2f",
    b"?a=%ff",
    b"#x",
    b"\0",
    b"//",
    b"HTTP/9.9",
    b"HTTP/1.1 500",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n",
    b"Cookie: \x01=;\r\n",
    b"X: " + b"a" * 9000 + b"\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Range: bytes=0-\r\n",
    KEY,
    ROOT,
)


@contextlib.contextmanager
def _gateway(folder: Path) -> Iterator[Feed]:
    with Site("split") as site:
        yield lambda data: _checked(site, site.gateway.port, data, _ALIVE)


@contextlib.contextmanager
def _proxy(folder: Path) -> Iterator[Feed]:
    with Site("split") as site:
        site.key, site.root = site.proxy.key, "/v1"
        yield lambda data: _checked(site, site.proxy.port, data, _ALIVE)


@contextlib.contextmanager
def _bodies(folder: Path) -> Iterator[Feed]:
    """The first line says which seed's path the second is posted to."""
    with Site("split") as split, Site("plain") as plain:
        fed = 0

        def feed(data: bytes) -> None:
            nonlocal fed
            number, _, body = data.partition(b"\n")
            path = BODIES[sum(number) % len(BODIES)][0]
            site = split if fed % 2 else plain
            fed += 1
            if fed % 50 == 0:  # a recording grows with every answer
                site.run(site.renew())
            _checked(site, site.gateway.port, request(ROOT + path, body), _ALIVE)

        yield feed


def targets() -> list[Target]:
    """Gateway and proxy."""
    bodies = [bytes([number]) + b"\n" + json.dumps(body).encode() for number, (_, body) in enumerate(BODIES)]
    words = (
        b'"stream":true,',
        b'"n":3,',
        b'"echo":true,',
        b'"logprobs":100,',
        b'"best_of":2,',
        b'"prompt_logprobs":1,',
        b'"suffix":"x",',
        b'"stop_token_ids":[1],',
        b'"response_format":{"type":"json_object"},',
        b'"max_tokens":0,',
        b'"max_tokens":-1,',
        b'"return_token_ids":false,',
        b'"kv_transfer_params":{},',
        b'"structured_outputs":{},',
        b'"image_url":"http://127.0.0.1"',
        b'"tool_choice":"required",',
        b'"min_tokens":9,',
        b'"previous_response_id":"x",',
        b'"model":"other",',
        b'"chat_template":"{{ 1/0 }}",',
        b'"continue_final_message":true,',
        b'"add_generation_prompt":false,',
    )
    return [
        Target("gateway", _gateway, _whole_requests, words=_WORDS),
        Target("proxy", _proxy, _whole_requests, words=_WORDS),
        Target("bodies", _bodies, lambda: bodies, form="json", words=words),
    ]
