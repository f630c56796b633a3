"""Request bodies that cost far more than their size are refused in time, and other requests are served meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import random
import re
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megaflow_hpc.model.gateway.dialects import messages
from megaflow_hpc.model.gateway.dialects.base import BadRequest
from megaflow_hpc.model.gateway.dialects.content import messages as checked_messages
from megaflow_hpc.model.gateway.dialects.options import engine_request
from megaflow_hpc.model.gateway.http_messages import MAX_BODY, MAX_BODY_OF_UNKNOWN_SIZE
from megaflow_hpc.model.gateway.open_rollout import RolloutQuota
from megaflow_hpc.model.json_text import OFFLOAD_BYTES, REQUEST, TooMuch, brackets, check_bounds, effort, packed
from megaflow_hpc.model.server.proxy import MAX_TENANT_BODY, _with_model
from megaflow_hpc.model.server.tenants import Tenants
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.types import ModelEndpoint
from tests.support.backends import proxy_of_script
from tests.support.crowds import raw
from tests.support.places import ROOT
from tests.support.serving import Servers, call, conversation, endpoint, listening

ECHO = {"default": ["fine"]}


def called(*arguments: str) -> dict[str, Any]:
    """An assistant's message with calls of a tool."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": text}}
        for n, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


MIB = 2**20


def lists() -> bytes:
    """Returns 30 MB that decode to ten million lists."""
    return b'{"messages":[' + b"[]," * 10_000_000 + b"[]]}"


async def post(
    model: ModelEndpoint, data: Any, path: str = "/chat/completions", **headers: str
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {model.api_key}", **headers}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(model.base_url + path, data=data) as answer:
            return answer.status, await answer.json()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A server of a scripted engine with a large context."""
    with Servers(tmp_path_factory.mktemp("served")) as servers:
        servers.script(ECHO, "default", "--idle-s", "3600", **{"max-model-len": 100_000_000})
        yield servers


class GatewayProcess:
    """A gateway in a process of its own, whose memory can be read."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.bench.gateway_rank"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **message: object) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def peak_mib(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) >> 10

    def cpu_s(self) -> float:
        """Processor time of all threads so far."""
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


def test_thirty_megabytes_of_empty_lists_are_refused_before_they_are_a_gigabyte() -> None:
    with GatewayProcess() as gateway:
        gateway.ask(servers=[])
        opened = gateway.ask(open=0)
        model = ModelEndpoint(opened["url"], opened["key"], "m")
        before, body = gateway.peak_mib(), lists()
        for tail in (b"", b'"'):  # the second is no JSON at all
            status, reply = asyncio.run(post(model, body[:-2] + tail + body[-2:]))
            assert status == 400
            assert f"over {REQUEST.objects} objects" in reply["error"]["message"]
        assert gateway.peak_mib() - before < 300


INVALID = {
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep, for json": b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep in tools": b'{"messages":[{"role":"user","content":"a"}],"tools":[' + b"[" * 400 + b"]" * 400 + b"]}",
    "deep, half a surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}],"tools":['
    + b'{"a":' * 400
    + b"1"
    + b"}" * 400
    + b"]}",
    "deep objects": b'{"messages":' + b'{"a":' * 150_000 + b"1" + b"}" * 150_000 + b"}",
    "bytes": b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
    "digits": b'{"n":' + b"9" * 5000 + b',"messages":[]}',
    "types": b'{"messages":5,"model":["x"],"stream":1,"tools":{"a":1},"seed":{}}',
}


async def test_json_that_no_engine_should_see_is_a_400(served: Servers, caplog: pytest.LogCaptureFixture) -> None:
    async with served.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        for path in ("/chat/completions", "/messages", "/responses", "/models/m:generateContent"):
            for kind, body in INVALID.items():
                status, reply = await post(model, body, path)
                assert (status, "message" in reply["error"]) == (400, True), (path, kind, reply)
        assert not (await gateway.close("t/default/0")).turns
    assert not any(r.exc_info for r in caplog.records)


async def test_large_requests_of_honest_agents_pass(served: Servers) -> None:
    """Long outputs full of brackets, quotes and commas; a long prompt as token ids; a picture."""
    async with served.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        rows = '[[{"a": [1,"\\"x\\\\"]}]],' * 30_000
        for content in (rows, "A" * 2 * MIB):
            status, reply = await call(model, {"messages": conversation(content), "max_tokens": 5})
            assert status == 200, str(reply)[:300]
        status, _ = await call(model, {"prompt": [65] * 100_000, "max_tokens": 5}, "/completions")
        assert status == 200


async def parts(number: int) -> AsyncIterator[bytes]:
    for _ in range(number):
        yield bytes(MIB)


async def test_a_body_that_is_too_long_is_a_413(servers: Servers) -> None:
    async with servers.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        bomb = gzip.compress(bytes(MAX_BODY_OF_UNKNOWN_SIZE * 4))
        for data, headers in (
            (parts(MAX_BODY_OF_UNKNOWN_SIZE // MIB + 1), {}),
            (bomb, {"Content-Encoding": "gzip"}),
            (zlib.compress(bytes(MAX_BODY_OF_UNKNOWN_SIZE * 4)), {"Content-Encoding": "deflate"}),
        ):
            status, reply = await post(model, data, **headers)
            assert (status, "longer than" in reply["error"]["message"]) == (413, True)
        path = "/" + model.base_url.split("/", 3)[3] + "/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {model.api_key}\r\nConnection: close\r\n"
        told = await raw(gateway.port, f"{head}Content-Length: {MAX_BODY + 1}\r\n\r\n".encode())
        assert told.startswith(b"HTTP/1.1 413")
        assert f"{MAX_BODY + 1} bytes, longer than 32 MiB ({MAX_BODY} bytes)".encode() in told


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        ("Transfer-Encoding: chunked", b"zz\r\n{}\r\n0\r\n\r\n"),
        ("Content-Encoding: gzip\r\nContent-Length: 5", b"wrong"),
        ("Content-Encoding: gzip\r\nTransfer-Encoding: chunked", b"2\r\n\x1f\x8b\r\n0\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("where", ["gateway", "proxy"])
async def test_a_malformed_body_is_a_400_without_a_traceback(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, framing: str, body: bytes
) -> None:
    async with servers.gateway() as gateway, proxy_of_script(tmp_path) as (proxy, _):
        model = await gateway.open("t/default/0", "default")
        path, key, port = "/" + model.base_url.split("/", 3)[3] + "/chat/completions", model.api_key, gateway.port
        if where == "proxy":
            path, key, port = "/v1/chat/completions", proxy.key, proxy.port
        head = (
            f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n{framing}\r\n\r\n"
        )
        answer = await raw(port, head.encode(), body)
        refused = b"415" if where == "proxy" and "gzip" in framing else b"400"
        assert answer.split(b" ")[1] == refused, answer[:200]
    assert not any(r.exc_info for r in caplog.records)


async def test_a_members_bodies_are_bounded_at_a_pools_proxy(tmp_path: Path, servers: Servers) -> None:
    pool = EnginePool(servers.run.path)
    async with proxy_of_script(tmp_path, tenants=Tenants(pool, {})) as (proxy, _):
        assert proxy.tenants is not None
        proxy.tenants.user = lambda key: "bob" if key == "bobs" else None  # type: ignore[method-assign]
        for key, expected in (("bobs", 400), (proxy.key, 200)):
            values = b'{"messages":[{"role":"user","content":"hi"}],"x":[' + b"[]," * 200_000 + b"[]]}"
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
                async with session.post(f"http://127.0.0.1:{proxy.port}/v1/chat/completions", data=values) as answer:
                    assert answer.status == expected, await answer.text()
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer bobs"}) as session:
            data = parts(MAX_TENANT_BODY // MIB + 1)
            async with session.post(f"http://127.0.0.1:{proxy.port}/v1/chat/completions", data=data) as answer:
                assert answer.status == 413


# --- what one rollout holds at once ---


@asynccontextmanager
async def half_sent(model: ModelEndpoint, port: int, number: int, length: int) -> AsyncIterator[None]:
    """Sends calls with all of the body but the last byte, as far as the gateway reads it."""
    path = "/" + model.base_url.split("/", 3)[3] + "/chat/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {model.api_key}\r\nContent-Length: {length}\r\n\r\n"
    )
    writers = []
    for _ in range(number):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + bytes(length - 1))
        writers.append(writer)
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def test_half_sent_bodies_of_one_rollout_take_bounded_memory_and_leave_others_served() -> None:
    with GatewayProcess() as gateway:
        gateway.ask(servers=[])
        hostile, other = (ModelEndpoint(o["url"], o["key"], "m") for o in (gateway.ask(open=n) for n in range(2)))
        port, before = int(hostile.base_url.split("/")[2].rpartition(":")[2]), gateway.peak_mib()
        async with half_sent(hostile, port, 12, 40 * MIB):
            for _ in range(3):
                status, _ = await asyncio.wait_for(post(other, b"[]"), 60)
                assert status == 400  # it was read
        assert gateway.peak_mib() - before < 3 * MAX_BODY // MIB


async def test_calls_of_one_rollout_take_turns_and_none_is_lost() -> None:
    quota, order, held = RolloutQuota(100, calls=3), [], 0

    async def one(number: int, size: int) -> None:
        nonlocal held
        async with quota.turn(size):
            held += size
            assert held <= 100
            order.append(number)
            await asyncio.sleep(0)
            held -= size

    tasks = [asyncio.create_task(one(n, size)) for n, size in enumerate([60, 30, 100, 5, 5, 5, 5, 100])]
    await asyncio.sleep(0)
    tasks[2].cancel()
    tasks[5].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 3, 4, 6, 7]
    async with quota.turn(100):
        pass


def within(text: bytes, length: int) -> bytes:
    """Returns a request with one message: ``text`` repeated to ``length`` bytes."""
    return b'{"messages":[{"role":"user","content":"%b"}]}' % (text * (length // len(text)))


FULL = MAX_BODY - 200
HOSTILE: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b'{"messages":[%b[]]}' % (b"[]," * (FULL // 3)),
    "line ends": lambda: within(b"\\n", FULL),
    "wide characters": lambda: within("é".encode(), FULL),
    "pairs": lambda: within(b"\\ud83d\\ude00", FULL),
    "half pairs": lambda: within(b"a" * 1000 + b"\\ud83d", FULL),
    "short texts": lambda: b'{"messages":["%b"]}' % b'","'.join([b"a" * 60] * (FULL // 63)),
    "names": lambda: b'{"messages":[{%b}]}' % b",".join(b'"k%d":0' % number for number in range(190_000)),
    "space": lambda: b'{"messages":%b[]}' % (b" " * FULL),
    "digits": lambda: b'{"messages":[%b]}' % (b"1" * FULL),
    "messages": lambda: b'{"messages":[%b]}' % b",".join([b'{"role":"user","content":"hi"}'] * 90_000),
    "arguments": lambda: packed({"messages": [called(*[json.dumps({"a": "x\n" * MIB})] * 5)]}),
}


@asynccontextmanager
async def refusing_engine() -> AsyncIterator[dict[str, Any]]:
    """Yields the record of an engine that reads each request and refuses it."""

    async def refuse(request: web.BaseRequest) -> web.Response:
        while await request.content.readany():
            pass
        return web.Response(status=400, text="no")

    async with listening(web.Server(refuse)) as port:
        yield endpoint(port, "default")


async def test_a_neighbours_call_is_answered_soon_while_a_hostile_body_is_read() -> None:
    """The delay is the processor time that the gateway spends during the call, so a busy machine does not matter."""
    with GatewayProcess() as gateway:
        async with refusing_engine() as engine:
            gateway.ask(servers=[engine])
            hostile, other = (ModelEndpoint(o["url"], o["key"], "m") for o in (gateway.ask(open=n) for n in range(2)))
            for kind, body in HOSTILE.items():
                delays: list[float] = []
                task = asyncio.create_task(post(hostile, io.BytesIO(body())))
                async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {other.api_key}"}) as session:
                    while not task.done():
                        before = gateway.cpu_s()
                        async with session.get(other.base_url + "/models") as answer:
                            assert answer.status == 200
                        delays.append(gateway.cpu_s() - before)
                status, _ = await task
                assert status == 400, kind
                assert max(delays) < 0.4, f"{kind}: 0.2 s on a machine as fast as those that were measured"
                assert gateway.peak_mib() < 600, kind


def test_brackets_and_commas_are_counted_outside_of_strings() -> None:
    """Random texts of quotes and backslashes, longer than a window."""
    draw = random.Random(5)
    for _ in range(60):
        words = [draw.choice(["a", '"', "\\", "\\\\", "[", "{", ",", "é"]) for _ in range(9)]
        texts = ["".join(draw.choices(words, k=draw.choice([0, 5, 300, 20_000, 40_000]))) for _ in range(5)]
        value = {"m": [{"content": text} for text in texts], "x": [1, [], {}]}
        found = list(brackets(json.dumps(value, ensure_ascii=draw.choice([True, False])).encode()))
        assert b"".join(part for part, _ in found) == b"{[" + b"{}" * 5 + b"][[]{}]}"
        assert sum(commas for _, commas in found) == 7


def test_values_are_counted_outside_of_strings() -> None:
    text = json.dumps({"x": '[{,"\\' * 500_000, "y": ["\\\\", '"']}).encode()
    check_bounds(text)
    with pytest.raises(TooMuch, match="over"):
        check_bounds(text[:-1] + b',"z":[' + b"{}," * REQUEST.objects + b"{}]}")
    with pytest.raises(TooMuch, match="over"):
        check_bounds(b'["",' * 3_000_000)


# --- large bodies and other calls ---


async def test_other_rollouts_are_served_while_a_large_body_is_dealt_with(servers: Servers) -> None:
    servers.script(ECHO)
    async with servers.gateway() as gateway:
        large, other = [await gateway.open(f"t/default/{n}", "default") for n in range(2)]
        task = asyncio.ensure_future(call(large, {"messages": conversation('["x"], ' * MIB), "max_tokens": 5}))
        answered = 0
        while not task.done():
            status, _ = await call(other, {"messages": conversation("hi"), "max_tokens": 5})
            assert status == 200
            answered += 1
        status, reply = await task
        assert (status, "context length" in str(reply)) == (400, True)
        assert answered > 5


@pytest.mark.parametrize(
    "body",
    [
        {"messages": conversation(*["hi"] * 20_000)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 25_000}]},
        {"messages": [called(*["{}"] * 9_000)]},
        {"messages": conversation(*['[{"'] * 20_000)},
    ],
    ids=["messages", "parts", "calls", "messages of brackets"],
)
def test_many_objects_of_a_small_body_are_processed_in_the_thread(body: Any) -> None:
    raw = packed(body)
    assert effort(raw) > OFFLOAD_BYTES > len(raw)


def test_arguments_of_many_values_are_refused_before_a_decoder_has_them() -> None:
    many = "[" + "1," * 200_000 + "1]"
    for text, why in (
        (many, "100000 values"),
        ("[" + "{}," * 20_000 + "{}]", "10000 objects"),
        ('{"a": %s}' % ("[" * 200 + "]" * 200), "64 levels"),
        ("[" * 200 + "x" * 300_000, "64 levels"),
    ):
        with pytest.raises(BadRequest, match=why):
            checked_messages([called(text)], "messages")
    tool = {"type": "tool_use", "id": "a", "name": "f"}
    for given in ([1] * 200_000, {"a": "a" * 5 * MIB}, {"a" * 5 * MIB: 1}):
        asked = {"max_tokens": 1, "messages": [{"role": "assistant", "content": [{**tool, "input": {"x": given}}]}]}
        with pytest.raises(BadRequest, match=r"100000 values|4194304 bytes"):
            engine_request(messages.request(asked), chat=True)


def test_a_proxy_names_the_adapter_in_a_large_request_and_passes_what_is_no_request() -> None:
    body = {"model": "m", "messages": conversation('"x"\n' * MIB)}
    assert json.loads(_with_model(json.dumps(body).encode(), "adapter")) == {**body, "model": "adapter"}
    for other in (b'{"a":' * 5000 + b"1" + b"}" * 5000, b"[" * 200_000, b"{" + b"[]," * 200_000, b"[1]"):
        assert _with_model(other, "adapter") is other
