"""The example agents of a team: which role answers which call, and what the record says of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from megaflow_hpc.agents import ask
from megaflow_hpc.agents.teams import Debate, ModelRouter, PlannerExecutor, Recursive, SelfPlay, WriterChecker
from megaflow_hpc.errors import ModelServiceError, UserCodeError
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ScriptedTask
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.judges import by_role
from megaflow_hpc.trajectories.reading.conversations import Conversation, conversations, heading, main
from megaflow_hpc.trajectory import Recording, Trajectory
from megaflow_hpc.types import STARTED_BY_HEADER, Agent, CallBudget, ExecResult, ModelEndpoint, Rollout, Task
from tests.support.serving import endpoint, listening
from tests.support.split_engine import SplitEngine

Answers = Mapping[str, str | list[str]]
"""Pattern of a conversation → answers in order."""


class Team:
    """A gateway with an engine for each policy, whose answers are scripted.

    Args:
        answers: policy → its answers.
        roles: role → policy. The first one owns the rollout.
    """

    def __init__(self, answers: Mapping[str, Answers], roles: Mapping[str, str], **gateway: Any) -> None:
        self._scripts = {policy: script(own) for policy, own in answers.items()}
        self._gateway = {"roles": roles, "owner": next(iter(roles), ""), **gateway}
        self._stack = AsyncExitStack()
        self.recording = Recording()

    async def __aenter__(self) -> ModelEndpoint:
        records = []
        for policy, own in self._scripts.items():
            port = await self._stack.enter_async_context(listening(SplitEngine(own, policy).application()))
            records.append(endpoint(port, policy, protocol="split", model_name=policy))
        self.gateway = await self._stack.enter_async_context(
            ModelGateway(policies=list(self._scripts), wait_s=1, **self._gateway)
        )
        self.gateway.update_endpoints(records)
        policy = next(iter(self._gateway["roles"].values()), next(iter(self._scripts)))
        return await self.gateway.open("t/p/0", policy, budget=CallBudget(calls=20))

    async def __aexit__(self, *_: object) -> None:
        self.recording = await self.gateway.close("t/p/0")
        await self._stack.aclose()

    @property
    def roles(self) -> list[str]:
        """Role and policy of each call."""
        return [f"{turn.role}:{turn.policy}" for turn in self.recording.turns]

    @property
    def conversations(self) -> list[Conversation]:
        return conversations(self.recording.messages, self.recording.parents, self.recording.turns)


def script(answers: Answers) -> Script:
    tasks = [
        ScriptedTask(re.compile(pattern), tuple(map(ScriptedAnswer, [said] if isinstance(said, str) else said)))
        for pattern, said in answers.items()
    ]
    return Script(tuple(tasks))


class Shell:
    """A sandbox that counts its commands."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        self.commands.append(command)
        return ExecResult(0, b"done")


async def run(agent: Agent, team: Team, instruction: str = "2 + 2?", sandbox: Any = None) -> list[dict[str, Any]]:
    async with team as model:
        result = await agent.run(Task("t", instruction, "", ""), sandbox, model)
    return result.messages


async def test_a_rejected_answer_is_corrected_and_each_role_has_its_own_sequences() -> None:
    shared = {"right.*yes or no": "no", "rejects": ["5", "4"], "2 \\+ 2": "5"}
    team = Team({"one": shared}, {"writer": "one", "checker": "one"})
    messages = await run(WriterChecker(), team)
    assert [message["content"] for message in messages if message["role"] == "assistant"] == ["5", "4"]
    assert team.roles == ["writer:one", "checker:one", "writer:one", "checker:one"]
    assert [turn.sequence for turn in team.recording.turns] == [0, 1, 0, 2], "the writer's two turns are one sequence"


async def test_roles_of_one_policy_share_no_sequence_even_with_equal_prompts() -> None:
    team = Team({"one": {"Say": "yes"}}, {"left": "one", "right": "one"})
    async with team as model:
        for role in ("left", "right", "left"):
            assert (await ask(model, "Say it.", role)).text == "yes"
    assert len(team.recording.sequences) == 3
    assert team.roles == ["left:one", "right:one", "left:one"]


async def test_an_unknown_name_and_no_name_call_the_owner() -> None:
    team = Team({"one": {"": "1"}, "two": {"": "2"}}, {"writer": "one", "checker": "two"})
    async with team as model:
        assert model.model_name == "writer"
        said = [(await ask(model, "Say it.", role)).text for role in ("", "gpt-4o", "one", "two", "checker")]
        headers = {"Authorization": f"Bearer {model.api_key}"}
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{model.base_url}/models", headers=headers) as response:
                assert [card["id"] for card in (await response.json())["data"]] == ["writer", "checker"]
    assert said == ["1", "1", "1", "1", "2"], "names of policies are not roles"


async def test_a_planner_and_an_executor_in_a_sandbox() -> None:
    executor = {"Solve this": ["```bash\ntouch a\n```", "It is done."]}
    team, shell = (
        Team({"big": {"Plan": "touch a"}, "small": executor}, {"planner": "big", "executor": "small"}),
        Shell(),
    )
    await run(PlannerExecutor(), team, sandbox=shell)
    assert team.roles == ["planner:big", "executor:small", "executor:small"]
    assert shell.commands == ["touch a\n"]


async def test_a_debate_with_a_judge() -> None:
    answers = {"one": {"Argue for": "It is."}, "two": {"Argue against": "It is not."}, "three": {"true": "Hm.\nYes"}}
    team = Team(answers, {"pro": "one", "contra": "two", "judge": "three"})
    messages = await run(Debate(rounds=1), team)
    assert "pro: It is.\n\ncontra: It is not." in messages[0]["content"]
    assert team.roles == ["pro:one", "contra:two", "judge:three"]


async def test_a_policy_plays_against_itself() -> None:
    team = Team({"new": {"2": ["a", "b"]}, "old": {"2": ["A", "B"]}}, {"player": "new", "opponent": "old"})
    messages = await run(SelfPlay(rounds=2), team)
    assert [message["content"] for message in messages] == ["2 + 2?", "a", "A", "b", "B"]
    assert team.roles == ["player:new", "opponent:old"] * 2
    trajectory = Trajectory.begin(Rollout("t", "new", 0, "a"), 0, "completed")
    trajectory.messages, trajectory.parents = team.recording.messages, team.recording.parents
    trajectory.turns = team.recording.turns
    assert [m["content"] for m in by_role(trajectory)["opponent"]] == ["2 + 2?", "a", "A", "b", "B"]


async def test_roles_that_continue_one_conversation_each_have_their_own_latest_one() -> None:
    team = Team({"one": {"Say": "a"}, "two": {"Say": "b"}}, {"left": "one", "right": "two"})
    async with team as model:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Say it."}]
        for role in ("left", "right"):
            messages.append((await ask(model, messages, role)).message)
    trajectory = Trajectory.begin(Rollout("t", "one", 0, "a"), 0, "completed")
    trajectory.messages, trajectory.parents = team.recording.messages, team.recording.parents
    trajectory.turns = team.recording.turns
    said = {role: [message["content"] for message in own] for role, own in by_role(trajectory).items()}
    assert said == {"left": ["Say it.", "a"], "right": ["Say it.", "a", "b"]}
    (both,) = team.conversations
    assert heading(0, both) == "conversation 0: 2 calls, by left (policy one) and right (policy two), the first one"
    part = replace(both, policy="one", speakers=(("left", "one"),), turns=[None, 2])
    assert main([both, part], "one") == 0, "also if another policy had the last word"


async def test_parts_of_a_question_are_a_tree_with_the_calls_that_started_them() -> None:
    answers = {
        "solver": {
            "two\\?": "2",
            "three\\?": "PART: one?\nPART: two?",
            "one\\?\nAnswer": "1",
            "2 \\+ 2": ["PART: three?\nPART: two?", "4"],
        }
    }
    team = Team({"default": answers["solver"]}, {"solver": "default"})
    await run(Recursive(depth=2), team)
    by_question = {one.messages[0]["content"].partition("\n")[0]: one for one in team.conversations}
    assert by_question["2 + 2?"].depth == 0
    assert (by_question["three?"].depth, by_question["three?"].started_by) == (1, 0)
    assert by_question["one?"].depth == 2
    inner = next(n for n, turn in enumerate(team.recording.turns) if "three?" in _question(team.recording, n))
    assert by_question["one?"].started_by == inner
    number = team.conversations.index(by_question["one?"])
    assert "role solver, policy default" in heading(number, by_question["one?"])


def _question(recording: Recording, call: int) -> str:
    node = recording.turns[call].message
    while recording.parents[node] >= 0:
        node = recording.parents[node]
    return str(recording.messages[node]["content"])


@pytest.mark.parametrize(("said", "chosen"), [("hard.\nyes", "large"), ("no", "small"), ("", "small")])
async def test_a_router_between_a_small_and_a_large_model(said: str, chosen: str) -> None:
    answers = {"r": {"hard": said}, "s": {"2": "4"}, "l": {"2": "4"}}
    team = Team(answers, {"router": "r", "small": "s", "large": "l"})
    await run(ModelRouter(), team)
    assert [role.partition(":")[0] for role in team.roles] == ["router", chosen]


async def test_a_call_that_was_not_made_cannot_have_started_another() -> None:
    async with Team({"one": {"": "1"}}, {}) as model:
        first = await ask(model, "Say it.")
        assert first.call == 0
        assert (await ask(model, "Say it.", n=2)).call == 1, "its engine gives one answer only"
        for named in ("2", "-1", "x", "9" * 20, "٣"):
            headers = {"Authorization": f"Bearer {model.api_key}", STARTED_BY_HEADER: named}
            body = {"model": "", "messages": [{"role": "user", "content": "Say it."}]}
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{model.base_url}/chat/completions", json=body, headers=headers) as response:
                    assert response.status == 400, await response.text()
                    assert "this rollout has calls 0 to 1" in (await response.json())["error"]["message"]


async def test_refused_calls_are_errors_of_the_request_or_of_the_service() -> None:
    team = Team({"one": {"": "1"}}, {})
    async with team as model:
        with pytest.raises(UserCodeError, match="HTTP 400"):
            await ask(model, [{"role": "nobody", "content": 1}])
        with pytest.raises(UserCodeError, match="ask takes no stream"):
            await ask(model, "Say it.", stream=True)
        for _ in range(20):
            await ask(model, "Say it.")
        with pytest.raises(ModelServiceError, match=r"HTTP 429.*has made its 20 model calls"):
            await ask(model, "Say it.")
    assert team.recording.over_budget


async def test_a_policy_with_rollouts_of_its_own_is_not_called_in_those_of_another() -> None:
    async with Team({"left": {"": "1"}, "right": {"": "2"}}, {}, learners=["left", "right"]) as model:
        assert (await ask(model, "Say it.", "left")).text == "1"
        with pytest.raises(UserCodeError, match=r"is trained on rollouts of its own alone.*section team"):
            await ask(model, "Say it.", "right")
