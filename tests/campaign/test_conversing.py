"""Tasks without a sandbox: agents of one's own converse, and no image is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.trajectory import Trajectory
from tests.support.campaigns import forked, run_local

TASKS = """\
class Sum:
    image = "none"

    def __init__(self, a, b):
        self.a, self.b = a, b
        self.instruction = f"What is {a} + {b}?"

    @classmethod
    def instances(cls):
        return {f"{cls.__name__.lower()}-{a}": {"a": a, "b": 2} for a in (1, 2)}

    async def score(self, sandbox, messages):
        return float(messages[-1]["content"] == "4")

class Touches(Sum):
    async def score(self, sandbox, messages):
        await sandbox.exec("true")
"""
TWO = ("sum", "touches")
AGENT = """\
import asyncio
import os
from shell_agent import ask
from megaflow_hpc.types import AgentResult

class Asks:
    async def run(self, task, sandbox, model):
        messages = [{"role": "user", "content": task.instruction}]
        ask(model, {"model": model.model_name, "messages": messages})

class Crashes:
    async def run(self, task, sandbox, model):
        os._exit(3)

class CrashesForOne(Asks):
    async def run(self, task, sandbox, model):
        await super().run(task, sandbox, model)
        await asyncio.sleep(0.5)
        if task.id == "sum-2":
            os._exit(3)

class Runs:
    async def run(self, task, sandbox, model):
        await sandbox.exec("true")
"""


def conversing(tmp_path: Path, agent: Any, *tasks: str) -> Path:
    """Write a campaign of two sums of each class, one of which is 4."""
    (tmp_path / "sums.py").write_text(TASKS)
    (tmp_path / "asks.py").write_text(AGENT)
    learning = Path(__file__).parents[2] / "launchers" / "learning" / "shell_agent.py"
    (tmp_path / "shell_agent.py").write_text(learning.read_text())
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": ["4"]}))
    fields = {
        "name": "sums",
        "tasks": [f"sums:{task}" for task in tasks or ("Sum",)],
        "agent": agent,
        "samples": 2,
        "model": {"engine": "scripted", "script": "answers.yaml"},
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(fields))
    return tmp_path / "campaign.yaml"


def no_sandbox(rollout: str) -> str:
    return f"task {rollout.partition('/')[0]} has no sandbox (image: none)"


@pytest.mark.slow
def test_a_campaign_without_images_in_which_a_crash_or_an_error_costs_no_other_rollout_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_APPTAINER", "/nowhere/apptainer")  # any look for it would be an error
    agents = [{"as": name.lower(), "name": f"asks:{name}"} for name in ("Asks", "CrashesForOne", "Crashes", "Runs")]
    result, done = run_local(conversing(tmp_path, agents, "Sum", "Touches"))
    assert result["state"] == "finished", done.stderr
    arms: dict[str, dict[str, Trajectory]] = {}
    with open_trajectories(result["run"]) as store:
        for row in store:
            arms.setdefault(row.id.partition("+")[2].partition("/")[0], {})[row.id] = row.trajectory()
    names = {arm: [f"{task}-{a}/default+{arm}/{n}" for task in TWO for a in (1, 2) for n in (0, 1)] for arm in arms}
    assert {arm: sorted(rows) for arm, rows in arms.items()} == names
    good, bad = ([arms[arm] for arm in pair] for pair in (("asks", "crashesforone"), ("crashes", "runs")))
    assert {row.status for rows in good for row in rows.values()} == {"completed"}
    assert {(row.status, row.reward) for rows in bad for row in rows.values()} == {("failed", None)}
    for name, row in arms["asks"].items():
        assert row.messages[0]["content"].startswith("What is")
        assert row.sequences
        assert row.reward == (1.0 if name.startswith("sum") else 0.0), "each is answered with 4"
        assert (no_sandbox(name) in row.error) == name.startswith("touches"), "its tests use one"
    assert all(no_sandbox(name) in row.error for name, row in arms["runs"].items())
    crash = "its process ended with exit code 3"
    assert all(crash in row.error for row in arms["crashes"].values())
    one = arms["crashesforone"]
    assert [len(row.turns) for row in one.values()] == [1] * 8, "what was recorded before a crash is left out"
    crashed = {name for name, row in one.items() if crash in row.error}
    assert crashed == {f"sum-2/default+crashesforone/{sample}" for sample in range(2)}
    assert crashed == {name for name, row in one.items() if row.error and not name.startswith("touches")}


def test_settings_of_a_sandbox_are_refused_without_one(tmp_path: Path) -> None:
    campaign = conversing(tmp_path, "asks:Asks")
    source = tmp_path / "sums.py"
    source.write_text(source.read_text().replace('image = "none"', 'image = "none"\n    network = "none"'))
    done = forked("check", campaign, "--no-site")
    assert done.returncode == 2
    assert "network: a task with image 'none' has no sandbox" in done.stdout + done.stderr


@pytest.mark.parametrize("agent", ["mini-swe-agent", {"name": "command", "args": {"command": "true"}}])
def test_agents_that_need_a_sandbox_are_refused(tmp_path: Path, agent: Any) -> None:
    done = forked("check", conversing(tmp_path, agent), "--no-site")
    assert done.returncode == 2
    assert "2 tasks have none (sum-1: image: none)" in done.stdout + done.stderr
