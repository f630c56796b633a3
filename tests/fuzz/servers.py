"""Fuzz the HTTP of gateway and proxy: whole requests as bytes, and bodies within valid requests.

Gateway, proxy and a scripted engine run in a thread, connected as in a campaign but without TLS. Each input gets its
own connection. A valid request must be answered afterwards, and the input must not have made a log grow.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import http.client
import io
import itertools
import json
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.scripted.script import Script
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.model.server.proxy import Proxy
from tests.fuzz.contract import Target, reader
from tests.support.split_engine import SplitEngine

KEY, ROOT = b"@KEY@", b"@ROOT@"
"""Inputs contain these in place of the key, and of the path of the rollout: at the proxy, ``/v1``."""
_ENOUGH_S = 30.0
_QUIET_S = 0.03
"""Seconds without a byte after which a request counts as unfinished."""


class _Log(logging.Handler):
    """Keeps the errors that a server logs, and counts its bytes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.bad: list[str] = []
        self.bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        self.bytes += len(text)
        if record.exc_info or record.levelno >= logging.ERROR:
            self.bad.append(text)

    def check(self, bytes_before: int) -> None:
        """Check that nothing was logged as an error, and not much at all."""
        bad, self.bad = self.bad, []
        assert not bad, bad[-1][-4000:]
        assert self.bytes - bytes_before <= 4096


Started = TypeVar("Started", bound="Site")


class Site:
    """Gateway, proxy and engine in their thread."""

    def __init__(self, protocol: str, *, proxy: bool = False) -> None:
        self.log = _Log()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.log.bad.append(repr(context)))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._protocol, self._at_proxy = protocol, proxy
        self.proxy = Proxy()
        self.gateway = ModelGateway(wait_s=2.0)
        self.key, self.root = "", ""
        self._runner: web.AppRunner | None = None

    def start(self) -> None:
        """Start the servers. :func:`stop_all` stops them."""
        _STARTED.callback(self._end)
        logging.getLogger().addHandler(self.log)
        self._thread.start()
        self.run(self._start())

    def _end(self) -> None:
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_ENOUGH_S)
        logging.getLogger().removeHandler(self.log)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the thread of the servers."""
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
        if self._at_proxy:
            self.key, self.root = self.proxy.key, "/v1"

    async def renew(self) -> None:
        """Open a rollout without a history."""
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
    """Send bytes. Return the answer, once it is complete or nothing comes for a while."""
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
    """Stands in for a socket: http.client reads an answer from it."""

    def __init__(self, data: io.BytesIO) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return self._data


def statuses(data: bytes) -> list[int]:
    """Return the statuses of the answers that were received, up to the first malformed one."""
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


def _check(site: Site, port: int, data: bytes) -> None:
    """Send a request, and then a valid one."""
    logged_before = site.log.bytes
    found = statuses(exchange(port, _addressed(site, data), _QUIET_S))
    answered = exchange(port, _addressed(site, _ALIVE), _ENOUGH_S)
    assert statuses(answered) == [200], f"a valid request is not answered: {answered[:500]!r}"
    assert [status for status in found if status >= 500 and status not in (501, 505)] == []
    site.log.check(logged_before)


def _addressed(site: Site, data: bytes) -> bytes:
    return data.replace(KEY, site.key.encode()).replace(ROOT, site.root.encode())


def request(path: bytes, body: bytes, *more: bytes, method: bytes = b"POST") -> bytes:
    """Make a whole request."""
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: x", b"Authorization: Bearer " + KEY, *more]
    if body:
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


_CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
_FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_STREAMED = {
    "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "max_tokens": 5, "n": 1,
    "stop": ["x"], "seed": 3, "logprobs": True, "top_logprobs": 2,
    "tools": [{"type": "function", "function": _FUNCTION}],
}  # fmt: skip
_CONVERSATION = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "out"},
]
_OF_ANTHROPIC = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
]
_MESSAGES = {
    "model": "m", "max_tokens": 10, "system": [{"type": "text", "text": "s"}], "messages": _OF_ANTHROPIC,
    "stream": True, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
}  # fmt: skip
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "o"},
]
_RESPONSE = {
    "input": _ITEMS, "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "auto",
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
}  # fmt: skip
BODIES: list[tuple[bytes, dict[str, Any]]] = [
    (b"/chat/completions", _CHAT),
    (b"/chat/completions", {**_CHAT, **_STREAMED}),
    (b"/chat/completions", {**_CHAT, "messages": _CONVERSATION}),
    (b"/completions", {"model": "default", "prompt": "text", "max_tokens": 3}),
    (b"/completions", {"prompt": [1, 2, 3], "stream": True, "echo": False}),
    (b"/messages", _MESSAGES),
    (b"/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    (b"/responses", {"model": "m", "input": "text", "instructions": "i", "stream": True, "max_output_tokens": 9}),
    (b"/responses", _RESPONSE),
]


def _whole_requests() -> list[bytes]:
    chat = json.dumps(_CHAT).encode()
    path = ROOT + b"/chat/completions"
    chunked = request(path, b"", b"Transfer-Encoding: chunked", b"Content-Type: application/json")
    chunked += b"%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (len(chat), chat)
    upgrade = (b"Expect: 100-continue", b"Connection: keep-alive, Upgrade", b"Upgrade: websocket")
    two = request(b"/", b"", method=b"HEAD")
    two += request(ROOT + b"/models/x", b"", b"Cookie: a=b", b"X-Api-Key: k", method=b"GET")
    return [
        *(request(ROOT + path, json.dumps(body).encode()) for path, body in BODIES[:4]),
        chunked,
        request(ROOT + b"/models", b"", method=b"GET") * 3,
        request(path, chat, *upgrade),
        two,
        b"GET http://x" + ROOT + b"/models HTTP/1.0\r\nAuthorization: Basic " + KEY + b"\r\n\r\n",
    ]


def _bodies() -> list[bytes]:
    return [bytes([number]) + b"\n" + json.dumps(body).encode() for number, (_, body) in enumerate(BODIES)]


_ALIVE = request(ROOT + b"/models", b"", b"Connection: close", method=b"GET")
_STARTED = contextlib.ExitStack()


def stop_all() -> None:
    """Stop the servers that targets started. The next input starts new ones."""
    _STARTED.close()


atexit.register(stop_all)


def started(make: Callable[[], Started]) -> Callable[[], Started]:
    """Make a function that starts a site at its first call, and again after :func:`stop_all`."""

    @functools.cache
    def site() -> Started:
        made = make()
        made.start()
        _STARTED.callback(site.cache_clear)
        return made

    return site


_split = started(lambda: Site("split"))
_plain = started(lambda: Site("plain"))
_at_proxy = started(lambda: Site("split", proxy=True))
_numbers = itertools.count()


@reader
def gateway(data: bytes) -> None:
    """Send bytes to the gateway."""
    _check(_split(), _split().gateway.port, data)


@reader
def proxy(data: bytes) -> None:
    """Send bytes to the proxy before an engine."""
    _check(_at_proxy(), _at_proxy().proxy.port, data)


@reader
def bodies(data: bytes) -> None:
    """Send a body to the gateway. The first line of the input chooses the path."""
    choice, _, body = data.partition(b"\n")
    path = BODIES[sum(choice) % len(BODIES)][0]
    number = next(_numbers)
    site = _split() if number % 2 else _plain()
    if number % 50 < 2:  # a recording grows with every answer
        site.run(site.renew())
    _check(site, site.gateway.port, request(ROOT + path, body))


_WORDS = (
    b"\r\n", b"\n", b"\r", b"\0", b"//", b"#x", b"?a=%ff", b"%2f..%2f", b"-1\r\n", b"ffffffffffffffff\r\n", KEY, ROOT,
    b"HTTP/9.9", b"HTTP/1.1 500", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"OPTIONS * HTTP/1.1\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: +5\r\n", b"Content-Encoding: gzip\r\n", b"Content-Encoding: br\r\n", b"Expect: x\r\n",
    b"Content-Type: text/plain; charset=utf-99\r\n", b"Content-Type: ;;\r\n", b"Authorization: Bearer \xff\xfe\r\n",
    b"Host: a\r\nHost: b\r\n", b"Cookie: \x01=;\r\n", b"Range: bytes=0-\r\n", b"X: " + b"a" * 9000 + b"\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
)  # fmt: skip
_FIELDS = (
    b'"stream":true,', b'"n":3,', b'"echo":true,', b'"logprobs":100,', b'"best_of":2,', b'"prompt_logprobs":1,',
    b'"suffix":"x",', b'"stop_token_ids":[1],', b'"response_format":{"type":"json_object"},', b'"max_tokens":0,',
    b'"max_tokens":-1,', b'"return_token_ids":false,', b'"kv_transfer_params":{},', b'"structured_outputs":{},',
    b'"image_url":"http://127.0.0.1"', b'"tool_choice":"required",', b'"min_tokens":9,', b'"previous_response_id":"x",',
    b'"model":"other",', b'"chat_template":"{{ 1/0 }}",', b'"continue_final_message":true,',
    b'"add_generation_prompt":false,',
)  # fmt: skip
TARGETS = {
    "gateway": Target(gateway, _whole_requests, words=_WORDS),
    "proxy": Target(proxy, _whole_requests, words=_WORDS),
    "bodies": Target(bodies, _bodies, form="json", words=_FIELDS),
}
