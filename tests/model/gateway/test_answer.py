"""The plain protocol's handling of an engine's answer: fields are passed on, and garbage is the server's failure."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from megaflow_hpc.model.engine_api import CHAT
from megaflow_hpc.model.gateway.engine_call import Call, EngineClient, EngineRequest, Unavailable, UnusableAnswer
from megaflow_hpc.model.gateway.protocols import Answer, plain
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.router import Server
from tests.support.serving import endpoint, in_loop, listening


def chat(**more: Any) -> dict[str, Any]:
    score = {"token": "token_id:7", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi \U0001f600", "tool_calls": [call], "refusal": None},
        "logprobs": {"content": [score, {**score, "logprob": -1}]},
        "token_ids": [7, 9],
        "finish_reason": "stop",
        "stop_reason": None,
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": None}
    return {
        "id": "a",
        "object": "chat.completion",
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": [1, 2, 3],
    } | more


async def answer_to(raw: bytes, **body: Any) -> Answer:
    """The gateway's answer if the engine answers with these bytes, over a real socket."""

    async def engine(_: web.BaseRequest) -> web.Response:
        return web.Response(body=raw, content_type="application/json")

    client, request = EngineClient(), EngineRequest("p", CHAT, {"model": "m", **body}, Recorder("p"))
    async with listening(web.Server(engine)) as port:
        try:
            return await plain(Call(request, msgspec.convert(endpoint(port), Server), client, 10.0))
        finally:
            await client.close()


@in_loop
async def test_everything_but_the_ids_and_scores_goes_to_the_agent() -> None:
    answer = chat(model="m", kv_transfer_params=None, created=17, citations=["a field of another engine"])
    answer["choices"][0]["content_filter"] = {}
    found = await answer_to(json.dumps(answer).encode())
    assert [list(s.logprobs) for s in found.samples] == [[-0.5, -1.0]]
    assert [(list(s.prompt), list(s.tokens)) for s in found.samples] == [([1, 2, 3], [7, 9])]
    assert found.body["choices"][0].pop("logprobs") is None
    del answer["choices"][0]["logprobs"], answer["choices"][0]["token_ids"], answer["prompt_token_ids"]
    assert found.body == answer


@in_loop
async def test_scores_and_ids_that_were_asked_for_are_given() -> None:
    answer = chat(model="m")
    found = await answer_to(json.dumps(answer).encode(), logprobs=True, return_token_ids=True)
    assert found.body == answer


@pytest.mark.parametrize(
    "answer",
    [
        chat(choices=[{**chat()["choices"][0], "logprobs": None}]),
        chat(choices=[{**chat()["choices"][0], "token_ids": [7, "x"]}]),
        chat(choices=[{**chat()["choices"][0], "token_ids": [7]}]),
        chat(prompt_token_ids=None),
        chat(choices=[]),
    ],
)
@in_loop
async def test_an_answer_without_its_ids_or_scores_is_no_answer_and_not_asked_for_again(answer: Any) -> None:
    with pytest.raises(UnusableAnswer) as found:
        await answer_to(json.dumps(answer).encode())
    assert not found.value.retry


@pytest.mark.parametrize(
    "raw", [b"", b"[{}]", b"[" * 100_000, json.dumps(chat()).encode()[:-9], b'{"id": "\\ud83d"}', b"\xff"]
)
@in_loop
async def test_what_is_not_json_is_no_answer(raw: bytes) -> None:
    with pytest.raises(UnusableAnswer if raw.startswith(b"{") and raw.endswith(b"}") else Unavailable):
        await answer_to(raw)
