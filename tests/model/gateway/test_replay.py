"""A recorded campaign answers instead of an engine. The second recording equals the first, byte for byte."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from megaflow_hpc.agents import ask
from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.recorder import Recorder, SampledTokens
from megaflow_hpc.model.gateway.replay import Replay, calls_artifact
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording, Trajectory
from tests.support.conversations import AGENTS, ChatAgent, RandomScript, events
from tests.support.serving import call_failure, endpoint, in_loop, listening
from tests.support.split_engine import SplitEngine


@dataclass
class Kept:
    """Recordings in memory, in the form in which a run directory returns them."""

    rollouts: dict[str, Trajectory] = field(default_factory=dict)

    def trajectory(self, rollout_id: str) -> Trajectory | None:
        return self.rollouts.get(rollout_id)

    def keep(self, rollout_id: str, recording: Recording) -> None:
        task, policy, _ = rollout_id.rsplit("/", 2)
        trajectory = Trajectory(rollout_id, task, f"{task}/{policy}", policy, "a", "completed")
        trajectory.sequences, trajectory.turns = recording.sequences, recording.turns
        trajectory.messages, trajectory.parents = recording.messages, recording.parents
        trajectory.artifacts = [calls_artifact(recording)]
        self.rollouts[rollout_id] = Trajectory.from_record(trajectory.to_record())


async def hold(gateway: ModelGateway, name: str, agent: ChatAgent, seed: int, turns: int = 5) -> Recording:
    """Holds a conversation that depends only on its seed and the answers."""
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
            answer = agent.whole(list(events(text))) if body["stream"] else json.loads(text)
            agent.take(answer, [f"result {chance.random()}" for _ in range(3)])
    return await gateway.close(name)


def columns(recording: Recording | Trajectory) -> list[Any]:
    sequences = [
        [s.policy, *(column.tobytes() for column in (s.tokens, s.logprobs, s.loss_mask, s.weight_versions))]
        for s in recording.sequences
    ]
    turns = [(t.sequence, t.token_start, t.token_end, t.finish_reason, t.server) for t in recording.turns]
    return [sequences, turns, recording.messages]


async def recorded(kept: Kept, count: int) -> dict[str, list[Any]]:
    engine = SplitEngine(RandomScript(5), "m", drift=0.3, seed=5)
    first = {}
    async with listening(engine.application()) as port, ModelGateway() as gateway:
        gateway.update_endpoints([endpoint(port, protocol="split", weight_version=3)])
        for number in range(count):
            name = f"t{number}/p/0"
            recording = await hold(gateway, name, AGENTS[number % 3](), number)
            kept.keep(name, recording)
            first[name] = columns(recording)
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
        second = await hold(gateway, "t1/p/0", AGENTS[1](), 1)  # a further attempt starts from the beginning
        assert columns(second) == first["t1/p/0"]


@in_loop
async def test_roles_that_were_asked_the_same_get_their_own_answers() -> None:
    kept, roles = Kept(), {"left": "p", "right": "q", "third": "q"}

    async def asked(gateway: ModelGateway) -> tuple[list[str], Recording]:
        model = await gateway.open("t/p/0", "p")
        said = [(await ask(model, "Say it.", role)).text for role in roles]
        return said, await gateway.close("t/p/0")

    engines = [SplitEngine(RandomScript(seed), "m", seed=seed) for seed in (1, 2)]
    async with (
        listening(engines[0].application()) as one,
        listening(engines[1].application()) as two,
        ModelGateway(roles=roles, owner="left") as gateway,
    ):
        gateway.update_endpoints([endpoint(one, "p", protocol="split"), endpoint(two, "q", protocol="split")])
        said, recording = await asked(gateway)
        assert len(set(said)) == 3
    kept.keep("t/p/0", recording)
    async with ModelGateway(roles=roles, owner="left", replays={"p": Replay(kept), "q": Replay(kept)}) as gateway:
        again, second = await asked(gateway)
    assert again == said
    assert columns(second) == columns(recording)


@in_loop
async def test_an_agent_that_does_something_else_is_told_where_it_differs() -> None:
    kept = Kept()
    await recorded(kept, 1)
    async with ModelGateway(replays={"p": Replay(kept)}) as gateway:
        with pytest.raises(ModelServiceError, match="after 1 of its 5 calls"):
            await hold(gateway, "t0/p/0", AGENTS[0](), seed=99)
        assert "after 1 of its 5 calls" in call_failure(gateway, "t0/p/0")
        with pytest.raises(ModelServiceError, match="t7/p/0 was not recorded"):
            await hold(gateway, "t7/p/0", AGENTS[0](), seed=7)
    async with ModelGateway(replays={"p": Replay(kept, answer_diverged=True)}) as gateway:
        assert len((await hold(gateway, "t0/p/0", AGENTS[0](), seed=99)).turns) == 5


@in_loop
async def test_calls_whose_answers_were_not_all_kept_are_named() -> None:
    kept = Kept()
    await recorded(kept, 1)
    (artifact,) = kept.rollouts["t0/p/0"].artifacts
    artifact.data = artifact.data[:-40]
    async with ModelGateway(replays={"p": Replay(kept)}) as gateway:
        with pytest.raises(ModelServiceError, match="only 4 of 5 calls were recorded completely"):
            await hold(gateway, "t0/p/0", AGENTS[0](), seed=0)


@in_loop
async def test_a_rollout_is_replayed_whatever_its_length() -> None:
    recorder, messages = Recorder("p"), [{"role": "user", "content": "go"}]
    chance = random.Random(1)
    for number in range(12):
        ids, text = [chance.randrange(1 << 17) for _ in range(30_000)], f"answer {number} é " * 9000
        prompt = [*recorder.recording.sequences[0].tokens, 7] if number else [1, 2]
        answer = {"role": "assistant", "content": text}
        scores = [chance.uniform(-9, 0) for _ in ids]
        spans = [(number, 10_000), (number + 1, len(ids))]
        recorder.add(
            SampledTokens(prompt, ids, scores, text, "stop", number, spans, "p.0", answer, f"r{number}"), messages
        )
        messages = [*messages, answer, {"role": "user", "content": "on"}]
    kept = Kept()
    kept.keep("t0/p/0", recorder.finish())
    first = columns(kept.rollouts["t0/p/0"])
    (artifact,) = kept.rollouts["t0/p/0"].artifacts
    said = sum(len(m["content"].encode()) for m in messages if m["role"] == "assistant")
    assert len(artifact.data) < said + 12 * 200  # nothing but what was said, once
    async with ModelGateway(replays={"p": Replay(kept)}) as gateway:
        model = await gateway.open("t0/p/0", "p")
        said_again, conversation = [], [{"role": "user", "content": "go"}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:
            for _ in range(12):
                body = {"model": "m", "messages": conversation}
                async with session.post(f"{model.base_url}/chat/completions", json=body) as response:
                    answer = (await response.json())["choices"][0]["message"]
                said_again.append(answer)
                conversation = [*conversation, answer, {"role": "user", "content": "on"}]
        recording = await gateway.close("t0/p/0")
    assert [a["content"] for a in said_again] == [m["content"] for m in messages if m["role"] == "assistant"]
    assert columns(recording) == first
