"""SGLang's tokens are recorded by its own endpoints. Their schema is that of version 0.5.23."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from megaflow_hpc.model.engine_api import CHAT, DETOKENIZE, TOKENIZE
from megaflow_hpc.model.engines import adapters
from megaflow_hpc.model.engines.scripted import engine as scripted
from megaflow_hpc.model.engines.scripted.engine import END, answer_text, logprob, message_of, text_of_tokens
from tests.support.serving import call, conversation, gateway_before, in_loop
from tests.support.split_engine import parse_prompt
from tests.support.templates import CHAT as THOUGHTS
from tests.support.templates import TOOLS, Engine, appends, as_qwen3, check_sent, converse

TOKENIZE_FIELDS = {"model", "messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"}


class Sglang(Engine):
    """Serves ``/tokenize``, ``/detokenize`` and chat completions as SGLang does."""

    old = False
    """An older version, which knows neither ``input_ids`` nor ``return_token_ids``."""
    damaged: dict[str, Any] | None = None
    """Replaces fields of the choice."""

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post(CHAT, self._complete)
        if not self.old:
            app.router.add_post(TOKENIZE, self._tokenize)
            app.router.add_post(DETOKENIZE, self._detokenize)
        return app

    def tokens_of(self, messages: list[dict[str, Any]]) -> list[int]:
        """Renders messages. SGLang calls a thought ``reasoning_content``."""
        return scripted.render(self.template([{**m, "reasoning": m.get("reasoning_content")} for m in messages]))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await scripted.body_of(request)
        assert body.keys() <= TOKENIZE_FIELDS
        tokens = self.tokens_of(body["messages"])
        self.rendered.append(tokens)
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 9999})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await scripted.body_of(request)
        assert body["skip_special_tokens"] is False
        return web.json_response({"text": [text_of_tokens(tokens) for tokens in body["tokens"]]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await scripted.body_of(request)
        ids = None if self.old else body.get("input_ids")
        prompt = self.tokens_of(body["messages"]) if ids is None else ids
        answer = self.script.answer(*parse_prompt(prompt))
        message = message_of(answer)
        tokens = self.sample(answer_text(message), prompt)
        message["reasoning_content"] = message.pop("reasoning", None)
        scores = [
            {"token": "x", "bytes": [120], "logprob": logprob(t, n), "top_logprobs": []} for n, t in enumerate(tokens)
        ]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if answer.calls else "stop"}
        choice |= {"matched_stop": END, "logprobs": {"content": scores} if body.get("logprobs") else None}
        if body.get("return_token_ids") and not self.old:
            choice |= {"prompt_token_ids": prompt, "response_token_ids": tokens}
        choice |= self.damaged or {}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "reasoning_tokens": 0}
        usage["total_tokens"] = len(prompt) + len(tokens)
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "metadata": {"weight_version": "1"}}
        return web.json_response({**head, "choices": [choice], "usage": usage})


@pytest.mark.parametrize("answers", [THOUGHTS, TOOLS], ids=["chat", "tools"])
@in_loop
async def test_a_conversation_is_one_sequence_of_the_sampled_ids_and_their_log_probabilities(
    answers: list[Any],
) -> None:
    engine = Sglang(appends, answers, drift=0.4)
    async with gateway_before(engine, "sglang", "p") as gateway:
        recording = await converse(gateway, len(answers))
    check_sent(engine, recording, engine.rendered)
    (sequence,) = recording.sequences
    assert recording.protocols == {"sglang": len(answers)}
    for turn, (_, sampled) in zip(recording.turns, engine.log, strict=True):
        expected = [logprob(token, number) for number, token in enumerate(sampled)]
        assert list(sequence.logprobs[turn.token_start : turn.token_end]) == pytest.approx(expected)


@in_loop
async def test_thoughts_that_the_template_drops_are_not_sent() -> None:
    engine = Sglang(as_qwen3, THOUGHTS, drift=0.4)
    async with gateway_before(engine, "sglang", "p") as gateway:
        recording = await converse(gateway, 4)
    check_sent(engine, recording, engine.rendered)
    assert [turn.sequence for turn in recording.turns] == [0, 1, 2, 3]


@in_loop
async def test_an_agent_sees_nothing_that_it_did_not_ask_for() -> None:
    engine = Sglang(appends, THOUGHTS)
    async with gateway_before(engine, "sglang", "p") as gateway:
        model = await gateway.open("t/p/0", "p")
        _, reply = await call(model, {"messages": conversation("hello")})
    (choice,) = reply["choices"]
    assert choice["logprobs"] is None
    assert not {"prompt_token_ids", "response_token_ids", "token_ids"} & {*choice, *reply}


@in_loop
async def test_an_older_version_is_recorded_as_text() -> None:
    engine = Sglang(appends, THOUGHTS)
    engine.old = True
    async with gateway_before(engine, "sglang", "p") as gateway:
        recording = await converse(gateway, 2)
    assert recording.protocols == {"text": 2}
    assert [turn.sequence for turn in recording.turns] == [-1, -1]
    assert [call["tokens"][1] for call in recording.calls] == [len(sampled) for _, sampled in engine.log]


@pytest.mark.parametrize(
    "damaged",
    [
        {"response_token_ids": "abc"},
        {"response_token_ids": [1]},
        {"prompt_token_ids": [1, 2]},
        {"response_token_ids": [-1]},
        {"logprobs": None},
    ],
    ids=json.dumps,
)
@in_loop
async def test_tokens_that_do_not_belong_to_the_call_are_not_recorded(damaged: dict[str, Any]) -> None:
    engine = Sglang(appends, THOUGHTS * 20)
    engine.damaged = damaged
    async with gateway_before(engine, "sglang", "p", wait_s=1) as gateway:
        model = await gateway.open("t/p/0", "p")
        status, _ = await call(model, {"messages": conversation("hello")})
        assert status in (400, 503)
        assert not (await gateway.close("t/p/0")).turns


def test_the_adapter_starts_sglang_with_this_protocol(tmp_path: Any) -> None:
    assert adapters.launch({"engine": "sglang", "path": "/m"}, "p", tmp_path).protocol == "sglang"
