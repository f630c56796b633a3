"""The unmodified clients of OpenAI and Anthropic against the gateway: plain, with tools, streamed, failing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording
from megaflow_hpc.types import CallBudget, ModelEndpoint
from tests.support.samples import png
from tests.support.serving import Engines, call_failure, in_loop

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASK = {"tool": "weather", "arguments": {"city": "Köln"}, "text": "I ask.", "reasoning": "I do not know it."}
SCRIPT = {
    "tasks": [
        {"when": "the weather", "answers": [ASK, "It rains."]},
        {"when": "slow", "answers": [{"text": "late", "delay_s": 1.0}]},
    ],
    "default": ["héllo"],
}
WHAT = "How is the weather?"
ID = "t/default/0"


@pytest.fixture
def engines(engines: Engines) -> Engines:
    """One engine for all tests of this file, and one of another policy with a short context."""
    engines.script(SCRIPT)
    engines.script(SCRIPT, "short", 50)
    return engines


@asynccontextmanager
async def rollout(
    engines: Engines, policy: str = "default", budget: CallBudget | None = None, **options: Any
) -> AsyncIterator[tuple[ModelGateway, ModelEndpoint]]:
    async with engines.gateway(**options) as gateway:
        yield gateway, await gateway.open(ID, policy, budget=budget)


def open_ai(model: ModelEndpoint, key: str = "", **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=model.base_url, api_key=key or model.api_key, **options)


def claude(model: ModelEndpoint, key: str = "", **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=model.base_url.removesuffix("/v1"), api_key=key or model.api_key, **options
    )


def check(recording: Recording) -> None:
    """Two calls of one conversation with a tool: one sequence, and the answers as the engine wrote them."""
    assert [turn.sequence for turn in recording.turns] == [0, 0]
    assert [m["role"] for m in recording.messages] == ["user", "assistant", "tool", "assistant"]
    said = recording.messages[1]
    assert (said["content"], said["reasoning"]) == (ASK["text"], ASK["reasoning"])
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert recording.messages[2]["tool_call_id"] == said["tool_calls"][0]["id"]


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_chat_completions_with_tools(engines: Engines, streamed: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": WHAT}]
    async with rollout(engines) as (gateway, model), open_ai(model) as client:

        async def ask() -> Any:
            common = {"model": model.model_name, "messages": messages, "tools": tools}
            if not streamed:
                return (await client.chat.completions.create(**common)).choices[0].message
            async with client.chat.completions.stream(**common) as stream:
                return (await stream.get_final_completion()).choices[0].message

        answer = await ask()
        (call,) = answer.tool_calls
        assert (answer.content, call.function.arguments) == ("I ask.", '{"city": "Köln"}')
        assert [m.id async for m in client.models.list()] == [model.model_name]
        messages.append({"role": "assistant", "content": answer.content, "tool_calls": [call.model_dump(mode="json")]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
        assert (await ask()).content == "It rains."
        check(await gateway.close(ID))


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_responses_with_tools(engines: Engines, streamed: bool) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": WHAT}]
    async with rollout(engines) as (gateway, model), open_ai(model) as client:

        async def ask() -> Any:
            common = {"model": model.model_name, "input": items, "tools": tools}
            if not streamed:
                return await client.responses.create(**common)
            async with client.responses.stream(**common) as stream:
                return await stream.get_final_response()

        answer = await ask()
        reasoning, message, call = answer.output
        assert reasoning.content[0].text == ASK["reasoning"]
        assert (answer.output_text, message.status, call.arguments) == ("I ask.", "completed", '{"city": "Köln"}')
        assert answer.usage.output_tokens > 20
        items += [item.model_dump(mode="json", exclude_none=True) for item in answer.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
        assert (await ask()).output_text == "It rains."
        check(await gateway.close(ID))


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_messages_with_tools(engines: Engines, streamed: bool) -> None:
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": WHAT}]
    async with rollout(engines) as (gateway, model), claude(model) as client:

        async def ask() -> Any:
            common = {"model": model.model_name, "messages": messages, "tools": tools, "max_tokens": 500}
            if not streamed:
                return await client.messages.create(**common)
            async with client.messages.stream(**common) as stream:
                return await stream.get_final_message()

        answer = await ask()
        thought, text, call = answer.content
        assert (thought.thinking, text.text, call.input) == (ASK["reasoning"], "I ask.", {"city": "Köln"})
        assert (answer.stop_reason, answer.model) == ("tool_use", model.model_name)
        assert answer.usage.output_tokens > 20
        messages.append({"role": "assistant", "content": answer.content})
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
        )
        counted = await client.messages.count_tokens(model=model.model_name, messages=messages, tools=tools)
        last = await ask()
        assert (last.content[0].text, last.stop_reason) == ("It rains.", "end_turn")
        assert counted.input_tokens == last.usage.input_tokens
        assert [m.id async for m in client.models.list()] == [model.model_name]
        check(await gateway.close(ID))


@in_loop
async def test_images_limits_and_systems_reach_the_engine(engines: Engines) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1, 1)).decode()}
    async with rollout(engines) as (gateway, model), claude(model) as client:
        content: Any = [{"type": "text", "text": "See:"}, {"type": "image", "source": image}]
        answer = await client.messages.create(
            model="x", system="Short.", messages=[{"role": "user", "content": content}], max_tokens=3
        )
        assert (answer.stop_reason, answer.content[0].text) == ("max_tokens", "hé")  # three bytes are three tokens
        system, user, _ = (await gateway.close(ID)).messages
        assert system["content"] == "Short."
        assert user["content"][1]["image_url"]["url"] == f"sha256:{hashlib.sha256(png(1, 1)).hexdigest()}"


@in_loop
async def test_each_client_raises_its_own_errors(engines: Engines) -> None:
    user: Any = [{"role": "user", "content": "a"}]
    async with (
        rollout(engines, budget=CallBudget(calls=1)) as (gateway, model),
        open_ai(model) as ai,
        claude(model) as an,
    ):
        async with open_ai(model, "wrong") as wrong:
            with pytest.raises(openai.AuthenticationError, match="wrong key"):
                await wrong.responses.create(model="m", input="a")
        async with claude(model, "wrong") as wrong_too:
            with pytest.raises(anthropic.AuthenticationError, match="wrong key"):
                await wrong_too.messages.create(model="m", messages=user, max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            await ai.responses.create(model="m", input="a", previous_response_id="resp_1")
        with pytest.raises(anthropic.BadRequestError, match="max_tokens: expected `int` >= 1") as bad:
            await an.messages.create(model="m", messages=user, max_tokens=0)
        assert bad.value.body["error"]["type"] == "invalid_request_error"
        assert not call_failure(gateway, ID)
        await an.messages.create(model="m", messages=user, max_tokens=9)
        with pytest.raises(anthropic.RateLimitError, match="rollout_budget_exceeded"):
            await an.messages.create(model="m", messages=user, max_tokens=9)
        with pytest.raises(openai.RateLimitError, match="has made its 1 model calls"):
            await ai.responses.create(model="m", input="a")
        assert len((await gateway.close(ID)).turns) == 1


@in_loop
async def test_no_server_is_each_apis_own_failure_and_not_tried_again() -> None:
    async with ModelGateway(wait_s=0.2) as gateway:
        model = await gateway.open(ID, "default")
        async with open_ai(model, max_retries=9) as ai, claude(model, max_retries=9) as an:
            with pytest.raises(openai.InternalServerError, match="no server is registered"):
                await ai.responses.create(model="m", input="a")
            with pytest.raises(anthropic.APIStatusError, match="no server is registered") as failed:
                await an.messages.create(model="m", messages=[{"role": "user", "content": "a"}], max_tokens=1)
            assert (failed.value.status_code, failed.value.body["error"]["type"]) == (503, "overloaded_error")


@in_loop
async def test_an_engines_refusal_has_the_shape_of_the_agents_api(engines: Engines) -> None:
    async with rollout(engines, "short") as (_, model), open_ai(model) as ai, claude(model) as an:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 50"):
            await ai.responses.create(model="m", input="a" * 90)
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 50"):
            await an.messages.create(model="m", messages=[{"role": "user", "content": "a" * 90}], max_tokens=1)


@in_loop
async def test_a_client_that_leaves_in_the_middle_is_not_recorded(engines: Engines) -> None:
    slow: Any = [{"role": "user", "content": "slow"}]
    async with rollout(engines) as (gateway, model), open_ai(model) as ai, claude(model) as an:
        for work in (
            ai.responses.create(model="m", input="slow", stream=True),
            an.messages.create(model="m", messages=slow, max_tokens=9, stream=True),
        ):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work, 0.4)
        await asyncio.sleep(1.0)
        assert not (await gateway.close(ID)).turns


@pytest.mark.slow
@in_loop
async def test_a_long_wait_is_told_in_the_stream_and_fails_in_it(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaflow_hpc.model.gateway.http_messages.PING_INTERVAL_S", 0.1)
    slow: Any = [{"role": "user", "content": "slow"}]
    async with rollout(engines, wait_s=1.0) as (gateway, model):
        async with open_ai(model, max_retries=0) as ai, claude(model, max_retries=0) as an:
            async with an.messages.stream(model="m", messages=slow, max_tokens=9) as stream:
                assert await stream.get_final_text() == "late"
            async with ai.responses.stream(model="m", input="slow") as answer:
                assert (await answer.get_final_response()).output_text == "late"
            gateway.update_endpoints([])
            with pytest.raises(anthropic.APIStatusError, match="no server is registered"):
                async with an.messages.stream(model="m", messages=slow, max_tokens=9) as stream:
                    await stream.get_final_text()
            with pytest.raises(openai.APIError, match="no server is registered"):
                async for _ in await ai.chat.completions.create(model="m", messages=slow, stream=True):
                    pass
            failed = [e async for e in await ai.responses.create(model="m", input="slow", stream=True)][-1]
            assert failed.type == "response.failed"
            assert "no server is registered" in failed.response.error.message
