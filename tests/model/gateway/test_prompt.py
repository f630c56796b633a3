"""An engine gets what its chat template renders, with the rollout's own answers as they were sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megaflow_hpc.model.engine_api import TEXTS
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.scripted import engine as scripted
from megaflow_hpc.model.engines.scripted.engine import END, START, text_of_tokens
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ToolCall
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.model.server import template_probe
from megaflow_hpc.trajectory import Recording
from tests.support.serving import gateway_before, in_loop, listening
from tests.support.split_engine import SplitEngine

Message = dict[str, Any]
Template = Callable[[Sequence[Message]], list[Message]]


def appends(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def as_qwen3(messages: Sequence[Message]) -> list[Message]:
    """Omits the thoughts before the last user message. Thoughts between later tool messages stay."""
    last = max(n for n, m in enumerate(messages) if m["role"] == "user")
    return [without_thought(m) if n < last else m for n, m in enumerate(messages)]


def never_thinks(messages: Sequence[Message]) -> list[Message]:
    return [without_thought(m) for m in messages]


def trims(messages: Sequence[Message]) -> list[Message]:
    """Omits white space around a message, like Llama 3's template."""
    return [{**m, "content": (m.get("content") or "").strip()} for m in messages]


def adds_a_line(messages: Sequence[Message]) -> list[Message]:
    """Repeats the line before a tool call, which the text already contains, like Qwen3's template with vLLM's
    parser."""
    return [{**m, "content": m["content"] + "\n"} if m.get("tool_calls") else m for m in messages]


def joins_lines(messages: Sequence[Message]) -> list[Message]:
    return [{**m, "content": " ".join(str(m.get("content") or "").split())} for m in messages]


def shortens_results(messages: Sequence[Message]) -> list[Message]:
    """Omits the results of all tool calls but the last."""
    tools = [n for n, m in enumerate(messages) if m["role"] == "tool"]
    return [{**m, "content": "…"} if n in tools[:-1] else m for n, m in enumerate(messages)]


def without_thought(message: Message) -> Message:
    return {k: v for k, v in message.items() if k != "reasoning"}


class Engine(SplitEngine):
    """An engine with a chat template. It thinks before each answer and calls a tool if the script says so."""

    def __init__(self, template: Template, answers: Sequence[ScriptedAnswer], **options: Any) -> None:
        super().__init__(Script(), "m", **options)
        self.template, self.given, self.asked_texts = template, list(answers), 0
        self.rendered: list[list[int]] = []
        self.script = self  # type: ignore[assignment]

    def answer(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[str] = ()) -> ScriptedAnswer:
        return self.given[len(self.log)]

    async def _render(self, request: web.Request) -> web.Response:
        body = await scripted.body_of(request)
        tokens = scripted.render(self.template(body["messages"]))
        self.rendered.append(tokens)
        return web.json_response({"token_ids": tokens, "sampling_params": {"max_tokens": 9999}, "features": None})

    async def _texts(self, request: web.Request) -> web.Response:
        self.asked_texts += 1
        return await super()._texts(request)


def thinks(number: int, *calls: ToolCall, text: str = "") -> ScriptedAnswer:
    return ScriptedAnswer(text or f"answer {number}", calls=calls, reasoning=f"thought {number}")


CALL = ToolCall("look", {"at": "it"})
CHAT = [thinks(n) for n in range(4)]
"""Answers to user messages."""
TOOLS = [thinks(0, CALL), thinks(1, CALL), thinks(2), thinks(3, CALL), thinks(4)]
"""Answers with tool calls; a user speaks after the third."""


async def converse(gateway: ModelGateway, answers: int, **options: Any) -> Recording:
    """Holds a conversation as a client that sends each answer back without its thought."""
    model = await gateway.open("t/p/0", "p")
    history: list[Message] = [{"role": "user", "content": "question"}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:
        for number in range(answers):
            body = {"messages": history, **options}
            async with session.post(model.base_url + "/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                message = (await response.json())["choices"][0]["message"]
            history.append({k: v for k, v in message.items() if k != "reasoning" and v})
            calls = message.get("tool_calls") or ()
            history += [{"role": "tool", "tool_call_id": c["id"], "content": f"result {number}"} for c in calls]
            history += [] if calls else [{"role": "user", "content": f"observation {number}"}]
    return await gateway.close("t/p/0")


def marked(tokens: Sequence[int]) -> str:
    """The text of tokens, including the markers of turns."""
    parts = {END: "<end>", START: "<start>"}
    return "".join(parts.get(t) or text_of_tokens([t]) if t in parts or t % 512 < 128 else "?" for t in tokens)


def check_sent(engine: Engine, recording: Recording, prompts: Sequence[list[int]]) -> None:
    """Each prompt has the text that the template renders, and was recorded as it was sent."""
    assert [marked(sent) for sent, _ in engine.log] == [marked(rendered) for rendered in prompts]
    for turn, (prompt, sampled) in zip(recording.turns, engine.log, strict=True):
        tokens = list(recording.sequences[turn.sequence].tokens)
        assert (tokens[: turn.token_start], tokens[turn.token_start : turn.token_end]) == (prompt, sampled)


@pytest.mark.parametrize("answers", [CHAT, TOOLS], ids=["chat", "tools"])
@in_loop
async def test_a_template_that_only_appends_gives_one_sequence_of_the_sampled_ids(
    answers: list[ScriptedAnswer],
) -> None:
    engine = Engine(appends, answers, drift=0.4)
    async with gateway_before(engine, "split", "p") as gateway:
        recording = await converse(gateway, len(answers))
    check_sent(engine, recording, engine.rendered)
    assert len(recording.sequences) == 1
    assert all(sent != rendered for (sent, _), rendered in zip(engine.log[1:], engine.rendered[1:], strict=True))


@in_loop
async def test_thoughts_that_the_template_leaves_out_are_not_sent() -> None:
    engine = Engine(as_qwen3, CHAT, drift=0.4)
    async with gateway_before(engine, "split", "p") as gateway:
        recording = await converse(gateway, 4)
    check_sent(engine, recording, engine.rendered)
    assert [turn.sequence for turn in recording.turns] == [0, 1, 2, 3]
    assert "thought" not in marked(engine.log[-1][0])


@in_loop
async def test_thoughts_stay_between_tool_calls_and_go_at_the_next_user_message_as_the_template_has_it() -> None:
    engine = Engine(as_qwen3, TOOLS, drift=0.4)
    async with gateway_before(engine, "split", "p") as gateway:
        recording = await converse(gateway, 5)
    check_sent(engine, recording, engine.rendered)
    assert [turn.sequence for turn in recording.turns] == [0, 0, 0, 1, 1]
    within, after, last = (marked(engine.log[n][0]) for n in (2, 3, 4))
    assert ("thought 0" in within, "thought 1" in within) == (True, True)
    assert "thought" not in after
    assert ("thought 2" in last, "thought 3" in last) == (False, True)


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (never_thinks, TOOLS),
        (joins_lines, [ScriptedAnswer(f"def f():\n    return {n}") for n in range(3)]),
        (shortens_results, TOOLS[:2] + TOOLS[3:]),
        (as_qwen3, [ScriptedAnswer("", reasoning=f"only a thought {n}") for n in range(3)]),
    ],
    ids=["never thinks", "white space within a text", "shortens results", "an answer that is a thought alone"],
)
@in_loop
async def test_what_a_template_edits_is_sent_as_it_renders_it(
    template: Template, answers: list[ScriptedAnswer]
) -> None:
    engine = Engine(template, answers, drift=0.4)
    async with gateway_before(engine, "split", "p") as gateway:
        recording = await converse(gateway, len(answers))
    check_sent(engine, recording, engine.rendered)
    assert len(recording.sequences) > 1


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (trims, [ScriptedAnswer(f"  answer {n}\n ", reasoning=f"\nthought {n}\n") for n in range(3)]),
        (trims, [ScriptedAnswer(f"answer {n}\n", calls=(CALL,)) for n in range(3)]),
        (adds_a_line, TOOLS[:3]),
    ],
)
@in_loop
async def test_white_space_around_thought_and_text_ends_no_sequence(
    template: Template, answers: list[ScriptedAnswer]
) -> None:
    engine = Engine(template, answers, drift=0.4)
    async with gateway_before(engine, "split", "p") as gateway:
        recording = await converse(gateway, 3)
    assert len(recording.sequences) == 1
    sent, rendered = marked(engine.log[-1][0]), marked(engine.rendered[-1])
    assert sent != rendered
    assert "".join(sent.split()) == "".join(rendered.split())


@pytest.mark.parametrize("template", [appends, as_qwen3])
@in_loop
async def test_an_answer_that_a_limit_cut_off_in_a_thought_is_sent_as_rendered(template: Template) -> None:
    """The scripted engine gives a truncated thought as text. The text stays, and no end of turn was sampled."""

    class Cut(Engine):
        async def _render(self, request: web.Request) -> web.Response:
            response = await super()._render(request)
            limited = {"token_ids": self.rendered[-1], "sampling_params": {"max_tokens": 12}, "features": None}
            return web.json_response(limited) if not self.log else response

    engine = Cut(template, CHAT, drift=0.4)
    async with gateway_before(engine, "split", "p") as gateway:
        recording = await converse(gateway, 2, max_tokens=9999)
    assert recording.turns[0].finish_reason == "length"
    assert marked(engine.log[1][0]) == marked(engine.rendered[1])
    assert len(recording.sequences) == 1


@pytest.mark.parametrize("answers", [CHAT, TOOLS], ids=["chat", "tools"])
@pytest.mark.parametrize("template", [as_qwen3, never_thinks, joins_lines])
@in_loop
async def test_kept_thoughts_make_one_sequence_whatever_the_template_drops(
    template: Template, answers: list[ScriptedAnswer]
) -> None:
    engine = Engine(template, answers, drift=0.4)
    async with gateway_before(engine, "split", "p", keep_thoughts=["p"]) as gateway:
        recording = await converse(gateway, len(answers))
    assert len(recording.sequences) == 1
    last = marked(engine.log[-1][0])
    assert [f"thought {n}" in last for n in range(len(answers) - 1)] == [True] * (len(answers) - 1)
    whole = marked(scripted.render(messages_of(recording)[:-1]))
    assert last == whole
    for turn, (prompt, sampled) in zip(recording.turns, engine.log, strict=True):
        tokens = list(recording.sequences[0].tokens)
        assert (tokens[: turn.token_start], tokens[turn.token_start : turn.token_end]) == (prompt, sampled)


@pytest.mark.parametrize(("keep", "sequences"), [([], 4), (["p"], 1)], ids=["template", "keep"])
@in_loop
async def test_a_template_that_opens_the_thought_itself_is_followed_or_kept(keep: list[str], sequences: int) -> None:
    """For models that always think: the prompt contains the opening tag, and earlier answers have neither tag nor
    thought."""

    class Opens(Engine):
        async def _render(self, request: web.Request) -> web.Response:
            await super()._render(request)
            self.rendered[-1] += b"<think>"
            sampling = {"max_tokens": 9999}
            return web.json_response({"token_ids": self.rendered[-1], "sampling_params": sampling, "features": None})

    engine = Opens(as_qwen3, CHAT, drift=0.4)
    async with gateway_before(engine, "split", "p", keep_thoughts=keep) as gateway:
        recording = await converse(gateway, 4)
    assert len(recording.sequences) == sequences
    if not keep:
        check_sent(engine, recording, engine.rendered)
    assert [f"thought {n}" in marked(engine.log[-1][0]) for n in range(3)] == [bool(keep)] * 3


@in_loop
async def test_a_kept_answer_that_the_template_renders_as_two_turns_is_sent_once() -> None:
    def apart(messages: Sequence[Message]) -> list[Message]:
        found = []
        for message in messages:
            parts = [{**message, "tool_calls": []}, {**message, "content": "", "reasoning": ""}]
            found += parts if message.get("tool_calls") else [message]
        return found

    engine = Engine(apart, TOOLS[:3], drift=0.4)
    async with gateway_before(engine, "split", "p", keep_thoughts=["p"]) as gateway:
        recording = await converse(gateway, 3)
    assert len(recording.sequences) == 1
    assert marked(engine.log[-1][0]) == marked(scripted.render(messages_of(recording)[:-1]))


def messages_of(recording: Recording) -> list[Message]:
    return [dict(m) for m in recording.messages]


@in_loop
async def test_kept_thoughts_are_those_of_the_same_conversation() -> None:
    """Another conversation with the same answer at the same place is not taken for this one."""
    engine = Engine(as_qwen3, [thinks(0, CALL), thinks(1), thinks(0, CALL), thinks(1), thinks(2)])
    async with gateway_before(engine, "split", "p", keep_thoughts=["p"]) as gateway:
        model = await gateway.open("t/p/0", "p")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:

            async def ask(history: list[Message]) -> None:
                async with session.post(model.base_url + "/chat/completions", json={"messages": history}) as response:
                    assert response.status == 200, await response.text()
                    history.append((await response.json())["choices"][0]["message"])

            conversations = [[{"role": "user", "content": name}] for name in ("one", "other")]
            for history in conversations:
                await ask(history)
                call = history[-1]["tool_calls"][0]["id"]
                history.append({"role": "tool", "tool_call_id": call, "content": "result"})
                await ask(history)
            first = conversations[0]
            first.append({"role": "user", "content": "and now?"})
            await ask(first)
        recording = await gateway.close("t/p/0")
    assert [turn.sequence for turn in recording.turns] == [0, 0, 1, 1, 0]
    assert "other" not in marked(engine.log[-1][0])


@in_loop
async def test_an_engine_that_cannot_tell_texts_is_sent_the_rendering_where_ids_differ() -> None:
    class Old(Engine):
        def application(self) -> web.Application:
            app = web.Application()
            for route in super().application().router.routes():
                if route.resource is not None and route.resource.canonical != TEXTS:
                    app.router.add_route(route.method, route.resource.canonical, route.handler)
            return app

    for drift, sequences in ((0.0, 1), (0.4, 3)):
        engine = Old(appends, CHAT[:3], drift=drift)
        async with gateway_before(engine, "split", "p") as gateway:
            recording = await converse(gateway, 3)
        check_sent(engine, recording, engine.rendered)
        assert len(recording.sequences) == sequences


@pytest.mark.parametrize("texts", [{}, {"choices": []}, {"choices": [{"text": "a"}]}, {"choices": [1, 2]}])
@in_loop
async def test_an_answer_that_is_no_text_fails_the_call_and_nothing_else(texts: Any) -> None:
    class Odd(Engine):
        async def _texts(self, request: web.Request) -> web.Response:
            return web.json_response(texts)

    engine = Odd(appends, CHAT, drift=0.9)
    async with gateway_before(engine, "split", "p") as gateway:
        with pytest.raises(AssertionError, match="lacks a part"):
            await converse(gateway, 2)


@in_loop
async def test_the_engine_is_asked_for_texts_only_where_an_answer_encodes_to_other_ids() -> None:
    engine = Engine(appends, CHAT)
    async with gateway_before(engine, "split", "p") as gateway:
        await converse(gateway, 4)
    assert engine.asked_texts == 0


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (appends, template_probe.APPENDS),
        (as_qwen3, template_probe.DROPS_AT_USER),
        (never_thinks, template_probe.DROPS),
        (lambda messages: list(messages)[-2:], template_probe.REWRITES),
    ],
)
@in_loop
async def test_the_probe_says_what_a_template_makes_of_earlier_messages(template: Template, found: str) -> None:
    async with asking(Engine(template, [])) as ask:
        assert await template_probe.probe(ask, Launch(model_name="m", protocol="split"), True) == found


@in_loop
async def test_the_probe_finds_thoughts_that_a_template_cuts_from_the_text() -> None:
    def cuts(messages: Sequence[Message]) -> list[Message]:
        last = max(n for n, m in enumerate(messages) if m["role"] == "user")
        kept = [{**m, "content": str(m["content"]).split("</think>")[-1]} for m in messages[:last]]
        return [*kept, *messages[last:]]

    async with asking(Engine(cuts, [])) as ask:
        launch = Launch(model_name="m", protocol="split")
        assert await template_probe.probe(ask, launch, False) == template_probe.DROPS_AT_USER
    parses = template_probe.parses_thoughts
    assert (parses({}), parses({"args": {"reasoning-parser": "qwen3"}}), parses({"engine": "external"})) == (
        False,
        True,
        True,
    )


@in_loop
async def test_the_probe_says_nothing_of_an_engine_that_cannot_render() -> None:
    def refuses(messages: Sequence[Message]) -> list[Message]:
        raise web.HTTPBadRequest(text="roles must alternate")

    async with asking(Engine(refuses, [])) as ask:
        assert await template_probe.probe(ask, Launch(model_name="m", protocol="split"), True) == ""
        assert await template_probe.probe(ask, Launch(model_name="m", protocol="plain"), True) == ""


@asynccontextmanager
async def asking(engine: Engine) -> AsyncIterator[Callable[..., Any]]:
    async with listening(engine.application()) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def ask(path: str, body: Message, timeout_s: float) -> tuple[int, str]:
            async with session.post(path, json=body) as response:
                return response.status, await response.text()

        yield ask
