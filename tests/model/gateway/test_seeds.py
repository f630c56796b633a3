"""Sampling seeds: what an engine is asked for follows from the campaign, the rollout, the attempt and the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from megaflow_hpc.model.engines.scripted import engine as scripted
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.types import Rollout
from tests.support.serving import call, conversation, in_loop

ROLLOUT = Rollout("sum", "default", 3, "mini-swe-agent")


class Engine(scripted.ScriptedEngine):
    """Keeps the seeds that it was asked for."""

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
    engine = Engine()
    runner = web.AppRunner(engine.application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    record = {"server": "s", "policy": "default", "url": f"http://127.0.0.1:{runner.addresses[0][1]}", "key": "k"}
    body = {"messages": conversation("hello"), "model": "m"}
    try:
        async with ModelGateway() as gateway:
            gateway.update_endpoints([{**record, "model_name": "m", "protocol": protocol}])
            model = await gateway.open("a", "default", seed=2**31 - 2)
            for seed in (None, None, 5, None):
                status, _ = await call(model, {**body, "seed": seed} if seed else body)
                assert status == 200
            await gateway.close("a")
            assert (await call(await gateway.open("b", "default"), body))[0] == 200
    finally:
        await runner.cleanup()
    # At the range's end, the agent's own wish, on from the range's start; then a rollout without a seed.
    assert engine.seeds == [2**31 - 2, 2**31 - 1, 5, 1, None]


def test_a_rollouts_seed_follows_from_campaign_rollout_and_attempt_alone() -> None:
    seed = ROLLOUT.seed(7, 0)
    assert seed == 1931901276 == Rollout("sum", "default", 3, "another agent").seed(7, 0)
    others = [ROLLOUT.seed(8, 0), ROLLOUT.seed(7, 1)]
    others += [Rollout("sum", "default", n, "").seed(7, 0) for n in range(1000) if n != 3]
    assert len({seed, *others}) == 1 + len(others)
    assert all(0 <= other < 2**31 for other in others)
