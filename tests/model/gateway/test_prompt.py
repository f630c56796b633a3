"""An engine gets what its chat template renders, with the rollout's own answers as they were sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megaflow_hpc.model.engine_api import TEXTS
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.scripted import engine as scripted
from megaflow_hpc.model.engines.scripted.script import ScriptedAnswer
from megaflow_hpc.model.server import registration
from megaflow_hpc.trajectory import Recording
from tests.support.serving import gateway_before, in_loop, listening
from tests.support.templates import (
    CALL,
    CHAT,
    TOOLS,
    Engine,
    Message,
    Template,
    adds_a_line,
    appends,
    as_qwen3,
    check_sent,
    converse,
    joins_lines,
    marked,
    never_thinks,
    shortens_results,
    thinks,
    trims,
)


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
        (appends, registration.APPENDS),
        (as_qwen3, registration.DROPS_AT_USER),
        (never_thinks, registration.DROPS),
        (lambda messages: list(messages)[-2:], registration.REWRITES),
    ],
)
@in_loop
async def test_the_probe_says_what_a_template_makes_of_earlier_messages(template: Template, found: str) -> None:
    async with asking(Engine(template, [])) as ask:
        assert await registration.probe(ask, Launch(model_name="m", protocol="split"), True) == found


@in_loop
async def test_the_probe_finds_thoughts_that_a_template_cuts_from_the_text() -> None:
    def cuts(messages: Sequence[Message]) -> list[Message]:
        last = max(n for n, m in enumerate(messages) if m["role"] == "user")
        kept = [{**m, "content": str(m["content"]).split("</think>")[-1]} for m in messages[:last]]
        return [*kept, *messages[last:]]

    async with asking(Engine(cuts, [])) as ask:
        launch = Launch(model_name="m", protocol="split")
        assert await registration.probe(ask, launch, False) == registration.DROPS_AT_USER
    parses = registration.parses_thoughts
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
        assert await registration.probe(ask, Launch(model_name="m", protocol="split"), True) == ""
        assert await registration.probe(ask, Launch(model_name="m", protocol="plain"), True) == ""


@asynccontextmanager
async def asking(engine: Engine) -> AsyncIterator[Callable[..., Any]]:
    async with listening(engine.application()) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def ask(path: str, body: Message, timeout_s: float) -> tuple[int, str]:
            async with session.post(path, json=body) as response:
                return response.status, await response.text()

        yield ask
