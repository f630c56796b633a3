"""Sampling seeds depend on the campaign, the rollout, the attempt and the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from megaflow_hpc.model.engines.scripted import engine as scripted
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.types import Rollout
from tests.support.serving import call, conversation, gateway_before, in_loop

ROLLOUT = Rollout("sum", "default", 3, "mini-swe-agent")


class Engine(scripted.ScriptedEngine):
    """Keeps the seeds of its requests."""

    def __init__(self) -> None:
        super().__init__(Script(), "m")
        self.seeds: list[Any] = []

    async def _reply(
        self, body: Mapping[str, Any], answer: ScriptedAnswer, prompt: list[int], *, chat: bool
    ) -> web.Response:
        self.seeds.append(body.get("seed"))
        return await super()._reply(body, answer, prompt, chat=chat)


@pytest.mark.parametrize("protocol", ["plain", "text"])
@in_loop
async def test_every_call_is_asked_for_with_the_rollouts_seed_and_its_number(protocol: str) -> None:
    engine, body = Engine(), {"messages": conversation("hello"), "model": "m"}
    async with gateway_before(engine, protocol) as gateway:
        model = await gateway.open("a", "default", seed=2**31 - 2)
        for seed in (None, None, 5, None):
            status, _ = await call(model, {**body, "seed": seed} if seed else body)
            assert status == 200
        await gateway.close("a")
        assert (await call(await gateway.open("b", "default"), body))[0] == 200
    # Two at the end of the range, the agent's own seed, one from the start of the range; then a rollout without a seed.
    assert engine.seeds == [2**31 - 2, 2**31 - 1, 5, 1, None]


def test_a_rollouts_seed_follows_from_campaign_rollout_and_attempt_alone() -> None:
    seed = ROLLOUT.seed(7, 0)
    assert seed == 1931901276 == Rollout("sum", "default", 3, "another agent").seed(7, 0)
    others = [ROLLOUT.seed(8, 0), ROLLOUT.seed(7, 1)]
    others += [Rollout("sum", "default", n, "").seed(7, 0) for n in range(1000) if n != 3]
    assert len({seed, *others}) == 1 + len(others)
    assert all(0 <= other < 2**31 for other in others)
