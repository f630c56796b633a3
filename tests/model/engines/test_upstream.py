"""Endpoints with the APIs of Anthropic, Gemini and OpenAI, for agents of every dialect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines import upstream
from megaflow_hpc.model.engines.adapters import launch
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.types import ModelEndpoint
from tests.support.serving import Proxies, Servers, answer_to, call, in_loop, listening
from tests.support.waiting import until_async

KEY = "sk-commercial-0123456789"
TOOL = {"name": "bash", "description": "Runs a command.", "parameters": {"type": "object", "properties": {}}}
BASES = {"anthropic": "", "gemini": "", "openai": ""}


class Refused(Exception):
    """A request that the real endpoint would refuse."""


def expect(condition: object, why: str) -> None:
    if not condition:
        raise Refused(why)


def anthropic(body: dict[str, Any]) -> dict[str, Any]:
    """Answers like Anthropic's messages API, with its rules: thinking blocks come back, results follow their calls."""
    expect(isinstance(body.get("max_tokens"), int), "max_tokens: Field required")
    known = {"model", "messages", "max_tokens", "system", "tools", "tool_choice", "temperature", "top_p", "top_k"}
    known |= {"stop_sequences", "thinking", "output_config"}
    expect(body.keys() <= known, f"{body.keys() - known}: Extra inputs are not permitted")
    used: set[str] = set()
    for before, turn in zip([{"role": "assistant"}, *body["messages"]], body["messages"], strict=False):
        expect(turn["role"] in ("user", "assistant") and turn["role"] != before["role"], "roles must alternate")
        blocks = turn["content"]
        expect(all(block.get("text", " ") for block in blocks), "text content blocks must be non-empty")
        results = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        expect(results == used, "tool_use ids were found without tool_result blocks immediately after")
        used = {block["id"] for block in blocks if block["type"] == "tool_use"}
        expect(all(re.fullmatch("[a-zA-Z0-9_-]+", name) for name in used), "tool_use.id: should match pattern")
        signed = [block.get("signature") for block in blocks if block["type"] == "thinking"]
        expect(not used or signed == ["signed"], "a final assistant message must start with a thinking block")
    usage = {"input_tokens": 10, "cache_read_input_tokens": 90, "output_tokens": 20}
    reply = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "usage": usage}
    if body["messages"][-1]["content"][0]["type"] == "tool_result":
        return {**reply, "content": [{"type": "text", "text": "done"}], "stop_reason": "end_turn"}
    thought = {"type": "thinking", "thinking": "a command", "signature": "signed"}
    calls = [
        {"type": "tool_use", "id": f"toolu_{n}", "name": "bash", "input": {"command": f"echo {n}"}} for n in (1, 2)
    ]
    return {**reply, "content": [thought, *calls], "stop_reason": "tool_use"}


def gemini(body: dict[str, Any]) -> dict[str, Any]:
    """Answers like Gemini's generateContent, with its rules: the first call of a turn has its signature."""
    known = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig"}
    expect(body.keys() <= known, f'Unknown name "{body.keys() - known}": Cannot find field.')
    for turn in body["contents"]:
        expect(turn["role"] in ("user", "model") and turn["parts"], "Please use a valid role: user, model.")
        calls = [part for part in turn["parts"] if "functionCall" in part]
        signed = [part.get("thoughtSignature") for part in calls]
        expect(signed in ([], ["signed", None]), "Function call is missing a thought_signature in functionCall parts.")
    usage = {"promptTokenCount": 100, "candidatesTokenCount": 15, "thoughtsTokenCount": 5, "totalTokenCount": 120}
    last = body["contents"][-1]["parts"]
    if "functionResponse" in last[0]:
        expect([part["functionResponse"]["name"] for part in last] == ["bash", "bash"], "function response parts")
        parts: list[dict[str, Any]] = [{"text": "done"}]
    else:
        parts = [{"text": "a command", "thought": True}]
        parts += [{"functionCall": {"name": "bash", "args": {"command": f"echo {n}"}}} for n in (1, 2)]
        parts[1]["thoughtSignature"] = "signed"
    candidate = {"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m-1", "responseId": "r1"}


def openai(body: dict[str, Any]) -> dict[str, Any]:
    """Answers like OpenAI's chat completions of a newer model."""
    expect("max_tokens" not in body, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    known = {"model", "messages", "max_completion_tokens", "tools", "tool_choice", "temperature", "reasoning_effort"}
    expect(body.keys() <= known, f"Unknown parameter: {body.keys() - known}")
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    message: dict[str, Any] = {"role": "assistant", "content": "done", "refusal": None}
    if body["messages"][-1]["role"] != "tool":
        functions = [{"name": "bash", "arguments": f'{{"command":"echo {n}"}}'} for n in (1, 2)]
        calls = [{"id": f"call_{n}", "type": "function", "function": one} for n, one in enumerate(functions, 1)]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


@dataclass
class Commercial:
    """An endpoint that answers as the three companies do, below a path of each."""

    heard: list[tuple[str, dict[str, Any], float]] = field(default_factory=list)
    """Path, body and time of each completion request."""
    held: asyncio.Event | None = None
    """Answers wait until it is set."""
    refusals: list[web.Response] = field(default_factory=list)
    """Answers to the next requests."""

    async def answer(self, request: web.Request) -> web.Response:
        api, _, path = request.path.strip("/").partition("/")
        key = request.headers.get({"anthropic": "x-api-key", "gemini": "x-goog-api-key"}.get(api, "Authorization"), "")
        if key.removeprefix("Bearer ") != KEY:
            return web.json_response({"error": {"message": f"Incorrect API key provided: {key}"}}, status=401)
        expect(api != "anthropic" or request.headers.get("anthropic-version"), "anthropic-version: header is required")
        if request.method == "GET":
            model = {"models": [{"name": "models/m"}]} if api == "gemini" else {"data": [{"id": "m"}]}
            return web.json_response(model)
        paths = {"anthropic": "messages", "gemini": "models/m:generateContent", "openai": "chat/completions"}
        assert path == paths[api]
        body = await request.json()
        self.heard.append((api, body, time.monotonic()))
        if self.held:
            await self.held.wait()
        if self.refusals:
            return self.refusals.pop(0)
        try:
            reply = web.json_response({"anthropic": anthropic, "gemini": gemini, "openai": openai}[api](body))
            reply.enable_compression()  # if the client accepts it, as real endpoints do
            return reply
        except Refused as error:
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)


@contextlib.asynccontextmanager
async def commercial() -> AsyncIterator[tuple[Commercial, str]]:
    endpoint, application = Commercial(), web.Application()
    application.router.add_route("*", "/{path:.*}", endpoint.answer)
    async with listening(application) as port:
        yield endpoint, f"http://127.0.0.1:{port}"


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., None]:
    """Adds an endpoint's server."""

    def start(servers: Proxies | Servers, url: str, api: str, key: str = KEY, **more: Any) -> None:
        file = tmp_path / f"{api} {key}"
        file.write_text(key)
        file.chmod(0o600)
        model = {"engine": api, "base_url": f"{url}/{api}", "path": "m", "api_key_file": str(file)}
        servers.start({**model, **more}, api)

    return start


async def chat_agent(model: ModelEndpoint) -> str:
    """Solves a task in two turns over ``/chat/completions``, and sends back only what it knows of an answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "solve"}, {"role": "user", "content": "task"}]
    body = {"model": "m", "max_tokens": 50, "tools": [{"type": "function", "function": TOOL}]}
    reply = await answer_to(model, {**body, "messages": messages}, "/chat/completions")
    said = reply["choices"][0]["message"]
    calls = [{name: call[name] for name in ("id", "type", "function")} for call in said["tool_calls"]]
    messages.append({"role": "assistant", "content": said["content"], "tool_calls": calls})
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
    reply = await answer_to(model, {**body, "messages": messages}, "/chat/completions")
    return str(reply["choices"][0]["message"]["content"])


async def messages_agent(model: ModelEndpoint) -> str:
    """The same over ``/messages``."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "task"}]
    tool = {"name": "bash", "description": "Runs a command.", "input_schema": TOOL["parameters"]}
    body = {"model": "m", "max_tokens": 50, "system": "solve", "tools": [tool]}
    reply = await answer_to(model, {**body, "messages": messages}, "/messages")
    blocks = [block for block in reply["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "ok"} for block in blocks]
    messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    reply = await answer_to(model, {**body, "messages": messages}, "/messages")
    return "".join(block.get("text", "") for block in reply["content"])


async def responses_agent(model: ModelEndpoint) -> str:
    """The same over ``/responses``."""
    given: list[dict[str, Any]] = [{"role": "user", "content": "task"}]
    body = {"model": "m", "max_output_tokens": 50, "instructions": "solve", "tools": [{"type": "function", **TOOL}]}
    reply = await answer_to(model, {**body, "input": given}, "/responses")
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    given += calls
    given += [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
    reply = await answer_to(model, {**body, "input": given}, "/responses")
    return str(reply["output"][-1]["content"][0]["text"])


async def gemini_agent(model: ModelEndpoint) -> str:
    """The same over Gemini's generateContent, without ids of calls."""
    contents: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "task"}]}]
    body = {"tools": [{"functionDeclarations": [TOOL]}], "generationConfig": {"maxOutputTokens": 50}}
    reply = await answer_to(model, {**body, "contents": contents}, "/models/m:generateContent")
    calls = [part["functionCall"] for part in reply["candidates"][0]["content"]["parts"] if "functionCall" in part]
    names = [call["name"] for call in calls]
    asked = [{"functionCall": {"name": call["name"], "args": call["args"]}} for call in calls]
    results = [{"functionResponse": {"name": name, "response": {"output": "ok"}}} for name in names]
    contents += [{"role": "model", "parts": asked}, {"role": "user", "parts": results}]
    reply = await answer_to(model, {**body, "contents": contents}, "/models/m:generateContent")
    return str(reply["candidates"][0]["content"]["parts"][-1]["text"])


@in_loop
async def test_every_dialect_reaches_every_api_with_signatures_usage_and_price(proxies: Proxies, start: Any) -> None:
    async with commercial() as (endpoint, url):
        for api in BASES:
            start(proxies, url, api)
        prices = {api: (1e-6, 5e-6) for api in BASES}
        async with proxies.gateway(wait_s=60, policies=[*BASES], prices=prices) as gateway:
            for api in BASES:
                for agent in (chat_agent, messages_agent, responses_agent, gemini_agent):
                    before = gateway.usd
                    model = await gateway.open("t/p/0", api)
                    assert KEY not in repr(model)
                    assert await agent(model) == "done", (api, agent.__name__)
                    recording = await gateway.close("t/p/0")
                    assert [call["tokens"] for call in recording.calls] == [[100, 20], [100, 20]], api
                    assert gateway.usd - before == pytest.approx(2 * (100e-6 + 20 * 5e-6))
        assert [api for api, *_ in endpoint.heard] == [api for api in BASES for _ in range(8)]


@in_loop
async def test_overload_is_waited_for_as_the_endpoint_asks(proxies: Proxies, start: Any) -> None:
    async with commercial() as (endpoint, url):
        start(proxies, url, "anthropic")
        start(proxies, url, "gemini")
        async with proxies.gateway(wait_s=60, policies=[*BASES]) as gateway:
            overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
            delay = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "0.5s"}
            exhausted = {"error": {"code": 429, "message": "quota", "status": "RESOURCE_EXHAUSTED", "details": [delay]}}
            refused = {
                "anthropic": web.json_response(overloaded, status=529, headers={"Retry-After": "1"}),
                "gemini": web.json_response(exhausted, status=429),
            }
            for api, refusal in refused.items():
                endpoint.heard, endpoint.refusals = [], [refusal]
                model = await gateway.open("t/p/0", api)
                assert await chat_agent(model) == "done"
                first, second = endpoint.heard[:2]
                assert second[2] - first[2] >= 1.0
                await gateway.close("t/p/0")


@in_loop
async def test_strange_counts_of_tokens_never_lower_the_price(proxies: Proxies, start: Any) -> None:
    usages: dict[str, list[int]] = {
        '{"prompt_tokens": 100, "completion_tokens": 20}': [100, 20],
        '{"prompt_tokens": -100, "completion_tokens": 20, "total_tokens": -80}': [0, 20],
        '{"prompt_tokens": 100, "completion_tokens": -20, "total_tokens": 80}': [100, 0],
        '{"prompt_tokens": null, "completion_tokens": 20, "total_tokens": 120}': [100, 20],
        '{"prompt_tokens": NaN, "completion_tokens": 20}': [0, 20],
        '{"prompt_tokens": 1e400, "completion_tokens": "20"}': [0, 0],
    }
    async with commercial() as (endpoint, url):
        start(proxies, url, "openai")
        async with proxies.gateway(wait_s=60, policies=["openai"], prices={"openai": (1e-6, 5e-6)}) as gateway:
            for usage, counted in usages.items():
                text = json.dumps({**openai({"messages": [{"role": "tool"}]}), "usage": None})
                reply = text.replace('"usage": null', f'"usage": {usage}')
                endpoint.refusals, before = [web.Response(text=reply, content_type="application/json")], gateway.usd
                model = await gateway.open("t/p/0", "openai")
                body = {"messages": [{"role": "user", "content": "task"}]}
                assert (await call(model, body, "/chat/completions"))[0] == 200, usage
                assert (await gateway.close("t/p/0")).calls[0]["tokens"] == counted, usage
                assert gateway.usd - before == pytest.approx(counted[0] * 1e-6 + counted[1] * 5e-6), usage


def equal(gateway: ModelGateway, price: float) -> bool:
    return gateway.usd == pytest.approx(price)


@in_loop
async def test_an_agent_that_hangs_up_is_charged_for_the_answer(proxies: Proxies, start: Any) -> None:
    async with commercial() as (endpoint, url):
        start(proxies, url, "openai")
        async with proxies.gateway(wait_s=60, policies=["openai"], prices={"openai": (1e-6, 5e-6)}) as gateway:
            for number, stream in enumerate((False, True)):
                endpoint.held, endpoint.heard = asyncio.Event(), []
                model = await gateway.open(f"t/p/{number}", "openai")
                body = {"messages": [{"role": "user", "content": "task"}], "stream": stream}
                agent = asyncio.create_task(call(model, body, "/chat/completions"))
                await until_async(lambda: endpoint.heard, "the call is at the endpoint")
                agent.cancel()
                await asyncio.wait({agent})
                await asyncio.sleep(0.2)  # the gateway notices that the agent has hung up
                assert not gateway.suspend(f"t/p/{number}", now=False), "an agent waits"
                endpoint.held.set()
                price = (number + 1) * (100e-6 + 20 * 5e-6)
                await until_async(partial(equal, gateway, price), "the call is paid for")
                assert (await gateway.close(f"t/p/{number}")).calls == []


@in_loop
async def test_no_agent_learns_the_key_from_an_error(proxies: Proxies, servers: Servers, start: Any) -> None:
    async with commercial() as (endpoint, url):
        start(proxies, url, "anthropic")
        async with proxies.gateway(wait_s=1, policies=[*BASES]) as gateway:
            for status in (400, 401, 402, 403, 500, 529):
                text = {"error": {"type": "error", "message": f"the key {KEY} of {status}"}}
                endpoint.refusals = [web.json_response(text, status=status) for _ in range(9)]
                model = await gateway.open("t/p/0", "anthropic")
                body = {"messages": [{"role": "user", "content": "task"}], "max_tokens": 5}
                answered, reply = await call(model, body, "/chat/completions")
                assert answered in (400, 503), reply
                assert KEY not in json.dumps(reply)
                assert KEY not in await gateway.outage("t/p/0")
                await gateway.close("t/p/0")
        start(servers, url, "gemini", key="wrong-key-123")
        assert await asyncio.to_thread(servers.processes[-1].wait, 60) == 2
        failed = json.loads((servers.run.endpoints / "gemini.0.failed.json").read_text())
        assert "refuses the key of model.api_key_file" in failed["cause"]
        assert "wrong-key-123" not in failed["cause"]


@in_loop
async def test_what_an_api_cannot_express_is_refused_with_a_remedy(proxies: Proxies, start: Any) -> None:
    async with commercial() as (_, url):
        start(proxies, url, "gemini", args={"request": {"generationConfig": {}}})
        async with proxies.gateway(wait_s=20) as gateway:
            model = await gateway.open("t/p/0", "gemini")
            user = [{"role": "user", "content": "task"}]
            for path, body in {
                "/chat/completions": {"messages": user, "n": 2},
                "/completions": {"prompt": "task"},
            }.items():
                status, reply = await call(model, body, path)
                assert status == 400, reply
                assert "Gemini's API" in reply["error"]["message"]


def test_strange_requests_and_replies_are_errors_not_crashes(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    for api in ("anthropic", "gemini"):
        model = {"engine": api, "base_url": "http://h", "path": "m", "api_key_file": str(key)}
        engine = launch(model, "p", tmp_path)
        assert upstream.url_of(engine, "/v1/chat/completions").startswith("http://h/v1")
        for reply in (
            [],
            {},
            {"content": None},
            {"content": [{"type": "text"}], "usage": {}},
            {"candidates": [3]},
            "x",
        ):
            try:
                answer = upstream.answer_of(engine, "/v1/chat/completions", reply)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
            assert answer["choices"][0]["finish_reason"] == "content_filter"  # Gemini's reply to a refused prompt
        with pytest.raises(ConfigError, match=r"model\.args\.request: 'x'"):
            launch({**model, "args": {"request": "x"}}, "p", tmp_path)
    call = {"id": "1", "function": {"name": "f", "arguments": "{not json"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/PNG;base64,AAAA"}}
    user = {"role": "user", "content": [picture, {"type": "text", "text": ""}]}
    body = {"model": "m", "messages": [user, {"role": "assistant", "tool_calls": [call]}]}
    parts = upstream.UPSTREAMS["gemini"].request(body)["contents"]
    assert parts[0]["parts"] == [{"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]
    assert parts[1]["parts"][0]["functionCall"]["args"] == {"input": "{not json"}
    blocks = upstream.UPSTREAMS["anthropic"].request(body)["messages"]
    assert blocks[0]["content"][0]["source"] == {"type": "base64", "media_type": "image/png", "data": "AAAA"}
