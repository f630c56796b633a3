"""Answers of engines that are external or driven by an agent are limited in bytes, time and depth, or refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from megaflow_hpc.model.gateway import engine_call
from megaflow_hpc.model.gateway.engine_call import (
    MAX_ANSWER,
    SMALL_ANSWER,
    AnswerTooLong,
    EngineClient,
    ExchangeFailed,
)
from megaflow_hpc.model.gateway.open_rollout import RolloutQuota
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.model.json_text import ANSWER
from megaflow_hpc.types import ModelEndpoint
from tests.support.serving import call_failure, endpoint

MIB = 2**20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SCORES = [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]
CHOICE: dict[str, Any] = {
    "index": 0,
    "message": {"role": "assistant", "content": "x"},
    "finish_reason": "stop",
    "token_ids": [1, 2],
    "logprobs": {"content": SCORES * 2},
}
GOOD: dict[str, Any] = {"choices": [CHOICE], "prompt_token_ids": [1], "usage": {"total_tokens": 3}}


def whole(body: Any, *more: bytes) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"%b%bContent-Length: %d\r\n\r\n%b" % (HEAD, b"".join(more), len(data), data)


def record(port: int, name: str = "p.0", **more: Any) -> dict[str, Any]:
    return endpoint(port, **{"server": name, **more})


async def call(model: ModelEndpoint, path: str = "chat/completions", **more: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": "x"}], **more}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:
        async with session.post(f"{model.base_url}/{path}", json=body) as response:
            return response.status, await response.text()


class Engine:
    """Sends a given answer to every request."""

    def __init__(self, say: Callable[[asyncio.StreamWriter], Any]) -> None:
        self._say, self.port, self.asked = say, 0, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
                self.asked += 1
                if (done := self._say(writer)) is not None:
                    await done
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def engine(*answers: bytes) -> AsyncIterator[Engine]:
    """An engine that gives these answers in turn, and then repeats the last."""
    left = list(answers)
    found = Engine(lambda writer: writer.write(left.pop(0) if len(left) > 1 else left[0]))
    async with served(found):
        yield found


@asynccontextmanager
async def served(found: Engine) -> AsyncIterator[Engine]:
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()


LISTS = b'{"choices":[' + b"[]," * (ANSWER.objects + 10) + b"[]]}"
DEEP: Any = 1
for _ in range(200):
    DEEP = {"a": DEEP}


def changed(**choice: Any) -> dict[str, Any]:
    return {**GOOD, "choices": [{**CHOICE, **choice}]}


def message(**fields: Any) -> dict[str, Any]:
    return changed(message={"role": "assistant", "content": "x", **fields})


NONE = {
    "lists without end": LISTS,
    "nested 200 deep": message(other=DEEP),
    "texts of 9 MB": message(content="x" * 9 * MIB),
    "a negative id": changed(token_ids=[1, -2]),
    "a score that is no number": json.dumps(GOOD).replace("-1.0", "NaN").encode(),
    "an infinite score": changed(logprobs={"content": [{"logprob": 1e39}] * 2}),
    "a content of parts": message(content=[{"type": "text", "text": "x"}]),
    "a call of no function": message(tool_calls=[{"id": "c"}]),
    "a reason that is a number": changed(finish_reason=7),
    "a message that is a text": changed(message="x"),
    "more choices than were asked for": {**GOOD, "choices": [CHOICE] * 500},
}


@pytest.mark.parametrize("kind", NONE)
@pytest.mark.parametrize("protocol", ["plain", "text"])
async def test_an_answer_that_is_none_is_no_turn_and_no_rest_of_the_server(kind: str, protocol: str) -> None:
    scored = "id" in kind or "score" in kind  # the protocol ``text`` does not check these
    async with engine(whole(NONE[kind])) as bad, ModelGateway(wait_s=20) as gateway:
        gateway.update_endpoints([record(bad.port, protocol=protocol)])
        model = await gateway.open("t/p/0", "p")
        status, text = await call(model)
        assert status == (200 if scored and protocol == "text" else 400), text[:500]
        assert len(text) < 2000
        assert bad.asked == (1 if status == 200 else 2), "the control's answer is as bad"
        assert gateway._caller.router.servers("p")[0].failures == 0
        failure = await gateway.outage("t/p/0")
        assert bool(failure) == (status == 400), "what an engine says by itself is the service's failure"
        recording = await gateway.close("t/p/0")
        assert len(recording.turns) == (status == 200)


async def test_odd_fields_that_nothing_reads_cost_no_answer() -> None:
    odd = {"usage": [1], "created": "now", "id": {"a": 1}, "service_tier": None, "model": 7}
    version = b"X-Megaflow-Weight-Version: 99999999999999999999\r\n"
    async with engine(whole({**GOOD, **odd}, version)) as stranger, ModelGateway(wait_s=20) as gateway:
        gateway.update_endpoints([record(stranger.port, weight_version=4)])
        model = await gateway.open("t/p/0", "p")
        status, text = await call(model)
        assert (status, "now" in text) == (200, False)
        recording = await gateway.close("t/p/0")
        assert recording.sequences[0].weight_versions.tolist() == [-1, 4, 4]


async def test_arguments_nested_deeply_are_a_text() -> None:
    """A model may write them, also at an agent's request. They are recorded, so the agent gets them too."""
    arguments = '{"a":' * 300 + "1" + "}" * 300
    said = message(tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}])
    async with engine(whole(said)) as asked, ModelGateway(wait_s=20) as gateway:
        gateway.update_endpoints([record(asked.port)])
        model = await gateway.open("t/p/0", "p")
        status, text = await call(model, "messages", max_tokens=9)
        assert (status, json.loads(text)["content"][-1]["input"]) == (200, {"input": arguments})
        assert len((await gateway.close("t/p/0")).turns) == 1


def endless(part: bytes, times: int, head: bytes) -> Engine:
    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for _ in range(times):
            writer.write(part)
            await writer.drain()

    return Engine(say)


ENDLESS = {
    "a body": (b"x" * MIB, 1000, HEAD + b"Content-Length: 1048576000\r\n\r\n"),
    "a body in chunks of a byte": (b"1\r\nx\r\n" * 40_000, 10_000, HEAD + b"Transfer-Encoding: chunked\r\n\r\n"),
    "a head": (b"a" * MIB, 1000, HEAD + b"X: "),
    "headers": (b"".join(b"x%d: y\r\n" % n for n in range(9_000)), 1000, HEAD),
    "announcements": (b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * 10_000, 1000, b""),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_answer_without_end_is_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_call, "MAX_ANSWER", 4 * MIB)
    async with served(endless(*ENDLESS[kind])) as stranger:
        client, url = EngineClient(), f"http://127.0.0.1:{stranger.port}/v1/chat/completions"
        with pytest.raises(ExchangeFailed) as caught:
            await client.post(url, b"{}", key="k", timeout_s=2 if kind == "announcements" else 120)
        assert isinstance(caught.value, AnswerTooLong) == ("body" in kind)
        assert kind == "announcements" or "no answer within" not in str(caught.value)
        await client.close()


async def test_a_call_that_asks_for_too_much_is_told_so_and_others_go_on() -> None:
    """Many answers or log-probabilities are the request's fault, and cause no backoff of the server."""
    large = whole(b'{"choices":"' + b"x" * MAX_ANSWER + b'"}')
    async with engine(large, whole(GOOD)) as asked, ModelGateway(wait_s=20) as gateway:
        gateway.update_endpoints([record(asked.port)])
        model, other = await gateway.open("t/p/0", "p"), await gateway.open("t/p/1", "p")
        status, text = await call(model, logprobs=True, top_logprobs=20)
        assert (status, f"longer than {MAX_ANSWER >> 20} MiB" in text) == (400, True)
        assert call_failure(gateway, "t/p/0") == ""
        assert (await call(other))[0] == 200
        assert gateway._caller.router.servers("p")[0].failures == 0


async def test_large_answers_of_one_rollout_are_taken_in_one_at_a_time() -> None:
    """Each answer is read up to the size that needs the gate. Another rollout's answer does not wait."""
    quota, other = RolloutQuota(100), RolloutQuota(100)
    held: list[str] = []
    let_go = asyncio.Event()

    async def one(name: str, whose: RolloutQuota) -> None:
        async with whose.large_answer() as gate:
            reply = await client.post(url, b"{}", key="k", timeout_s=60, gate=gate)
            assert len(reply.body) == 4 * SMALL_ANSWER
            held.append(name)
            await let_go.wait()

    async with engine(whole(b"x" * 4 * SMALL_ANSWER)) as asked:
        client, url = EngineClient(), f"http://127.0.0.1:{asked.port}/"
        tasks = [asyncio.create_task(one(name, quota)) for name in ("a", "b", "c")]
        while asked.asked < 3 or not held:
            await asyncio.sleep(0.01)
        await one_let_through(asyncio.create_task(one("other", other)), held)
        assert len(held) == 2
        tasks[2].cancel()  # a call that is cancelled while it waits delays no other
        let_go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(held) == ["a", "b", "other"]
        await client.close()


async def one_let_through(task: asyncio.Task[None], held: list[str]) -> None:
    while "other" not in held:
        assert not task.done()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("streamed", [False, True])
async def test_other_rollouts_are_served_while_a_large_answer_is_dealt_with(streamed: bool) -> None:
    """An agent may ask for log-probabilities of 150,000 tokens. They are read, recorded and passed on."""
    tokens = list(range(150_000))
    large = changed(token_ids=tokens, logprobs={"content": SCORES * len(tokens)})
    async with engine(whole(large)) as hers, engine(whole(GOOD)) as his, ModelGateway(wait_s=20) as gateway:
        gateway.update_endpoints([record(hers.port), record(his.port, "q.0", policy="q")])
        model, other = await gateway.open("t/p/0", "p"), await gateway.open("t/q/0", "q")
        task = asyncio.create_task(call(model, logprobs=True, stream=streamed))
        answered = 0
        while not task.done():
            assert (await call(other))[0] == 200
            answered += 1
        status, text = await task
        assert (status, text.count("top_logprobs")) == (200, len(tokens))
        recording = await gateway.close("t/p/0")
        assert recording.sequences[0].tokens.tolist() == [1, *tokens]
        assert answered > 5
