"""A rollout's budget also limits calls in progress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine, body_of, error
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.types import CallBudget
from tests.support.serving import call, conversation, gateway_before, in_loop
from tests.support.split_engine import SplitEngine

BODY: dict[str, Any] = {"messages": conversation("hello")}


def engine(tokens: int, delay_s: float = 0.05, kind: type[ScriptedEngine] = ScriptedEngine, **options: Any) -> Any:
    """An engine whose answers have this number of tokens, unless the request asks for fewer."""
    return kind(Script(default=(ScriptedAnswer("x" * (tokens - 1), delay_s=delay_s),)), "m", **options)


class Several(ScriptedEngine):
    """Gives ``n`` answers, each as long as the request allows."""

    async def _chat(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        size, count = body.get("max_tokens", 1000), body.get("n", 1)
        if size > 5000:
            return error(400, "maximum context length")
        content = [{"token": "token_id:65", "logprob": -1.0, "top_logprobs": []}] * size
        message = {"role": "assistant", "content": "A" * size}
        choice = {"finish_reason": "length", "message": message, "logprobs": {"content": content}}
        return web.json_response(
            {
                "id": "c",
                "object": "chat.completion",
                "model": "m",
                "prompt_token_ids": [1, 2],
                "choices": [{"index": n, **choice, "token_ids": [65] * size} for n in range(count)],
                "usage": {"prompt_tokens": 2, "completion_tokens": size * count, "total_tokens": size * count + 2},
            }
        )


async def spent(
    gateway: ModelGateway, budget: CallBudget, count: int, body: dict[str, Any]
) -> tuple[list[int], int, int]:
    """Makes concurrent calls. Returns their statuses, the number of sampled tokens, and that of turns."""
    model = await gateway.open("t/default/0", "default", budget=budget)
    answers = await asyncio.gather(*(call(model, {**BODY, **body}) for _ in range(count)))
    rollout = gateway._by_id["t/default/0"]
    assert (rollout.reserved_calls, rollout.reserved_tokens) == (0, 0), "all that was reserved is given back"
    sampled, turns = rollout.recorder.sampled, len((await gateway.close("t/default/0")).turns)
    return sorted(status for status, _ in answers), sampled, turns


@pytest.mark.parametrize("body", [{"max_tokens": 1000}, {"max_completion_tokens": 1000}, {}, {"max_tokens": 100}])
@pytest.mark.parametrize("protocol", ["plain", "split", "text"])
@in_loop
async def test_concurrent_calls_sample_no_more_than_the_budget(protocol: str, body: dict[str, Any]) -> None:
    async with gateway_before(engine(1000, kind=SplitEngine), protocol) as gateway:
        statuses, sampled, turns = await spent(gateway, CallBudget(tokens=1000), 60, body)
    each = body.get("max_tokens", 1000)
    assert sampled == 1000
    assert turns == 1000 // each
    assert statuses == [200] * turns + [429] * (60 - turns)


@in_loop
async def test_what_a_call_did_not_use_is_given_back_to_those_that_wait() -> None:
    async with gateway_before(engine(10)) as gateway:
        statuses, sampled, turns = await spent(gateway, CallBudget(tokens=100), 20, {"max_tokens": 80})
    assert statuses == [200] * 10 + [429] * 10
    assert (sampled, turns) == (100, 10)


@in_loop
async def test_the_last_call_is_cut_to_what_is_left() -> None:
    async with gateway_before(engine(60)) as gateway:
        model = await gateway.open("t/default/0", "default", budget=CallBudget(tokens=100))
        reasons = [(await call(model, BODY))[1]["choices"][0]["finish_reason"] for _ in range(2)]
        assert (await call(model, BODY))[0] == 429
        assert gateway._by_id["t/default/0"].recorder.sampled == 100
    assert reasons == ["stop", "length"]


@in_loop
async def test_a_budget_beyond_the_engines_context_is_no_mistake_of_the_call() -> None:
    async with gateway_before(engine(60, max_model_len=500)) as gateway:
        statuses, sampled, _ = await spent(gateway, CallBudget(tokens=10_000), 3, {})
    assert (statuses, sampled) == ([200] * 3, 180)


@pytest.mark.parametrize(
    ("budget", "body", "statuses", "sampled", "turns"),
    [
        (CallBudget(calls=1), {"n": 16, "max_tokens": 10}, [429], 0, 0),
        (CallBudget(calls=16), {"n": 16, "max_tokens": 10}, [200], 160, 16),
        (CallBudget(calls=20), {"n": 16, "max_tokens": 10}, [200, 429], 160, 16),
        (CallBudget(tokens=100), {"n": 16, "max_tokens": 1000}, [200, 429], 96, 16),
        (CallBudget(tokens=10), {"n": 16, "max_tokens": 1000}, [429], 0, 0),
        (CallBudget(tokens=1000), {"n": 4}, [200, 429], 1000, 4),
    ],
)
@in_loop
async def test_each_answer_of_a_call_counts(
    budget: CallBudget, body: dict[str, Any], statuses: list[int], sampled: int, turns: int
) -> None:
    async with gateway_before(engine(0, kind=Several)) as gateway:
        assert await spent(gateway, budget, len(statuses), body) == (statuses, sampled, turns)


@in_loop
async def test_prompts_times_answers_count() -> None:
    async with gateway_before(engine(10)) as gateway:
        model = await gateway.open("t/default/0", "default", budget=CallBudget(calls=5))
        status, reply = await call(model, {"prompt": ["a", "b", "c"], "n": 2}, "/completions")
        assert status == 429
        assert "5 are left, and this call asks for 6 answers" in reply["error"]["message"]


@in_loop
async def test_a_call_that_fails_gives_back_what_it_reserved() -> None:
    async with gateway_before(ScriptedEngine(Script(default=(ScriptedAnswer("no", status=400),)), "m")) as gateway:
        statuses, sampled, _ = await spent(gateway, CallBudget(calls=1, tokens=10), 3, {})
        assert (set(statuses), sampled) <= ({400, 429}, 0)
        model = await gateway.open("t/default/1", "default", budget=CallBudget(calls=1, tokens=10))
        assert [(await call(model, BODY))[0] for _ in range(3)] == [400] * 3
