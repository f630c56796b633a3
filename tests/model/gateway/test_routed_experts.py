"""The experts that an engine reports are recorded with the tokens that they belong to."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.host.wire import pack, unpack
from megaflow_hpc.model.engine_api import routed_experts
from megaflow_hpc.model.engines.scripted.script import Script
from megaflow_hpc.model.gateway.recorder import Recorder, SampledTokens
from megaflow_hpc.trajectory import Recording, TokenSequence
from tests.support.serving import gateway_before, in_loop, recorded_chat
from tests.support.split_engine import SplitEngine

LAYERS, PER_TOKEN = 3, 2


def chosen(tokens: Sequence[int], dtype: str = "u1") -> np.ndarray[Any, Any]:
    """Experts of a stand-in for an engine (tokens, layers, experts per token): they differ by token and position."""
    entries = np.arange(LAYERS * PER_TOKEN)
    rows = [(token + 7 * place + entries) % 250 for place, token in enumerate(tokens)]
    return np.array(rows, dtype).reshape(-1, LAYERS, PER_TOKEN)


def encoded(experts: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


def check(sequence: TokenSequence, dtype: str = "u1") -> None:
    """Every token has its experts but the last, which the engine never routed."""
    found = np.frombuffer(sequence.experts, dtype).reshape(len(sequence.tokens), LAYERS, PER_TOKEN)
    assert (sequence.expert_layers, sequence.experts_per_token) == (LAYERS, PER_TOKEN)
    assert found[:-1].tolist() == chosen(sequence.tokens[:-1], dtype).tolist()
    assert set(found[-1].tobytes()) == {255}


STEP = st.tuples(
    st.sampled_from(["extend", "extend", "edit", "fresh"]),
    st.lists(st.integers(0, 300), max_size=5),
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.booleans(),
)


@given(st.lists(STEP, min_size=1, max_size=8), st.sampled_from(["u1", "<u2"]))
def test_each_token_keeps_its_experts_however_the_conversation_goes(steps: list[Any], dtype: str) -> None:
    recorder, context = Recorder("p"), [1, 2, 3]
    for kind, new, sampled, resumed in steps:
        if resumed:  # the recording continues in another process
            recorder = Recorder.resumed(unpack(pack(recorder.state())))
        context = [*context[: len(context) // 2], 999] if kind == "edit" else context
        context = [1000 + len(context)] if kind == "fresh" else context + new
        start, tokens = recorder.routed(context), context + sampled
        experts = routed_experts(encoded(chosen(tokens, dtype)[start:-1]), len(tokens), start)
        recorder.add(SampledTokens(context, sampled, [-1.0] * len(sampled), experts=experts))
        context = tokens
    for sequence in recorder.finish().sequences:
        check(sequence, dtype)


def test_tokens_of_calls_without_experts_have_unknown_ones() -> None:
    recorder = Recorder("p")
    recorder.add(SampledTokens([1, 2], [3], [-1.0]))
    assert recorder.routed([1, 2, 3, 4]) == 0
    tokens = [1, 2, 3, 4, 5]
    recorder.add(SampledTokens(tokens[:4], tokens[4:], [-1.0], experts=routed_experts(encoded(chosen(tokens[:4])), 5)))
    recorder.add(SampledTokens([*tokens, 6], [7], [-1.0]))
    other = routed_experts(encoded(chosen([*tokens, 6, 7])[:, :2]), 8)  # by an engine of another model
    recorder.add(SampledTokens([*tokens, 6, 7], [8], [-1.0], experts=other))
    (sequence,) = recorder.finish().sequences
    found = np.frombuffer(sequence.experts, np.uint8).reshape(8, -1)
    assert found[2:4].tolist() == chosen(tokens).reshape(5, -1)[2:4].tolist()
    assert (np.delete(found, (2, 3), 0) == 255).all()


WRONG = {
    "no base64": "?",
    "no array": base64.b64encode(b"experts").decode(),
    "another type": encoded(chosen([1, 2]).astype("<i8")),
    "two dimensions": encoded(chosen([1, 2])[0]),
    "cut off": encoded(chosen([1, 2]))[:-8],
    "of other tokens": encoded(chosen([1, 2, 3])),
    "nested": base64.b64encode(b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535).decode(),
    "no text": 3,
}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_anything_else_than_experts_of_these_tokens_is_refused(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        routed_experts(value, 3)


class MixtureOfExperts(SplitEngine):
    """An engine that reports experts as vLLM does with ``enable-return-routed-experts``."""

    reported = 0
    """Number of tokens whose experts were reported."""

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        answer = json.loads((await super()._generate(request)).body)  # type: ignore[arg-type]
        self.add(answer["choices"][0], body["token_ids"], body["sampling_params"].get("routed_experts_prompt_start", 0))
        return web.json_response(answer)

    async def _derender(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert "routed_experts" not in body["generate_response"]["choices"][0]  # megabytes that nobody needs there
        return await super()._derender(request)

    async def _reply(self, *args: Any, **options: Any) -> web.Response:
        answer = json.loads((await super()._reply(*args, **options)).body)  # type: ignore[arg-type]
        self.add(answer["choices"][0], answer["prompt_token_ids"], 0)
        return web.json_response(answer)

    def add(self, choice: dict[str, Any], prompt: list[int], start: int) -> None:
        experts = chosen(prompt + choice["token_ids"])[start:-1]
        self.reported += len(experts)
        choice["routed_experts"] = encoded(experts)


async def recorded(protocol: str, drift: float) -> tuple[Recording, MixtureOfExperts]:
    engine = MixtureOfExperts(Script(), "m", drift=drift)
    async with gateway_before(engine, protocol, "p") as gateway:
        return await recorded_chat(gateway, 4), engine


@in_loop
async def test_experts_are_asked_for_once_and_recorded_with_their_tokens() -> None:
    recording, engine = await recorded("split", 0.4)
    (sequence,) = recording.sequences
    check(sequence)
    assert engine.reported == len(sequence.tokens) - 1


@in_loop
async def test_the_openai_endpoint_repeats_the_experts_of_the_prompt() -> None:
    recording, engine = await recorded("plain", 0.0)
    for sequence in recording.sequences:
        check(sequence)
    assert len(recording.sequences) == 1
    assert engine.reported > 2 * len(recording.sequences[0].tokens)
    assert recording.protocols == {"plain": 4}
