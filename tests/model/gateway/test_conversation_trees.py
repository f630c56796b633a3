"""Every format stores random conversation trees as they happened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.trajectory import path_to
from tests.model.gateway.conversation_trees import grow
from tests.model.gateway.trees.clients import native_clients
from tests.model.gateway.trees.engine import served
from tests.support.serving import in_loop


@pytest.mark.slow
def test_what_is_stored_of_random_trees_is_what_happened() -> None:
    outcome = asyncio.run(grow(seed=0, first=0, trees=24))
    assert outcome.wrong == []
    assert outcome.calls > 200
    kinds = ("openai chat", "openai responses", "anthropic messages", "streams", "n > 1", "sub-agents", "windows")
    more = ("compactions", "edits", "rewinds", "forks", "titles", "hang-ups in a stream", "policy changed", "resumed")
    assert min(outcome.did[what] for what in (*kinds, *more)) > 5


@pytest.mark.slow
def test_what_is_stored_of_trees_by_litellm_is_what_happened(harbor_python: Path) -> None:
    outcome = asyncio.run(grow(seed=1, first=0, trees=15, litellm=harbor_python))
    assert outcome.wrong == []
    assert min(outcome.did[f"litellm {api}"] for api in ("chat", "messages", "responses")) > 3


@pytest.mark.parametrize("model", ["text", "mute"])
@in_loop
async def test_every_alternative_of_an_engine_that_tells_no_tokens_is_recorded(model: str) -> None:
    async with served() as (gateway, engine), native_clients() as (client, _):
        endpoint = await gateway.open("t/p/0", model)
        client = client.copy(base_url=endpoint.base_url, api_key=endpoint.api_key)
        asked: list[Any] = [{"role": "user", "content": "Choose."}]
        answer = await client.chat.completions.create(model="m", messages=asked, n=3, max_tokens=5)
        recording = await gateway.close("t/p/0")
    assert len(answer.choices) == 3
    stored = [recording.messages[turn.message] for turn in recording.turns]
    wanted = [{k: v for k, v in one.message.items() if v or k == "content"} for one in engine.given]
    assert stored == wanted
    assert {tuple(path_to(recording.parents, turn.message)[:-1]) for turn in recording.turns} == {(0,)}
    assert [turn.sequence for turn in recording.turns] == [-1] * 3
    assert len(recording.calls) == 3
