"""The computer tools of Anthropic and OpenAI, by their unmodified clients: at an ordinary engine, and at their own."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from megaflow_hpc.model.computer_tools import anthropic_function, anthropic_tool, openai_function, openai_tool
from megaflow_hpc.model.engines.upstream import Anthropic, OpenAi
from megaflow_hpc.model.gateway.dialects import BadRequest, messages, responses
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording
from megaflow_hpc.types import ModelEndpoint
from tests.support.screen_program import picture
from tests.support.serving import Engines, Proxies, in_loop, listening

ID = "t/default/0"
PICTURE = picture({"clicked": False, "text": ""})
CLICK = {"action": "left_click", "coordinate": [140, 80]}
OPENAI_CLICK = {"type": "click", "button": "left", "x": 140, "y": 80}
SIZE = {"display_width_px": 320, "display_height_px": 200}
CLASSIC = {"type": "computer_20250124", "name": "computer", **SIZE}
TOOLSET = {"type": "computer_toolset_20260801", "configs": {"zoom": {"enabled": False}}}
PREVIEW = {"type": "computer_use_preview", "display_width": 320, "display_height": 200, "environment": "linux"}


def data(image: bytes = PICTURE) -> str:
    return base64.b64encode(image).decode()


def script(arguments: Mapping[str, Any]) -> dict[str, Any]:
    call = {"tool": "computer", "arguments": dict(arguments), "text": "I click."}
    return {"tasks": [{"when": "Press Go", "answers": [call, "It is pressed."]}]}


@asynccontextmanager
async def rollout(engines: Engines | Proxies, policy: str = "default") -> AsyncIterator[tuple[ModelGateway, Any]]:
    async with engines.gateway() as gateway:
        yield gateway, await gateway.open(ID, policy, seed=7)


def claude(model: ModelEndpoint) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=model.base_url.removesuffix("/v1"), api_key=model.api_key)


def open_ai(model: ModelEndpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)


def check(recording: Recording, arguments: Mapping[str, Any]) -> None:
    """One sequence of two turns: the click as the engine wrote it, and the screenshot that the program sent."""
    assert [turn.sequence for turn in recording.turns] == [0, 0]
    assert [m["role"] for m in recording.messages] == ["user", "assistant", "tool", "user", "assistant"]
    (call,) = recording.messages[1]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("computer", arguments)
    assert recording.messages[3]["content"][0]["type"] == "image_url"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tool", [CLASSIC, TOOLSET], ids=["classic", "toolset"])
@in_loop
async def test_anthropics_tool_at_an_ordinary_engine(engines: Engines, tool: dict[str, Any], streamed: bool) -> None:
    engines.script(script(CLICK))
    turns: list[Any] = [{"role": "user", "content": "Press Go."}]
    async with rollout(engines) as (gateway, model), claude(model) as client:

        async def ask() -> Any:
            tools: Any = [tool, {"type": "bash_20250124", "name": "bash"}]
            common: Any = {"model": "m", "messages": turns, "tools": tools, "max_tokens": 500}
            common["betas"] = ["computer-use-2025-01-24"]
            if not streamed:
                return await client.beta.messages.create(**common)
            async with client.beta.messages.stream(**common) as stream:
                return await stream.get_final_message()

        answer = await ask()
        text, call = answer.content
        assert (text.text, call.type, answer.stop_reason) == ("I click.", "tool_use", "tool_use")
        if tool is TOOLSET:
            assert (call.name, call.toolset_name, dict(call.input)) == (
                "left_click",
                "computer",
                {"coordinate": [140, 80]},
            )
        else:
            assert (call.name, dict(call.input)) == ("computer", CLICK)
        turns.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}
        )
        source = {"type": "base64", "media_type": "image/png", "data": data()}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "image", "source": source}]}
        turns.append({"role": "user", "content": [result]})
        assert (await ask()).content[0].text == "It is pressed."
        check(await gateway.close(ID), CLICK)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [(PREVIEW, OPENAI_CLICK), ({"type": "computer"}, {"actions": [OPENAI_CLICK, {"type": "screenshot"}]})],
    ids=["preview", "computer"],
)
@in_loop
async def test_openais_tool_at_an_ordinary_engine(
    engines: Engines, tool: dict[str, Any], arguments: dict[str, Any], streamed: bool
) -> None:
    engines.script(script(arguments))
    items: list[Any] = [{"role": "user", "content": "Press Go."}]
    async with rollout(engines) as (gateway, model), open_ai(model) as client:

        async def ask() -> Any:
            common: Any = {"model": "m", "input": items, "tools": [tool], "truncation": "auto"}
            if not streamed:
                return await client.responses.create(**common)
            async with client.responses.stream(**common) as stream:
                return await stream.get_final_response()

        message, call = (await ask()).output
        assert (message.content[0].text, call.type, call.pending_safety_checks) == ("I click.", "computer_call", [])
        action = call.actions[0] if "actions" in arguments else call.action
        assert (action.type, action.button, action.x, action.y) == ("click", "left", 140, 80)
        items += [message.model_dump(), call.model_dump()]
        screenshot = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{data()}"}
        items.append({"type": "computer_call_output", "call_id": call.call_id, "output": screenshot})
        assert (await ask()).output_text == "It is pressed."
        check(await gateway.close(ID), arguments)


NO_ACTIONS: list[dict[str, Any]] = [
    {"type": "click", "x": 1},
    {"type": ["click"]},
    {"type": {"click": 1}},
    {"type": "click", "button": "left", "x": "140", "y": [80]},
    {"type": "click", "button": "left", "x": True, "y": 80},
    {"type": "click", "button": "left", "x": 1e300, "y": 80},
    {"type": "drag", "path": "abc"},
    {"type": "drag", "path": [{"x": 1}]},
    {"type": "keypress", "keys": "ctrl"},
    {"type": "screenshot", "text": 1},
    {"actions": [OPENAI_CLICK, {"type": ["click"]}]},
    {"actions": [[]]},
]


@pytest.mark.parametrize("arguments", NO_ACTIONS, ids=str)
@in_loop
async def test_an_action_that_openais_client_could_not_carry_out_is_a_function_call(
    engines: Engines, arguments: dict[str, Any]
) -> None:
    engines.script(script(arguments))
    async with rollout(engines) as (_, model), open_ai(model) as client:
        tools: Any = [PREVIEW]
        answer = await client.responses.create(model="m", input="Press Go.", tools=tools)
        call: Any = answer.output[1]
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "computer", arguments)


@pytest.mark.parametrize("action", ["bash", "zoom", "computer", "", ["left_click"]], ids=str)
@in_loop
async def test_only_an_enabled_action_names_a_call_of_the_toolset(engines: Engines, action: Any) -> None:
    """A program that goes by the name would run another tool."""
    arguments = {"action": action, "command": "true"}
    engines.script(script(arguments))
    turns: list[Any] = [{"role": "user", "content": "Press Go."}]
    async with rollout(engines) as (gateway, model), claude(model) as client:
        tools: Any = [TOOLSET, {"type": "bash_20250124", "name": "bash"}]
        answer: Any = await client.beta.messages.create(model="m", messages=turns, tools=tools, max_tokens=500)
        call = answer.content[1]
        assert (call.name, call.toolset_name, dict(call.input)) == ("computer", "computer", arguments)
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "no such action"}
        turns += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        await client.beta.messages.create(model="m", messages=turns, tools=tools, max_tokens=500)
        recording = await gateway.close(ID)
    assert [turn.sequence for turn in recording.turns] == [0, 0], "the program returned what the model wrote"


CONFIGS = {"wait": {"enabled": False}, "zoom": {"enabled": False}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "computer_20241022", "name": "computer", **SIZE},
        CLASSIC,
        {"type": "computer_20251124", "name": "computer", **SIZE, "enable_zoom": True},
        {"type": "computer_toolset_20260801"},
        {"type": "computer_toolset_20260801", "configs": CONFIGS},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ],
    ids=lambda tool: tool["type"],
)
def test_anthropics_tool_is_made_again_from_its_function(tool: dict[str, Any]) -> None:
    function = anthropic_function(tool)
    assert function is not None
    assert anthropic_tool(function) == tool
    forged = {**function, "parameters": {"type": "object", "properties": {}}}
    assert anthropic_tool(forged) is None, "an agent's own function of a similar description stays a function"


@pytest.mark.parametrize("tool", [PREVIEW, {"type": "computer"}], ids=lambda tool: tool["type"])
def test_openais_tool_is_made_again_from_its_function(tool: dict[str, Any]) -> None:
    function = openai_function(tool)
    assert openai_tool(function) == tool
    assert openai_tool({**function, "name": "other"}) is None


@pytest.mark.parametrize(
    ("dialect", "body", "message"),
    [
        (
            messages,
            {"type": "computer_20250124", "name": "computer"},
            r"tools\[0\].display_width_px: expected a number",
        ),
        (messages, {**CLASSIC, "display_width_px": 10**9}, "display_width_px"),
        (messages, {**CLASSIC, "display_height_px": None}, r"tools\[0\].display_height_px: expected a number"),
        (messages, {**TOOLSET, "configs": {"zoom": 3}}, "configs"),
        (responses, {**PREVIEW, "environment": "dos"}, "environment: expected one of"),
        (responses, {"type": "computer_use_preview"}, "display_width: expected a value"),
    ],
)
def test_wrong_settings_are_named(dialect: Any, body: dict[str, Any], message: str) -> None:
    user = [{"role": "user", "content": "a"}]
    with pytest.raises(BadRequest, match=message):
        dialect.request({"model": "m", "max_tokens": 5, "messages": user, "input": user, "tools": [body]})


@pytest.mark.parametrize(
    "output", [None, {"type": "computer_screenshot", "file_id": "f"}, {"type": "text", "text": ""}]
)
def test_a_screenshot_of_openais_files_is_refused(output: Any) -> None:
    item = {"type": "computer_call_output", "call_id": "c", "output": output}
    with pytest.raises(BadRequest, match=r"input\[0\]\.output"):
        responses.request({"model": "m", "input": [item], "tools": [PREVIEW]})


# --- endpoints of the same vendor -------------------------------------------------------------------------------------


class Vendor:
    """Answers as the vendor's endpoint does to a request with its own tool."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any], str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m"}]})
        body = await request.json()
        self.heard.append((request.path, body, request.headers.get("anthropic-beta", "")))
        reply = self.claude(body) if request.path.endswith("/messages") else self.response(body)
        return web.json_response(reply)

    def claude(self, body: dict[str, Any]) -> dict[str, Any]:
        block: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "computer", "input": CLICK}
        if body["tools"][0]["type"] == TOOLSET["type"]:
            block |= {"name": "left_click", "toolset_name": "computer", "input": {"coordinate": [140, 80]}}
        done = len(body["messages"]) > 1
        usage = {"input_tokens": 10, "output_tokens": 20}
        reply = {"id": "msg", "type": "message", "role": "assistant", "model": "m", "usage": usage}
        content = [{"type": "text", "text": "It is pressed."}] if done else [block]
        return {**reply, "content": content, "stop_reason": "end_turn" if done else "tool_use"}

    def response(self, body: dict[str, Any]) -> dict[str, Any]:
        checks = [{"id": "sc_1", "code": "malicious_instructions", "message": "Look out."}]
        call = {"type": "computer_call", "id": "cu_1", "call_id": "call_1", "action": OPENAI_CLICK}
        call |= {"status": "completed", "pending_safety_checks": checks}
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "signed"}
        part = {"type": "output_text", "text": "It is pressed.", "annotations": []}
        said = {"type": "message", "id": "m_1", "role": "assistant", "status": "completed", "content": [part]}
        output = [said] if len(body["input"]) > 1 else [thought, call]
        usage = {"input_tokens": 10, "output_tokens": 20, "total_tokens": 30}
        return {"id": "r", "object": "response", "status": "completed", "model": "m", "output": output, "usage": usage}


@asynccontextmanager
async def vendor(folder: Path, api: str) -> AsyncIterator[tuple[Vendor, Proxies]]:
    endpoint, application = Vendor(), web.Application()
    application.router.add_route("*", "/{path:.*}", endpoint.answer)
    key = folder / "key"
    key.write_text("sk-vendor")
    key.chmod(0o600)
    async with listening(application) as port:
        proxies, url = Proxies(folder), f"http://127.0.0.1:{port}/v1"
        proxies.start({"engine": api, "base_url": url, "path": "m", "api_key_file": str(key)})
        yield endpoint, proxies


@in_loop
async def test_anthropics_endpoint_gets_its_own_tool(tmp_path: Path) -> None:
    async with vendor(tmp_path, "anthropic") as (endpoint, proxies):
        for tool in (CLASSIC, TOOLSET):
            endpoint.heard.clear()
            await asked_with(tool, endpoint, proxies)


async def asked_with(tool: dict[str, Any], endpoint: Vendor, proxies: Proxies) -> None:
    turns: list[Any] = [{"role": "user", "content": "Press Go."}]
    tools: Any = [tool]
    async with rollout(proxies) as (gateway, model):
        async with claude(model) as client:
            answer = await client.beta.messages.create(model="m", messages=turns, tools=tools, max_tokens=50)
            call: Any = answer.content[-1]
            assert call.name == ("left_click" if tool is TOOLSET else "computer")
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            source = {"type": "base64", "media_type": "image/png", "data": data()}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "image", "source": source}]}
            turns += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
            last: Any = await client.beta.messages.create(model="m", messages=turns, tools=tools, max_tokens=50)
            assert last.content[0].text == "It is pressed."
        await gateway.close(ID)
    (_, first, beta), (_, second, _) = endpoint.heard
    assert first["tools"] == [tool]
    assert beta == ("" if tool is TOOLSET else "computer-use-2025-01-24")
    used, answered = second["messages"][1]["content"][-1], second["messages"][2]["content"]
    assert used == next(block for block in endpoint.claude(first)["content"])
    (result,) = answered
    assert result["content"][0]["source"]["data"] == data(), "the screenshot is the call's result"


def test_screenshots_of_several_calls_are_their_results_at_the_vendors_endpoint() -> None:
    clicked = {"a": data(), "b": data(picture({"clicked": True, "text": ""}))}
    uses: list[Any] = [{"type": "tool_use", "id": name, "name": "computer", "input": CLICK} for name in clicked]
    blocks = []
    for name, shown in clicked.items():
        source = {"type": "base64", "media_type": "image/png", "data": shown}
        blocks.append({"type": "tool_result", "tool_use_id": name, "content": [{"type": "image", "source": source}]})
    turns = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": uses}]
    turns.append({"role": "user", "content": [*blocks, {"type": "text", "text": "On."}]})
    claude_asks = messages.request({"model": "m", "max_tokens": 9, "messages": turns, "tools": [CLASSIC]})
    items: list[Any] = [{"role": "user", "content": "Go."}]
    items += [{"type": "computer_call", "call_id": name, "action": OPENAI_CLICK} for name in clicked]
    for name, shown in clicked.items():
        screenshot = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{shown}"}
        items.append({"type": "computer_call_output", "call_id": name, "output": screenshot})
    openai_asks = responses.request(
        {"model": "m", "input": [*items, {"role": "user", "content": "On."}], "tools": [PREVIEW]}
    )
    for asked in (claude_asks, openai_asks):
        assert [message["role"] for message in asked["messages"]][1:5] == ["assistant", "tool", "tool", "user"]

    *_, answered = Anthropic().request(claude_asks)["messages"]
    assert [block["type"] for block in answered["content"]] == ["tool_result", "tool_result", "text"]
    found = {block["tool_use_id"]: block["content"][0]["source"]["data"] for block in answered["content"][:2]}
    assert found == clicked
    *_, first, second, said = OpenAi().request(openai_asks)["input"]
    urls = {item["call_id"]: item["output"]["image_url"].partition(",")[2] for item in (first, second)}
    assert urls == clicked
    assert said == {"role": "user", "content": [{"type": "input_text", "text": "On."}]}


@in_loop
async def test_openais_endpoint_gets_its_own_tool_and_safety_checks_go_both_ways(tmp_path: Path) -> None:
    items: list[Any] = [{"role": "user", "content": "Press Go."}]
    tools: Any = [PREVIEW]
    async with vendor(tmp_path, "openai") as (endpoint, proxies), rollout(proxies) as (gateway, model):
        async with open_ai(model) as client:
            answer = await client.responses.create(model="m", input=items, tools=tools, truncation="auto")
            call: Any = answer.output[-1]
            assert [check.id for check in call.pending_safety_checks] == ["sc_1"]
            screenshot = {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{data()}"}
            output = {"type": "computer_call_output", "call_id": call.call_id, "output": screenshot}
            output["acknowledged_safety_checks"] = [check.model_dump() for check in call.pending_safety_checks]
            items += [item.model_dump(exclude_none=True) for item in answer.output] + [output]
            last = await client.responses.create(model="m", input=items, tools=tools, truncation="auto")
            assert last.output_text == "It is pressed."
        recording = await gateway.close(ID)
    assert [call["tokens"] for call in recording.calls] == [[10, 20], [10, 20]]
    (path, first, _), (_, second, _) = endpoint.heard
    assert (path, first["tools"], first["truncation"], first["store"]) == ("/v1/responses", [PREVIEW], "auto", False)
    assert second["input"][1:3] == endpoint.response(first)["output"], "its own items come back, signed as they were"
    assert second["input"][3] == output
