"""Engines that hang, break connections, send garbage or lack features, over real sockets. Nothing is lost or
invented."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.model.gateway.engine_call import EngineClient, ExchangeFailed
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording
from megaflow_hpc.types import ModelEndpoint
from tests.support.reported import answered
from tests.support.serving import call_failure, endpoint, gateway_before, in_loop, listening
from tests.support.split_engine import SplitEngine
from tests.support.waiting import until_async

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "x"},
    "finish_reason": "stop",
    "token_ids": [1, 2],
    "logprobs": {"content": [{"logprob": -1.0}]},
}


async def _request(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))


def says(*parts: bytes) -> Behaviour:
    """Reads a request, sends this and closes."""

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    return behave


def whole(body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(data), data)


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _request(reader)
    await reader.read()  # until the gateway has given up
    writer.close()


async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()  # type: ignore[attr-defined]


BAD: dict[str, Behaviour] = {
    "hangs": hangs,
    "resets": refuses,
    "closes without a word": says(),
    "half a head": says(b"HTTP/1.1 200 OK\r\nContent-Len"),
    "half a body": says(HEAD + b'Content-Length: 1000\r\n\r\n{"choices": [{"mess'),
    "half of its chunks": says(HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"cho\r\n', b"400\r\nices"),
    "another protocol": says(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "no JSON": says(whole(b"<html>busy</html>")),
    "a JSON list": says(whole([1, 2])),
    "no choices": says(whole({"object": "chat.completion"})),
    "an empty choice": says(whole({"choices": [{}], "usage": {"total_tokens": 1}})),
    "fewer scores than ids": says(whole({"choices": [CHOICE], "prompt_token_ids": [1]})),
    "ids that are no numbers": says(whole({"choices": [{**CHOICE, "token_ids": ["a", "b"]}], "prompt_token_ids": [1]})),
    "ids beyond all numbers": says(whole({"choices": [{**CHOICE, "token_ids": [2**40]}], "prompt_token_ids": [1]})),
    "a redirect": says(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
    "its own key refused": says(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"),
    "overloaded": says(b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n"),
    "an error": says(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"),
}


NO_ANSWER = {"no choices", "an empty choice", "an error"} | {k for k in BAD if k.startswith(("fewer", "ids"))}
"""Complete but unusable answers: the call is tried elsewhere, and the server gets no backoff."""


def record(port: int, name: str = "p.0", **more: Any) -> dict[str, Any]:
    return endpoint(port, server=name, **more)


def good() -> web.Application:
    return ScriptedEngine(Script(default=(ScriptedAnswer("good"),)), "m").application()


async def call(model: ModelEndpoint, text: str = "hello", **more: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": text}], **more}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:
        async with session.post(f"{model.base_url}/chat/completions", json=body) as response:
            return response.status, await response.text()


def says_good(recording: Recording, calls: int) -> None:
    assert [turn.server for turn in recording.turns] == ["p.1"] * calls
    for turn, text in zip(recording.turns, answered(recording), strict=True):
        tokens = recording.sequences[turn.sequence].tokens[turn.token_start : turn.token_end]
        assert bytes(t for t in tokens if t < 256) == text.encode() == b"good"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", BAD)
@in_loop
async def test_a_call_that_meets_a_bad_server_is_answered_by_a_good_one(kind: str, streamed: bool) -> None:
    bad = await asyncio.start_server(BAD[kind], "127.0.0.1", 0)
    port = bad.sockets[0].getsockname()[1]
    patience_s = 0.5 if kind == "hangs" else 20.0  # all others are judged by their answer, however late it is
    async with listening(good()) as other:
        async with ModelGateway(wait_s=20, request_timeout_s=patience_s) as gateway:
            gateway.update_endpoints([record(port, weight=1e6), record(other, "p.1", weight=1e-2)])
            model = await gateway.open("t/p/0", "p")
            status, text = await call(model, stream=streamed)
            assert (status, "good" in text) == (200, True), text
            assert gateway._caller.router.servers("p")[0].failures == (kind not in NO_ANSWER)
            says_good(await gateway.close("t/p/0"), 1)
    bad.close()


@in_loop
async def test_a_call_that_alone_is_refused_for_its_rate_does_not_keep_the_others_waiting() -> None:
    """An endpoint answers 429 to each request with more tokens than its limit per minute."""
    refused: list[str] = []
    limited = True

    async def answer(request: web.Request) -> web.Response:
        if limited and "long" in (text := await request.text()):
            refused.append(text)
            return web.json_response({"error": {"message": "Request too large"}}, status=429)
        answer = {"choices": [{**CHOICE, "message": {"role": "assistant", "content": "good"}}]}
        answer["choices"][0].pop("token_ids")
        return web.json_response({**answer, "object": "chat.completion", "usage": {"total_tokens": 3}})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    async with listening(application) as port:
        async with ModelGateway(wait_s=60) as gateway:
            gateway.update_endpoints([record(port, protocol="text")])
            model, other = [await gateway.open(f"t/p/{number}", "p") for number in range(2)]
            waiting = asyncio.create_task(call(model, "a long text"))
            await until_async(lambda: len(refused) > 3, "the long call is tried again")
            (server,) = gateway._caller.router.servers("p")
            assert (server.failures, server.backoff_until) == (0, 0.0)
            assert (await call(other))[0] == 200
            assert not waiting.done()
            limited = False
            assert (await waiting)[0] == 200
        limited, tries = True, len(refused)
        async with ModelGateway(wait_s=2) as gateway:
            gateway.update_endpoints([record(port, protocol="text")])
            model = await gateway.open("t/p/0", "p")
            status, text = await call(model, "a long text")
            assert (status, "Request too large" in text) == (400, True), text
            assert len(refused) > tries + 1


@in_loop
async def test_a_bad_server_alone_is_named_with_what_it_did() -> None:
    bad = await asyncio.start_server(BAD["half a body"], "127.0.0.1", 0)
    async with ModelGateway(wait_s=0.3) as gateway:
        gateway.update_endpoints([record(bad.sockets[0].getsockname()[1])])
        model = await gateway.open("t/p/0", "p")
        status, text = await call(model)
        assert status == 503
        assert "p.0: ClientPayloadError" in text
        assert "ClientPayloadError" in call_failure(gateway, "t/p/0")
        assert not (await gateway.close("t/p/0")).turns
    bad.close()


@in_loop
async def test_a_connection_that_the_server_has_closed_meanwhile_is_no_failure_of_the_server() -> None:
    answer = {"choices": [{**CHOICE, "logprobs": {"content": [{"logprob": -1.0}] * 2}}], "prompt_token_ids": [1]}

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(whole(answer))  # it promises to keep the connection, and ends it at the next request
        await _request(reader)
        writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    async with ModelGateway(wait_s=5) as gateway:
        gateway.update_endpoints([record(server.sockets[0].getsockname()[1])])
        model = await gateway.open("t/p/0", "p")
        assert [(await call(model))[0] for _ in range(3)] == [200, 200, 200]
        assert gateway._caller.router.servers("p")[0].failed_at == 0.0
        assert len((await gateway.close("t/p/0")).turns) == 3
    server.close()


@in_loop
async def test_an_agent_that_leaves_ends_the_engines_work() -> None:
    ended = asyncio.Event()

    async def watches(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        assert not await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(watches, "127.0.0.1", 0)
    async with ModelGateway() as gateway:
        gateway.update_endpoints([record(server.sockets[0].getsockname()[1])])
        model = await gateway.open("t/p/0", "p")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call(model), 0.3)
        await asyncio.wait_for(ended.wait(), 10)
        assert not (await gateway.close("t/p/0")).turns
    server.close()


@in_loop
async def test_an_answer_for_a_rollout_that_ended_is_nobodys() -> None:
    slow = Script(default=(ScriptedAnswer("late", delay_s=0.5),))
    async with listening(ScriptedEngine(slow, "m").application()) as port, ModelGateway() as gateway:
        gateway.update_endpoints([record(port)])
        model = await gateway.open("t/p/0", "p")
        waiting = asyncio.create_task(call(model))
        await asyncio.sleep(0.2)
        assert not (await gateway.close("t/p/0")).turns
        await gateway.open("t/p/0", "p")  # its next attempt, under the same id
        status, text = await waiting
        assert (status, "the rollout has ended" in text) == (401, True)
        assert not (await gateway.close("t/p/0")).turns


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_half_a_surrogate_pair_and_nan_pass_through_and_are_recorded(streamed: bool) -> None:
    async with listening(good()) as port, ModelGateway() as gateway:
        gateway.update_endpoints([record(port, "p.1")])
        model = await gateway.open("t/p/0", "p")
        status, text = await call(model, "cut \ud83d", metadata={"x": float("nan")}, stream=streamed)
        assert (status, "good" in text) == (200, True), text
        recording = await gateway.close("t/p/0")
        assert recording.messages[0]["content"] == "cut \ud83d"
        says_good(recording, 1)


class Whole(ScriptedEngine):
    """An engine that does not render prompts apart."""

    async def _render(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound


@in_loop
async def test_an_engine_without_the_split_is_asked_plainly_and_that_is_counted() -> None:
    engine = Whole(Script(default=(ScriptedAnswer("good"),)), "m")
    async with listening(engine.application()) as port, ModelGateway() as gateway:
        gateway.update_endpoints([record(port, "p.1", protocol="split")])
        model = await gateway.open("t/p/0", "p")
        assert [(await call(model))[0] for _ in range(2)] == [200, 200]
        recording = await gateway.close("t/p/0")
        assert recording.protocols == {"plain": 2}
        says_good(recording, 2)


@in_loop
async def test_an_engine_that_knows_no_token_ids_is_taken_for_its_text_and_that_is_counted() -> None:
    answer = {"choices": [{"index": 0, "message": CHOICE["message"], "finish_reason": "stop"}]}
    answer |= {"object": "chat.completion", "usage": {"total_tokens": 3}}
    server = await asyncio.start_server(says(whole(answer)), "127.0.0.1", 0)
    async with ModelGateway() as gateway:
        gateway.update_endpoints([record(server.sockets[0].getsockname()[1], "p.1")])
        model = await gateway.open("t/p/0", "p")
        assert (await call(model))[0] == 200
        recording = await gateway.close("t/p/0")
        assert recording.protocols == {"text": 1}
        assert [(turn.sequence, turn.token_end, turn.server) for turn in recording.turns] == [(-1, 0, "p.1")]
        assert [m["content"] for m in recording.messages] == ["hello", "x"]
    server.close()


@in_loop
async def test_an_engine_with_the_split_is_asked_in_three_requests() -> None:
    engine = SplitEngine(Script(default=(ScriptedAnswer("good"),)), "m", drift=0.5)
    async with gateway_before(engine, "split", "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        assert (await call(model))[0] == 200
        assert (await gateway.close("t/p/0")).protocols == {"split": 1}


@in_loop
async def test_a_time_limit_bounds_the_whole_exchange_and_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
        while not reader.at_eof():
            writer.write(b" ")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 0.02)
        closed.set()

    server = await asyncio.start_server(drips, "127.0.0.1", 0)
    client = EngineClient()
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
    with pytest.raises(ExchangeFailed, match=r"no answer within 0\.3 s"):
        await client.post(url, b"{}", key="k", timeout_s=0.3)
    await asyncio.wait_for(closed.wait(), 10)
    await client.close()
    server.close()


@in_loop
async def test_calls_in_a_row_share_a_connection() -> None:
    connections = 0

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await _request(reader)
                writer.write(whole({}))
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    client = EngineClient()
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
    for _ in range(3):
        assert (await client.post(url, b"{}", key="k", timeout_s=20)).status == 200
    assert connections == 1
    await client.close()
    server.close()
