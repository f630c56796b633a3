"""Tasks without a sandbox: agents of one's own converse, and no image is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import open_trajectories
from tests.support.campaigns import cli, run_local

TASKS = """\
class Sum:
    image = "none"

    def __init__(self, a, b):
        self.a, self.b = a, b
        self.instruction = f"What is {a} + {b}?"

    @classmethod
    def instances(cls):
        return {f"sum-{a}": {"a": a, "b": 2} for a in range(COUNT)}

    async def score(self, sandbox, messages):
        return float(messages[-1]["content"] == "4")

class Touches(Sum):
    async def score(self, sandbox, messages):
        await sandbox.exec("true")
"""
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


def conversing(tmp_path: Path, agent: Any = "asks:Asks", task: str = "Sum", count: int = 4) -> Path:
    """Write a campaign of sums, one of which is 4."""
    (tmp_path / "sums.py").write_text(TASKS.replace("COUNT", str(count)))
    (tmp_path / "asks.py").write_text(AGENT)
    learning = Path(__file__).parents[2] / "launchers" / "learning" / "shell_agent.py"
    (tmp_path / "shell_agent.py").write_text(learning.read_text())
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": ["4"]}))
    fields = {
        "name": "sums",
        "tasks": [f"sums:{task}"],
        "agent": agent,
        "samples": 2,
        "model": {"engine": "scripted", "script": "answers.yaml"},
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(fields))
    return tmp_path / "campaign.yaml"


@pytest.mark.slow
def test_a_campaign_without_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_APPTAINER", "/nowhere/apptainer")  # any look for it would be an error
    result, done = run_local(conversing(tmp_path))
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        rows = {row.id: row.trajectory() for row in store}
    assert sorted(rows) == [f"sum-{a}/default/{sample}" for a in range(4) for sample in range(2)]
    assert {row.status for row in rows.values()} == {"completed"}
    assert {name for name, row in rows.items() if row.reward == 1.0} == set(rows), "each is answered with 4"
    assert all(row.messages[0]["content"].startswith("What is") and row.sequences for row in rows.values())


@pytest.mark.slow
def test_a_crash_costs_no_other_rollout_its_result(tmp_path: Path) -> None:
    result, done = run_local(conversing(tmp_path, "asks:CrashesForOne"))
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        rows = {row.id: row.trajectory() for row in store}
    assert {row.status for row in rows.values()} == {"completed"}
    assert [len(row.turns) for row in rows.values()] == [1] * 8, "what was recorded before a crash is left out"
    errors = {name for name, row in rows.items() if "its process ended with exit code 3" in row.error}
    assert errors == {"sum-2/default/0", "sum-2/default/1"} == {name for name, row in rows.items() if row.error}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "task", "status", "error"),
    [
        ("asks:Crashes", "Sum", "failed", "its process ended with exit code 3"),
        ("asks:Runs", "Sum", "failed", "task sum-0 has no sandbox (image: none)"),
        ("asks:Asks", "Touches", "completed", "task sum-0 has no sandbox (image: none)"),
    ],
)
def test_errors_of_agents_and_tasks_cost_their_rollouts(
    tmp_path: Path, agent: str, task: str, status: str, error: str
) -> None:
    result, _ = run_local(conversing(tmp_path, agent, task, count=1))
    with open_trajectories(result["run"]) as store:
        rows = [row.trajectory() for row in store]
    assert [row.status for row in rows] == [status] * 2
    assert all(error in row.error for row in rows)
    assert {row.reward for row in rows} == ({None} if status == "failed" else {0.0})


def test_settings_of_a_sandbox_are_refused_without_one(tmp_path: Path) -> None:
    campaign = conversing(tmp_path)
    source = tmp_path / "sums.py"
    source.write_text(source.read_text().replace('image = "none"', 'image = "none"\n    network = "none"'))
    done = cli("check", campaign, "--no-site")
    assert done.returncode == 2
    assert "network: a task with image 'none' has no sandbox" in done.stdout + done.stderr


@pytest.mark.parametrize("agent", ["mini-swe-agent", {"name": "command", "args": {"command": "true"}}])
def test_agents_that_need_a_sandbox_are_refused(tmp_path: Path, agent: Any) -> None:
    done = cli("check", conversing(tmp_path, agent), "--no-site")
    assert done.returncode == 2
    assert "4 tasks have none (sum-0: image: none)" in done.stdout + done.stderr
