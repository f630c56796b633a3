"""The options that an agent may use. All others are refused or omitted, and never reach the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflow_hpc.model.engine_api import WEIGHT_VERSION
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.model.gateway import failover
from megaflow_hpc.model.gateway.dialects import DIALECTS, TABLES, BadRequest, base, options
from megaflow_hpc.model.gateway.dialects.options import CHAT, COMPLETIONS, engine_request
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.types import NEUTRAL, ModelEndpoint
from tests.support.poison import GOOD, POISON, TOOL, image
from tests.support.samples import image as image_file
from tests.support.serving import call_failure, endpoint, listening
from tests.support.split_engine import SplitEngine


class Upstream:
    """A scripted engine behind a real socket that keeps the requests it gets."""

    def __init__(self, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine(Script(default=(ScriptedAnswer("good"),)), "m")
        self.bodies: list[dict[str, Any]] = []
        self.port = 0

    async def answer(self, body: Mapping[str, Any], request: web.Request, handler: Any) -> Any:
        """Returns the engine's own answer. Overridden by engines that answer differently."""
        return await handler(request)

    async def __aenter__(self) -> Upstream:
        app = self.engine.application()

        @web.middleware
        async def keep(request: web.Request, handler: Any) -> Any:
            self.bodies.append(await request.json())
            return await self.answer(self.bodies[-1], request, handler)

        app.middlewares.append(keep)
        self._listening = listening(app)
        self.port = await self._listening.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.__aexit__(None, None, None)

    def record(self, protocol: str = "plain", name: str = "p.0") -> dict[str, Any]:
        return endpoint(self.port, server=name, protocol=protocol)


@asynccontextmanager
async def serving(upstream: Upstream, protocol: str = "plain", **more: Any) -> AsyncIterator[ModelGateway]:
    async with upstream, ModelGateway(**{"wait_s": 60, **more}) as gateway:
        gateway.update_endpoints([upstream.record(protocol)])
        yield gateway


async def call(model: ModelEndpoint, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:
        async with session.post(model.base_url + path, json=body) as response:
            return response.status, json.loads(await response.read())


@pytest.mark.parametrize("protocol", ["plain", "split"])
@pytest.mark.parametrize("path", POISON)
async def test_poison_reaches_no_engine_and_keeps_nobody_waiting(path: str, protocol: str) -> None:
    engine = SplitEngine(Script(default=(ScriptedAnswer("good"),)), "m") if protocol == "split" else None
    async with serving(upstream := Upstream(engine), protocol) as gateway:
        bad, good = await gateway.open("t/p/0", "p"), await gateway.open("u/p/0", "p")
        poison = [{**GOOD[path], **extra} for extra in POISON[path]]
        answers = asyncio.gather(*(call(bad, path, body) for body in poison for _ in range(3)))
        benign = [await call(good, path, GOOD[path]) for _ in range(20)]
        for body, (status, reply) in zip((b for b in poison for _ in range(3)), await answers, strict=True):
            assert status == 400, (body, reply)
            assert reply["error"]["message"], body
        assert {status for status, _ in benign} == {200}, benign
        assert len(upstream.bodies) == 20 * (3 if protocol == "split" and path != "/completions" else 1)
        assert [server.failed_at for server in gateway._caller.router.servers("p")] == [0.0]
        assert not (await gateway.close("t/p/0")).turns
        assert len((await gateway.close("u/p/0")).turns) == 20


@pytest.mark.parametrize(("path", "body"), [(path, body) for path in POISON for body in POISON[path][:3]])
async def test_a_refusal_names_the_option(path: str, body: dict[str, Any]) -> None:
    async with serving(Upstream()) as gateway:
        model = await gateway.open("t/p/0", "p")
        _, reply = await call(model, path, {**GOOD[path], **body})
        assert reply["error"]["message"].startswith(next(iter(body)))


def parts(*given: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(given)}]}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/chat/completions", {"n": 17}, "n: expected `int` <= 16, found 17"),
        ("/chat/completions", {"temperature": "hot"}, "temperature: expected `float`, found `str`"),
        ("/chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected `str | "),
        ("/chat/completions", parts({"type": "text"}), "messages[0].content[0].text: expected a value, found nothing"),
        (
            "/chat/completions",
            parts({"type": "video"}),
            "messages[0].content[0].type: expected one of text, inp",
        ),
        ("/chat/completions", parts({"type": "text", "text": "x", "\ud800": 1}), "messages: the name of a field"),
        (
            "/messages",
            parts({"type": "tool_use"}),
            "messages[0].content[0].type: expected one of text, image",
        ),
        ("/responses", {"tool_choice": "all"}, "tool_choice: expected one of auto, none, required"),
    ],
)
def test_a_refusal_says_which_field_what_was_expected_and_what_was_found(
    path: str, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        engine_request(DIALECTS[path].request({**GOOD[path], **body}), True)
    assert str(refused.value).startswith(message)


HARMLESS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "verbosity": "low",
        "modalities": ["text"],
        "request_id": "mine",
        "an_option_of_next_year": {"a": [1]},
        "echo": False,
        "best_of": 1,
        "prompt_logprobs": None,
        "min_tokens": 0,
        "tools": [],
    },
    "/messages": {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "betas": ["x"],
        "mcp_servers": [],
        "kv_transfer_params": {"a": 1},
        "an_option_of_next_year": True,
    },
    "/responses": {
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "truncation": "auto",
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "metadata": {},
        "parallel_tool_calls": True,
        "kv_transfer_params": {"a": 1},
        "an_option_of_next_year": "x",
    },
    "/models/MODEL:generateContent": {
        "safetySettings": [{"category": "x", "threshold": "OFF"}],
        "labels": {"a": "b"},
        "tools": [{"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}, "stopSequences": [], "next_year": 1},
        "an_option_of_next_year": "x",
    },
    "/completions": {"user": "u", "suffix": "", "an_option_of_next_year": 1, "messages": [{}]},
}


@pytest.mark.parametrize("path", HARMLESS)
async def test_what_clients_send_without_need_is_left_out_and_the_call_answered(path: str) -> None:
    async with serving(upstream := Upstream()) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, path, {**GOOD[path], **HARMLESS[path]})
        assert status == 200, reply
    (body,) = upstream.bodies
    assert body.keys() - {"max_tokens"} == {
        "prompt" if path == "/completions" else "messages",
        *("model", "stream", "return_token_ids", "logprobs"),
        *NEUTRAL,  # without an option, the policy's setting applies
    }


PIXEL = image_file(1, 1).url


async def test_unknown_fields_of_messages_parts_calls_and_tools_are_left_out() -> None:
    said = {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": [], "task": "x"}
    said["tool_calls"] = [
        {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "x": 1}}
    ]
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "image_url": "http://127.0.0.1:9/"}
    picture = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "high"}, "uuid": "u"}
    sent = [
        {"role": "user", "content": [part, "x", picture], "tools": [{}]},
        said,
        {"role": "tool", "tool_call_id": "c", "content": "r", "name": "f", "image": "x"},
    ]
    tool = {"type": "function", "defer_loading": True, "function": {**TOOL["function"], "x": 1}}
    async with serving(upstream := Upstream()) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, "/chat/completions", {"messages": sent, "tools": [tool]})
        assert status == 200, reply
    assert upstream.bodies[0]["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hello"},
                {"type": "text", "text": "x"},
                {"type": "image_url", "image_url": {"url": PIXEL}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r", "name": "f"},
    ]
    assert upstream.bodies[0]["tools"] == [TOOL]


async def test_options_that_are_allowed_reach_the_engine_as_they_are() -> None:
    schema = {"type": "object", "properties": {"id": {"pattern": "^[0-9a-f]{8}-[0-9a-f]{4}$"}}, "required": ["id"]}
    given_: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 1,
        "top_k": -1,
        "n": 1,
        "seed": 5,
        "stop": ["\n"],
        "logit_bias": {"256": -100},
        "max_completion_tokens": 9,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
        "structured_outputs": {"choice": ["yes", "no"]},
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    async with serving(upstream := Upstream()) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, "/chat/completions", {**GOOD["/chat/completions"], **given_})
        assert status == 200, reply
    assert {name: upstream.bodies[0][name] for name in given_} == given_


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.org/a/b.png?c=d&e=%20",
        "https://images.example.org@127.0.0.1/a",
        "http://127.0.0.1/a",
        "http://[::1]/a",
        "http:/images.example.org/a",
        "file://images.example.org/etc/passwd",
        "gopher://images.example.org/a",
        "data:text/html;base64,aGk=",
    ],
)
async def test_images_are_sent_as_data_and_never_by_their_address(url: str) -> None:
    async with serving(upstream := Upstream()) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, "/chat/completions", image(url))
        assert status == 400, reply
        assert "send the image itself" in json.dumps(reply)
        source = {"type": "url", "url": url}
        message = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 9}
        assert (await call(model, "/messages", message))[0] == 400
        assert (await call(model, "/messages/count_tokens", message))[0] == 400
        item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        assert (await call(model, "/responses", {"input": [item]}))[0] == 400
    assert upstream.bodies == []


# --- failures of an engine that an agent may cause ------------------------------------------------------------


class Reluctant(Upstream):
    """Refuses or fails at requests with one of four words, and answers all others."""

    async def answer(self, body: Mapping[str, Any], request: web.Request, handler: Any) -> Any:
        said = json.dumps(body)
        if "bad" in said:
            return web.json_response({"error": {"message": f"not good: {said}"}}, status=400)
        if "worse" in said:
            return web.json_response({"error": {"message": "EngineGenerateError"}}, status=500)
        if "forbidden" in said:
            refusal = {"error": {"message": "EngineGenerateError: against the policy"}}
            return web.json_response(refusal, status=403, headers={WEIGHT_VERSION: "0"})
        if "unheard of" in said:
            return web.json_response({"error": {"message": "EngineGenerateError: not implemented"}}, status=501)
        return await super().answer(body, request, handler)


async def test_an_agent_that_writes_an_options_name_does_not_change_how_a_server_is_asked() -> None:
    async with serving(Reluctant()) as gateway:
        bad, good = await gateway.open("t/p/0", "p"), await gateway.open("u/p/0", "p")
        message = {"messages": [{"role": "user", "content": "bad return_token_ids"}]}
        assert (await call(bad, "/chat/completions", message))[0] == 400
        assert (await call(bad, "/completions", {"prompt": "bad return_token_ids"}))[0] == 400
        assert (await call(good, "/chat/completions", GOOD["/chat/completions"]))[0] == 200
        (server,) = gateway._caller.router.servers("p")
        assert (server.protocol, server.degraded) == ("plain", False)
        assert (await gateway.close("u/p/0")).protocols == {"plain": 1}


@pytest.mark.parametrize(("word", "tries"), [("worse", 3), ("forbidden", 3), ("unheard of", 1)])
async def test_a_request_at_which_an_engine_fails_is_told_so_and_delays_no_other(word: str, tries: int) -> None:
    async with serving(upstream := Reluctant()) as gateway:
        bad, good = await gateway.open("t/p/0", "p"), await gateway.open("u/p/0", "p")
        body = {"messages": [{"role": "user", "content": word}]}
        poison = [asyncio.create_task(call(bad, "/chat/completions", body)) for _ in range(50)]
        benign = 0
        while not benign or not all(task.done() for task in poison):
            status, _ = await call(good, "/chat/completions", GOOD["/chat/completions"])
            assert status == 200
            benign += 1
        answers = [task.result() for task in poison]
        assert {status for status, _ in answers} == {400}, answers[0]
        assert "EngineGenerateError" in answers[0][1]["error"]["message"]
        asked = sum(word in json.dumps(b) for b in upstream.bodies)
        most = 1 if tries == 1 else failover.MAX_UNUSABLE  # repeated while no other call was answered
        assert 50 * tries <= asked <= 50 * most
        assert [server.failed_at for server in gateway._caller.router.servers("p")] == [0.0]
        assert len((await gateway.close("u/p/0")).turns) == benign


class Broken(Upstream):
    """Fails at everything."""

    async def answer(self, body: Mapping[str, Any], request: web.Request, handler: Any) -> Any:
        return web.json_response({"error": {"message": "EngineDeadError"}}, status=500)


async def test_an_engine_that_fails_at_everything_is_the_services_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "RETRY_S", 0.02)
    async with serving(upstream := Broken()) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, "/chat/completions", GOOD["/chat/completions"])
        assert (status, reply["error"]["type"]) == (503, "model_service_error")
        asked = [body for body in upstream.bodies if body["messages"] == GOOD["/chat/completions"]["messages"]]
        assert len(asked) == failover.MAX_UNUSABLE
        assert len(upstream.bodies) == failover.MAX_UNUSABLE + 4, "a control follows each failure from the third on"
        assert "EngineDeadError" in await gateway.outage("t/p/0")


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_a_request_at_which_an_engine_fails_is_no_outage_though_nobody_else_asks(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent waits for the refusal, or ends while the call is repeated."""
    monkeypatch.setattr(failover, "RETRY_S", 0.02)
    body = {"prompt": "worse"} if path == "/completions" else {"messages": [{"role": "user", "content": "worse"}]}
    async with serving(Reluctant()) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, path, body)
        assert (status, "EngineGenerateError" in reply["error"]["message"]) == (400, True)
        assert await gateway.outage("t/p/0") == ""
        monkeypatch.setattr(failover, "RETRY_S", 60.0)
        model = await gateway.open("u/p/0", "p")
        waiting = asyncio.create_task(call(model, path, body))
        while not call_failure(gateway, "u/p/0"):
            await asyncio.sleep(0.01)
        assert await gateway.outage("u/p/0") == ""
        assert (await waiting)[0] == 503  # it was cancelled, so that the control need not wait


class Dropping(Reluctant):
    """Closes the connection without an answer at requests with one word."""

    async def answer(self, body: Mapping[str, Any], request: web.Request, handler: Any) -> Any:
        if "drop" in json.dumps(body):
            assert request.transport is not None
            request.transport.abort()
        return await super().answer(body, request, handler)


async def test_a_request_at_which_a_server_breaks_the_connection_is_refused_if_it_answers_another() -> None:
    async with serving(Dropping(), wait_s=1.0) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, _ = await call(model, "/chat/completions", {"messages": [{"role": "user", "content": "drop"}]})
        assert status == 400
        assert await gateway.outage("t/p/0") == ""
        status, _ = await call(await gateway.open("u/p/0", "p"), "/chat/completions", GOOD["/chat/completions"])
        assert status == 200


class Wordless(Upstream):
    """Gives answers without ids, or with invalid ids."""

    def __init__(self, ids: Mapping[str, Any]) -> None:
        super().__init__()
        self.ids = dict(ids)

    async def answer(self, body: Mapping[str, Any], request: web.Request, handler: Any) -> Any:
        choice = {"index": 0, "finish_reason": "length", "text": "x", **self.ids}
        choice["message"] = {"role": "assistant", "content": "x"}
        return web.json_response({"object": "text_completion", "choices": [choice], "usage": {"total_tokens": 3}})


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_an_answer_without_ids_is_taken_for_its_text_and_counted(path: str) -> None:
    async with serving(upstream := Wordless({"logprobs": {"token_logprobs": [None, -1.0]}})) as gateway:
        model = await gateway.open("t/p/0", "p")
        assert (await call(model, path, GOOD[path]))[0] == 200
        recording = await gateway.close("t/p/0")
        assert (recording.protocols, recording.inexact) == ({"text": 1}, 1)
        assert [turn.sequence for turn in recording.turns] == [-1]  # a turn without known tokens
    assert len(upstream.bodies) == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_an_answer_that_cannot_be_recorded_is_refused_at_once_and_no_servers_failure(path: str) -> None:
    unusable = {"token_ids": [1, 2], "prompt_token_ids": [1], "logprobs": {"token_logprobs": [None, -1.0]}}
    async with serving(upstream := Wordless(unusable)) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, reply = await call(model, path, GOOD[path])
        assert status == 400
        assert "no token ids or log-probabilities" in reply["error"]["message"]
        assert "no token ids or log-probabilities" in await gateway.outage("t/p/0")
        assert [server.failed_at for server in gateway._caller.router.servers("p")] == [0.0]
    assert len(upstream.bodies) == 2  # the control's answer is as bad


# --- whatever an agent sends --------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *("user", "assistant", "tool", "text", "image_url", "function", "tool_use", "tool_result", "http://a/", "auto"),
        *("computer", "computer_20250124", "computer_toolset_20260801", "computer_use_preview", "computer_call"),
        *("computer_call_output", "computer_screenshot", "linux", "wait"),
    ]
)
KEYS = st.sampled_from(
    [
        *("role", "content", "type", "text", "name", "id", "function", "arguments", "parameters", "tool_calls"),
        *("source", "url", "image_url", "input", "output", "call_id", "tools", "format", "schema", "json_schema"),
        *("thinking", "tool_name", "tool_use_id", "namespace", "refusal", "description", "mode", "x"),
        *("toolset_name", "configs", "display_width_px", "display_height_px", "display_width", "display_height"),
        *("environment", "action", "actions", "acknowledged_safety_checks"),
    ]
)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted({*chain(*TABLES.values()), "x", "__class__", ""})


FIELDS_OF_MESSAGES = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "reasoning", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id", "acknowledged_safety_checks"},
}
"""Fields of a message that engines get."""


@pytest.mark.parametrize("path", GOOD)
@given(extra=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
@settings(max_examples=300)
def test_only_what_the_tables_allow_goes_on_whatever_is_sent(path: str, extra: dict[str, Any]) -> None:
    chat = path != "/completions"
    table = CHAT if chat else COMPLETIONS
    try:
        found = engine_request(DIALECTS[path].request({**GOOD[path], **extra}), chat)
    except BadRequest:
        return
    for name, value in found.items():
        option = table[name]
        assert option.check is not None
        assert option.passed
        assert option.check(value, name) == value  # what was passed on passes again
    for message in found.get("messages", ()):
        assert message.keys() <= FIELDS_OF_MESSAGES[message["role"]]


@given(depth=st.integers(1, 130), text=st.text(alphabet='[]{}"\\a:, ', max_size=60))
def test_depth_is_counted_as_a_decoder_goes(depth: int, text: str) -> None:
    inner = json.dumps("{[" * 40 + text)  # brackets in a text are no depth
    nested = '{"a":' * depth + f"[{inner}]" + "}" * depth
    assert base.too_deep(json.loads(nested)) == (depth + 1 > base.MAX_NESTING)
    if depth + 1 > base.MAX_NESTING:
        with pytest.raises(BadRequest, match="nested deeper"):
            base.bounded_arguments(nested, "arguments")
    else:
        assert base.bounded_arguments(nested, "arguments") == nested
    assert base.bounded_arguments(text, "arguments") == text


@pytest.mark.parametrize(
    "hostile", ["[" * 10**6, "[]," * 10**6, "[" * 10**6 + "]" * 10**6, '{"a":' * 10**5, "x" * 2**23]
)
def test_arguments_that_cost_more_than_their_bytes_are_refused_undecoded(hostile: str) -> None:
    with pytest.raises(BadRequest):
        base.bounded_arguments(hostile, "arguments")


@pytest.mark.parametrize(
    "written", ['{"a": "' + "[{" * 10**5 + '"}', '"' + '\\"' * 10**6, '"' * 10**6, "def f(): {" * 100]
)
def test_arguments_with_brackets_in_their_texts_and_those_that_are_no_json_pass(written: str) -> None:
    assert base.bounded_arguments(written, "arguments") == written


# Of vLLM 0.32's ChatCompletionRequest and CompletionRequest, and of the first alone.
FIELDS = """
model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget
"""
CHAT_FIELDS = """
messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning parallel_tool_calls
add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs return_prompt_text
"""


def test_every_field_of_vllms_requests_has_its_place() -> None:
    """Fields of vLLM 0.32. Fields that no table lists would be omitted."""
    assert {*FIELDS.split(), *CHAT_FIELDS.split()} - CHAT.keys() == set()
    assert {*FIELDS.split(), "prompt", "suffix", "prompt_embeds"} - COMPLETIONS.keys() == set()
    for table in TABLES.values():
        for name, option in table.items():
            assert bool(option.check) + bool(option.refused) + (option == options.DROPPED) == 1, name
