from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaflow_hpc.agents import NAMES, create
from megaflow_hpc.agents.command import PACKAGES, PYTHON_PACKAGES
from megaflow_hpc.agents.registry import result_of
from megaflow_hpc.errors import ConfigError, UserCodeError
from megaflow_hpc.types import AgentResult, ModelEndpoint, Task
from tests.support.local_sandbox import LocalSandbox


class Mine:
    """A user's agent."""

    def __init__(self, word: str, max_turns: int | None = None) -> None:
        self.word, self.max_turns = word, max_turns

    async def run(self, task: Task, sandbox: object, model: ModelEndpoint | None) -> AgentResult:
        return AgentResult(error=f"{self.word} {self.max_turns}")


def spec(name: str, **args: object) -> dict:
    return {"name": name, "max_turns": 7, "timeout_s": 5.0, "args": args}


def task(tmp_path: Path, **fields: object) -> Task:
    return Task(**{"id": "t", "instruction": "do it", "image": "base", "path": str(tmp_path / "task"), **fields})


def test_every_name_makes_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the agents of a tool box that contains all of them."""
    for name, package in {**PACKAGES, **PYTHON_PACKAGES}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".complete").write_text(package)
    monkeypatch.setenv("MEGAFLOW_AGENTS", str(tmp_path))
    args = {"command": {"command": "true"}, "replay": {"commands": ["true"]}}
    for name in NAMES:
        assert create(spec(name, **args.get(name, {})))


def test_a_dotted_name_makes_the_users_own_with_its_args() -> None:
    agent = create(SimpleNamespace(name=f"{__name__}:Mine", max_turns=3, timeout_s=None, args={"word": "hello"}))
    assert asyncio.run(agent.run(None, None, None)).error == "hello 3"


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("mini-swe", {}, r"'mini-swe' is unknown .did you mean mini-swe-agent\?.; expected one of oracle, nop, mini"),
        ("nowhere.at:All", {}, "cannot be imported"),
        ("os.path:Missing", {}, "has no Missing"),
        ("pathlib:Path", {}, "has no 'async def run"),
        ("mini-swe-agent", {"colour": 1}, "unexpected keyword argument 'colour'.*command_timeout_s"),
        ("command", {}, "either command .* or preset"),
        ("command", {"command": ""}, "must be shell text"),
        ("replay", {}, "expected either messages_file or commands"),
    ],
)
def test_mistakes_are_named(name: str, args: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(spec(name, **args))


def test_nop_touches_nothing(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path / "box")
    assert asyncio.run(create(spec("nop")).run(task(tmp_path), sandbox, None)) == AgentResult()
    assert not list(sandbox.work.iterdir())


def test_oracle_runs_the_solution_in_the_work_directory(tmp_path: Path) -> None:
    solution = tmp_path / "task" / "solution"
    solution.mkdir(parents=True)
    (solution / "solve.sh").write_text("cat $(dirname $0)/data > answer; pwd\n")
    (solution / "data").write_text("42")
    sandbox = LocalSandbox(tmp_path / "box")
    result = asyncio.run(create(spec("oracle")).run(task(tmp_path), sandbox, None))
    assert (result.status, result.exit_code) == ("completed", 0)
    assert (sandbox.work / "answer").read_text() == "42"


def test_an_oracle_whose_solution_fails_says_what_it_printed(tmp_path: Path) -> None:
    solution = tmp_path / "task" / "solution"
    solution.mkdir(parents=True)
    (solution / "solve.sh").write_text("echo no such hunk >&2; exit 3\n")
    result = asyncio.run(create(spec("oracle")).run(task(tmp_path), LocalSandbox(tmp_path / "box"), None))
    assert (result.status, result.exit_code) == ("completed", 3)
    assert "no such hunk" in result.error


def test_an_oracle_without_a_solution_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"solve\.sh"):
        asyncio.run(create(spec("oracle")).run(task(tmp_path), LocalSandbox(tmp_path / "box"), None))


def test_a_command_gets_task_and_model(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path / "box")
    command = 'echo "$OPENAI_BASE_URL $OPENAI_API_KEY $OPENAI_MODEL $MORE" > seen; cat; exit 4'
    agent = create(spec("command", command=command, env={"MORE": "x"}))
    result = asyncio.run(
        agent.run(task(tmp_path), sandbox, ModelEndpoint("http://host/v1", "k", "m", "http://127.0.0.1:1/r/a/v1"))
    )
    assert (sandbox.work / "seen").read_text() == "http://127.0.0.1:1/r/a/v1 k m x\n"
    assert (sandbox.root / "tmp/megaflow-instruction.md").read_text() == "do it"
    assert (result.status, result.exit_code) == ("completed", 4)


def test_replay_carries_the_commands_out_again(tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text(
        '[{"role": "user", "content": "```bash\\nno\\n```"},'
        ' {"role": "assistant", "content": "so\\n```mswea_bash_command\\necho 1 > a\\n```"}]'
    )
    sandbox = LocalSandbox(tmp_path / "box")
    asyncio.run(create(spec("replay", messages_file=str(file))).run(task(tmp_path), sandbox, None))
    assert (sandbox.work / "a").read_text() == "1\n"


def test_rewards_of_agents_are_finite_numbers() -> None:
    made = result_of("mine", AgentResult(turn_rewards=[1, 0.5], rewards={"right": True}))
    assert repr((made.turn_rewards, made.rewards)) == "([1.0, 0.5], {'right': 1.0})"
    values: list[Any] = [math.nan, None, "1", 1e39, -math.inf, 10**400]
    for value in values:
        for wrong in (AgentResult(turn_rewards=[value]), AgentResult(rewards={"right": value})):
            with pytest.raises(UserCodeError, match=r"agent mine: rewards and turn_rewards: reward '"):
                result_of("mine", wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rewards": {"r" * 1025: 1.0}},
        {"rewards": {"": 1.0}},
        {"rewards": {f"r{number}": 1.0 for number in range(1001)}},
        {"rewards": {"turn.0": 1.0}},
        {"messages": ["hello"]},
        {"error": ValueError("no")},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_result_that_no_trajectory_can_store_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserCodeError, match="agent mine: "):
        result_of("mine", AgentResult(**wrong))
