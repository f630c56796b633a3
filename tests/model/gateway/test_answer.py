"""An engine's answer read for its tokens is the answer read as JSON, or is read as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megaflow_hpc.model.gateway.answer import read


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


def test_everything_but_the_scores_is_as_json_has_it() -> None:
    answer = chat(model="m", kv_transfer_params=None, created=17)
    found = read(json.dumps(answer).encode())
    assert found is not None
    assert found["choices"][0].pop("logprobs").values() == [-0.5, -1.0]
    del answer["choices"][0]["logprobs"]
    assert found == answer


@pytest.mark.parametrize(
    "answer",
    [
        chat(citations=["a field of another engine"]),
        chat(choices=[{**chat()["choices"][0], "content_filter": {}}]),
        chat(choices=[{**chat()["choices"][0], "logprobs": None}]),
        chat(choices=[{**chat()["choices"][0], "token_ids": [7, "x"]}]),
        chat(prompt_token_ids=None),
        [chat()],
    ],
)
def test_what_is_not_known_here_is_left_to_who_knows_it(answer: Any) -> None:
    assert read(json.dumps(answer).encode()) is None


@pytest.mark.parametrize("raw", [b"", b"[" * 100_000, json.dumps(chat()).encode()[:-9], b'{"id": "\\ud83d"}', b"\xff"])
def test_what_is_not_json_is_no_answer(raw: bytes) -> None:
    assert read(raw) is None
