"""Several policies in one rollout: each is called by its name, and its tokens are recorded as its own."""

from __future__ import annotations

from typing import Any

import aiohttp

from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectories.reading.conversations import conversations
from megaflow_hpc.types import ModelEndpoint
from tests.support.serving import endpoint, in_loop, listening
from tests.support.split_engine import SplitEngine


async def ask(session: aiohttp.ClientSession, model: ModelEndpoint, name: str, messages: list[Any]) -> str:
    async with session.post(f"{model.base_url}/chat/completions", json={"model": name, "messages": messages}) as reply:
        found = await reply.json()
        assert reply.status == 200, found
        assert found["model"] == name
        return str(found["choices"][0]["message"]["content"])


@in_loop
async def test_a_debate_of_two_policies_is_two_sequences_each_of_its_own_policy_and_engine() -> None:
    engines = {
        policy: SplitEngine(Script(default=(ScriptedAnswer(f"I, the {policy}."),)), "m", drift=0.5)
        for policy in ("solver", "critic")
    }
    async with (
        listening(engines["solver"].application()) as solvers,
        listening(engines["critic"].application()) as critics,
        ModelGateway(policies=["solver", "critic"]) as gateway,
    ):
        ports = {"solver": solvers, "critic": critics}
        gateway.update_endpoints([endpoint(port, policy, protocol="split") for policy, port in ports.items()])
        model = await gateway.open("t/solver/0", "solver")
        solver: list[Any] = [{"role": "user", "content": "Solve it."}]
        critic: list[Any] = [{"role": "user", "content": "Solve it."}]  # the same text as the other conversation's
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.api_key}"}) as session:
            for turn in range(3):
                said = await ask(session, model, "solver" if turn else "gpt-4o", solver)
                solver += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
                against = await ask(session, model, "critic", critic)
                critic += [{"role": "assistant", "content": against}, {"role": "user", "content": "Go on."}]
                assert (said, against) == ("I, the solver.", "I, the critic.")
            async with session.get(f"{model.base_url}/models") as response:
                assert [card["id"] for card in (await response.json())["data"]] == ["solver", "critic"]
        recording = await gateway.close("t/solver/0")
    assert [s.policy for s in recording.sequences] == ["solver", "critic"]
    assert [t.server for t in recording.turns] == ["solver.0", "critic.0"] * 3
    for sequence in recording.sequences:
        prompt, sampled = engines[sequence.policy].log[-1]
        assert list(sequence.tokens) == [*prompt, *sampled]
    for number, (policy, calls) in enumerate({"solver": [0, 2, 4], "critic": [1, 3, 5]}.items()):
        found = conversations(recording.messages, recording.parents, recording.turns)[number]
        assert (found.policy, [call for call in found.turns if call is not None]) == (policy, calls)
        assert {m["content"] for m in found.messages if m["role"] == "assistant"} == {f"I, the {policy}."}
