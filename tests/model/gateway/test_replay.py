"""A recorded campaign answers in the place of an engine: the second record is the first, byte for byte."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megaflow_hpc.bench.conversations import AGENTS, ChatAgent, RandomScript, _events
from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.engines.scripted.scale_out import SplitEngine
from megaflow_hpc.model.gateway.replay import Replay
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.types import Artifact, Recording, Trajectory
from tests.support.serving import in_loop


@dataclass
class Kept:
    """Recordings in memory, in the form in which a run directory gives them back."""

    rollouts: dict[str, Trajectory] = field(default_factory=dict)

    def trajectory(self, rollout_id: str) -> Trajectory | None:
        return self.rollouts.get(rollout_id)

    def keep(self, rollout_id: str, recording: Recording) -> None:
        task, policy, _ = rollout_id.rsplit("/", 2)
        lines = "".join(json.dumps(call) + "\n" for call in recording.raw).encode()
        trajectory = Trajectory(rollout_id, task, f"{task}/{policy}", policy, "a", "completed")
        trajectory.sequences, trajectory.turns = recording.sequences, recording.turns
        trajectory.messages, trajectory.artifacts = recording.messages, [Artifact("engine.jsonl", lines)]
        self.rollouts[rollout_id] = Trajectory.from_record(trajectory.to_record())


async def hold(gateway: ModelGateway, name: str, agent: ChatAgent, seed: int, turns: int = 5) -> Recording:
    """A conversation that depends on nothing but its seed and the answers."""
    chance = random.Random(seed)
    model = await gateway.open(name, name.split("/")[1])
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:
        for _ in range(turns):
            body = {"model": "m", **agent.body(), "stream": chance.random() < 0.5}
            async with session.post(model.base_url + agent.path, json=body) as response:
                text = await response.text()
                if response.status == 503:
                    raise ModelServiceError(text)
                assert response.status == 200, text
            answer = agent.whole(list(_events(text))) if body["stream"] else json.loads(text)
            agent.take(answer, [f"result {chance.random()}" for _ in range(3)])
    return await gateway.close(name)


def columns(recording: Recording) -> list[Any]:
    sequences = [
        [s.policy, *(column.tobytes() for column in (s.tokens, s.logprobs, s.loss_mask, s.weight_versions))]
        for s in recording.sequences
    ]
    turns = [(t.sequence, t.token_start, t.token_end, t.finish_reason, t.server) for t in recording.turns]
    return [sequences, turns, recording.messages]


async def recorded(kept: Kept, count: int) -> dict[str, list[Any]]:
    engine = SplitEngine(RandomScript(5), "m", drift=0.3, seed=5)
    runner = web.AppRunner(engine.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    record = {"server": "p.0", "policy": "p", "url": url, "key": "k", "model_name": "m", "protocol": "split"}
    first = {}
    async with ModelGateway() as gateway:
        gateway.update_endpoints([{**record, "weight_version": 3}])
        for number in range(count):
            name = f"t{number}/p/0"
            recording = await hold(gateway, name, AGENTS[number % 3](), number)
            kept.keep(name, recording)
            first[name] = columns(recording)
    await runner.cleanup()
    return first


@in_loop
async def test_a_replay_without_any_engine_is_recorded_byte_for_byte_like_the_first_run() -> None:
    kept = Kept()
    first = await recorded(kept, 6)
    async with ModelGateway(replays={"p": Replay(kept), "q": Replay(kept, policy="p")}, wait_s=0.1) as gateway:
        again = await asyncio.gather(*(hold(gateway, f"t{n}/p/0", AGENTS[n % 3](), n) for n in range(6)))
        assert {f"t{n}/p/0": columns(r) for n, r in enumerate(again)} == first
        assert all(r.protocols == {"replay": 5} for r in again)
        other = await hold(gateway, "t0/q/0", AGENTS[0](), 0)
        assert [s.tokens for s in other.sequences] == [s.tokens for s in again[0].sequences]
        second = await hold(gateway, "t1/p/0", AGENTS[1](), 1)  # a further attempt starts anew
        assert columns(second) == first["t1/p/0"]


@in_loop
async def test_an_agent_that_does_something_else_is_told_where_it_differs() -> None:
    kept = Kept()
    await recorded(kept, 1)
    async with ModelGateway(replays={"p": Replay(kept)}) as gateway:
        with pytest.raises(ModelServiceError, match="after 1 of its 5 calls"):
            await hold(gateway, "t0/p/0", AGENTS[0](), seed=99)
        assert "after 1 of its 5 calls" in gateway.trouble("t0/p/0")
        with pytest.raises(ModelServiceError, match="t7/p/0 is not among the recorded"):
            await hold(gateway, "t7/p/0", AGENTS[0](), seed=7)
    async with ModelGateway(replays={"p": Replay(kept, answer_diverged=True)}) as gateway:
        assert len((await hold(gateway, "t0/p/0", AGENTS[0](), seed=99)).turns) == 5


@in_loop
async def test_calls_whose_raw_answers_were_not_all_kept_are_named() -> None:
    kept = Kept()
    await recorded(kept, 1)
    (artifact,) = kept.rollouts["t0/p/0"].artifacts
    artifact.data = artifact.data[:-40]
    async with ModelGateway(replays={"p": Replay(kept)}) as gateway:
        with pytest.raises(ModelServiceError, match="4 of 5 calls were kept whole"):
            await hold(gateway, "t0/p/0", AGENTS[0](), seed=0)
