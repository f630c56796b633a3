"""The gateway with real servers: attribution, errors in the API's shape, streams, failover."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from megaflow_hpc.model.engines.scripted.engine import END, ScriptedEngine, render
from megaflow_hpc.model.engines.scripted.script import Script
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.types import CallBudget, ModelEndpoint
from tests.support.reported import answered, check_against_reported
from tests.support.serving import (
    Engines,
    Servers,
    call,
    call_failure,
    conversation,
    descendants,
    endpoint,
    in_loop,
    listening,
)
from tests.support.waiting import until_async

ECHO = {"tasks": [{"when": "hello", "answers": ["héllo", "again", "and again"]}], "default": ["what?"]}


@in_loop
async def test_a_conversation_is_recorded_token_by_token(engines: Engines) -> None:
    engines.script(ECHO)
    async with engines.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        texts = ["hello"]
        for _ in range(3):
            status, reply = await call(model, {"model": model.model_name, "messages": conversation(*texts)})
            assert status == 200
            assert reply["model"] == model.model_name
            assert "token_ids" not in reply["choices"][0]
            assert reply["choices"][0]["logprobs"] is None
            texts += [reply["choices"][0]["message"]["content"], "go on"]
        recording = await gateway.close("t/default/0")
    check_against_reported(recording)
    (sequence,) = recording.sequences
    assert [m["content"] for m in recording.messages if m["role"] == "assistant"] == ["héllo", "again", "and again"]
    assert bytes(t for t, m in zip(sequence.tokens, sequence.loss_mask, strict=True) if m and t < 256).decode() == (
        "hélloagainand again"
    )
    assert list(sequence.tokens) == [*render(recording.messages[:-1]), *b"and again", END]
    assert all(t.agent_s >= 0 and t.model_s > 0 and t.server == "default.0" for t in recording.turns)


@in_loop
async def test_rollouts_at_once_are_kept_apart(engines: Engines) -> None:
    engines.script({"tasks": [{"when": f"<{n}>", "answers": [f"answer {n}"]} for n in range(20)]})
    async with engines.gateway() as gateway:
        models = [await gateway.open(f"t{n}/default/0", "default") for n in range(20)]
        assert len({m.base_url for m in models}) == len({m.api_key for m in models}) == 20
        await asyncio.gather(
            *(call(m, {"messages": conversation(f"<{n}>")}) for n, m in enumerate(models) for _ in range(5))
        )
        for n in range(20):
            recording = await gateway.close(f"t{n}/default/0")
            assert answered(recording) == [f"answer {n}"] * 5
            check_against_reported(recording)


@in_loop
async def test_a_stream_carries_the_same_answer(engines: Engines) -> None:
    engines.script(ECHO)
    async with engines.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        body = {"messages": conversation("hello"), "stream": True, "stream_options": {"include_usage": True}}
        status, text = await call(model, body)
        chunks = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert status == 200
        assert chunks.pop() == "[DONE]"
        parsed = [json.loads(c) for c in chunks]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in parsed if c["choices"]) == "héllo"
        assert parsed[-1]["usage"]["completion_tokens"] == 7
        check_against_reported(await gateway.close("t/default/0"))


@in_loop
async def test_a_stream_has_text_and_calls_in_separate_events(engines: Engines) -> None:
    """Engines send them so, and Goose skips the text of an event with calls."""
    engines.script({"default": [{"text": "I look.", "tool": "shell", "arguments": {"command": "ls"}}]})
    async with engines.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        tools = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
        body = {"messages": conversation("hello"), "stream": True, "tools": tools, "logprobs": True}
        _, text = await call(model, body)
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    fields = [[name for name, value in choice["delta"].items() if value] for choice in choices]
    assert fields == [["role"], ["content"], ["tool_calls"], []]
    assert [bool(choice["logprobs"]) for choice in choices] == [False, False, True, False], "they are of all tokens"


@in_loop
async def test_plain_completions_are_recorded(engines: Engines) -> None:
    engines.script(ECHO)
    async with engines.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        status, reply = await call(model, {"prompt": "hello", "max_tokens": 3}, "/completions")
        assert (status, reply["choices"][0]["finish_reason"]) == (200, "length")
        recording = await gateway.close("t/default/0")
    assert list(recording.sequences[0].tokens) == [*b"hello", *"héllo".encode()[:3]]
    assert recording.turns[0].finish_reason == "length"


@in_loop
async def test_wrong_keys_and_closed_rollouts_are_refused(engines: Engines) -> None:
    engines.script(ECHO)
    async with engines.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        other = await gateway.open("u/default/0", "default")
        body = {"messages": conversation("hello")}
        for key in ("", "x", other.api_key):
            status, reply = await call(model, body, key=key)
            assert (status, reply["error"]["type"]) == (401, "authentication_error")
        elsewhere = ModelEndpoint(model.base_url.replace("/r/", "/r/0"), model.api_key, "")
        assert (await call(elsewhere, body))[0] == 401
        assert not (await gateway.close("t/default/0")).turns
        assert (await call(model, body))[0] == 401


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("/chat/completions", b"{", 400),
        ("/chat/completions", b"[]", 400),
        ("/chat/completions", b'{"messages": 3}', 400),
        ("/nothing", b"{}", 404),
        ("/messages", b"{}", 400),
        ("/messages/count_tokens", b"{}", 400),
        ("/responses", b"{}", 400),
        ("/chat/completions", b'{"messages": [3]}', 400),
    ],
)
@in_loop
async def test_malformed_requests_get_the_apis_error_shape(
    engines: Engines, path: str, data: bytes, status: int
) -> None:
    engines.script(ECHO)
    async with engines.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        async with aiohttp.ClientSession(headers={"x-api-key": model.api_key}) as session:
            async with session.post(model.base_url + path, data=data) as response:
                assert response.status == status
                assert (await response.json())["error"]["message"]
        assert not (await gateway.close("t/default/0")).turns


@in_loop
async def test_a_prompt_that_is_too_long_is_the_engines_own_400(engines: Engines) -> None:
    engines.script(ECHO, max_model_len=50)
    async with engines.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        status, reply = await call(model, {"messages": conversation("hello" * 20)})
        assert status == 400
        assert "maximum context length is 50" in reply["error"]["message"]


@in_loop
async def test_a_budget_ends_a_rollout(engines: Engines) -> None:
    engines.script(ECHO)
    async with engines.gateway() as gateway:
        budgets = [(CallBudget(calls=2), "2 model calls"), (CallBudget(tokens=8), "8 tokens")]  # an answer has 7
        for budget, named in budgets:
            model = await gateway.open("t/default/0", "default", budget=budget)
            answers = [await call(model, {"messages": conversation("hello")}) for _ in range(3)]
            assert [status for status, _ in answers] == [200, 200, 429]
            assert answers[2][1]["error"]["type"] == "rollout_budget_exceeded"
            recording = await gateway.close("t/default/0")
            assert len(recording.turns) == 2
            assert named in recording.over_budget
        model = await gateway.open("t/default/0", "default", budget=CallBudget(calls=2))
        at_once = await asyncio.gather(*(call(model, {"messages": conversation("hello")}) for _ in range(5)))
        assert sorted(status for status, _ in at_once) == [200, 200, 429, 429, 429]


@in_loop
async def test_without_a_server_calls_wait_and_then_fail_with_the_cause() -> None:
    async with ModelGateway(wait_s=0.5) as gateway:
        gateway.update_endpoints([{"server": "p.0", "policy": "p", "cause": "out of GPU memory: …"}])
        model = await gateway.open("t/p/0", "p")
        began = time.monotonic()
        status, reply = await call(model, {"messages": conversation("hello")})
        assert 0.4 < time.monotonic() - began < 5
        assert (status, reply["error"]["type"]) == (503, "model_service_error")
        assert "out of GPU memory" in reply["error"]["message"]
        assert call_failure(gateway, "t/p/0")


@in_loop
async def test_a_rollout_cut_off_while_it_waits_for_a_server_knows_why() -> None:
    async with ModelGateway(wait_s=60) as gateway:
        model = await gateway.open("t/p/0", "p")
        assert not call_failure(gateway, "t/p/0")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call(model, {"messages": conversation("hello")}), 0.5)
        assert "no server is registered" in call_failure(gateway, "t/p/0")


@in_loop
async def test_a_call_that_waits_goes_on_when_a_server_appears() -> None:
    async with ModelGateway(wait_s=30) as gateway, listening(ScriptedEngine(Script(), "m").application()) as port:
        model = await gateway.open("t/p/0", "p")
        waiting = asyncio.create_task(call(model, {"messages": conversation("hello")}))
        await until_async(lambda: call_failure(gateway, "t/p/0"), "the call waits for a server")
        gateway.update_endpoints([endpoint(port)])
        assert (await waiting)[0] == 200
        assert (await gateway.close("t/p/0")).turns[0].wait_s > 0


@pytest.mark.slow
@in_loop
async def test_no_call_is_lost_when_a_server_is_killed(servers: Servers) -> None:
    slow = {"tasks": [{"when": "hello", "answers": [{"text": "late", "delay_s": 0.3}]}]}
    servers.script(slow)
    servers.script(slow)
    async with servers.gateway() as gateway:
        models = [await gateway.open(f"t{n}/default/0", "default") for n in range(30)]

        statuses: list[int] = []

        async def rollout(model: ModelEndpoint) -> None:
            for _ in range(4):
                statuses.append((await call(model, {"messages": conversation("hello")}))[0])

        working = asyncio.gather(*(rollout(m) for m in models))
        while len(statuses) < 30:  # each server has answered some, and is answering
            await asyncio.sleep(0.02)
        left = descendants(servers.processes[0].pid)
        servers.signal(0, signal.SIGKILL)
        await working
        assert statuses == [200] * 120
        used = set()
        for n in range(30):
            recording = await gateway.close(f"t{n}/default/0")
            check_against_reported(recording)
            assert len(recording.turns) == 4
            used |= {t.server for t in recording.turns}
        assert used == {"default.0", "default.1"}
    deadline = time.monotonic() + 15
    while (alive := [pid for pid in left if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not alive, "the killed server's engine lives on"
