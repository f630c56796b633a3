"""Validation judges a task as a campaign does: the same steps, limits and defaults."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.agents.without_model import OracleAgent
from megaflow_hpc.cli import main
from megaflow_hpc.config import AgentConfig, CampaignConfig, Policy
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.rollout import run_attempt
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.validation import Validation, validate
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Limits, Rollout, Task
from tests.support.harbor_tasks import write_files

TOML = '[environment]\ndocker_image = "base"\nworkdir = "/app"\n'
BUSY = """\
[ -e answer ] || { echo 0 > /logs/verifier/reward.txt; exit; }
python3 -c 'import time\nwhile time.process_time() < 6: bytearray(3 << 27)' && cat answer > /logs/verifier/reward.txt
"""
"""With an answer, these tests use more CPU time and memory than the limits below allow."""


def busy_task(path: Path) -> Path:
    files = {"task.toml": TOML, "instruction.md": "Write 1 into answer.\n", "tests/test.sh": BUSY}
    return write_files(path, {**files, "solution/solve.sh": "echo 1 > answer\n"})


def without_amounts(error: str) -> str:
    """Leave out the measured amounts, because two runs are stopped at different ones."""
    return re.sub(r"\d+ of", "N of", error)


def judged(
    task: Task, images: dict[str, str], environment: dict[str, Any], scratch: Path
) -> tuple[Trajectory, Validation]:
    """Return the verdicts of a campaign and of validation on the task with its own solution."""
    fields = {"name": "x", "tasks": "x", "agent": "oracle", "environment": {"network": "none", **environment}}
    config = CampaignConfig.model_validate(fields)
    policies = {"oracle": Policy(agents=(AgentConfig(name="oracle"),))}

    async def main() -> tuple[Trajectory, Validation]:
        async with ApptainerProvider(scratch) as provider:
            services = Services(config, policies, images, provider, ModelGateway())
            rollout = Rollout(task.id, "oracle", 0, "oracle")
            validations = validate([task], images, OracleAgent(), provider, config.environment)
            attempt, validation = await asyncio.gather(run_attempt(services, rollout, task, 0), anext(validations))
            await validations.aclose()
            return attempt.trajectory, validation

    try:
        return asyncio.run(main())
    finally:
        remove_tree(scratch)


@pytest.mark.parametrize(
    ("limits", "environment", "exceeded"),
    [
        (Limits(cpu_s=1.0), {}, "cpu time limit: 1 of 1 s"),
        (Limits(), {"limits": {"memory_mb": 100}}, "memory limit"),
    ],
    ids=["task", "campaign"],
)
def test_limits_of_task_and_campaign_hold_for_both(
    limits: Limits, environment: dict[str, Any], exceeded: str, rootfs: str, tmp_path: Path
) -> None:
    task = replace(read_harbor_task(busy_task(tmp_path / "busy")), limits=limits)
    trajectory, found = judged(task, {"base": rootfs}, environment, tmp_path / "scratch")
    assert (trajectory.status, trajectory.error_kind, trajectory.reward) == ("completed", "verifier", 0.0)
    assert found.after.reward == 0.0
    assert without_amounts(found.after.error) == without_amounts(trajectory.error)
    assert found.problems[-1] == f"with the solution: {found.after.error}"
    assert exceeded in found.after.output


def test_tasks_validate_takes_limits_and_images_from_a_campaign(
    rootfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path / "scratch"))
    busy_task(tmp_path / "tasks" / "busy")
    campaign = tmp_path / "campaign.yaml"
    environment = {"network": "none", "limits": {"memory_mb": 100}, "images": {"base": rootfs}}
    campaign.write_text(json.dumps({"name": "x", "tasks": "tasks/*", "agent": "oracle", "environment": environment}))
    assert main(["tasks", "validate", str(tmp_path / "tasks"), "--campaign", str(campaign), "--json"]) == 1
    (evidence,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (evidence["reward_after"], evidence["valid"]) == (0.0, False)
    assert any("memory limit" in problem for problem in evidence["problems"])
    remove_tree(tmp_path / "scratch")


MODULE = """\
class Answer:
    image, workdir, instruction = "base", "/app", "Write 42 to the file answer."

    async def setup(self, sandbox):
        await sandbox.exec(["mkdir", "-p", "/app"], cwd="/")

    async def solve(self, sandbox):
        await sandbox.exec(["sh", "-c", "echo 42 > /app/answer"])

    async def score(self, sandbox):
        return float((await sandbox.exec(["grep", "-q", "42", "/app/answer"])).exit_code == 0)
"""


def test_tasks_validate_takes_whatever_a_campaign_names(
    rootfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.chdir(tmp_path)
    for name in ("a1", "a2", "b1"):
        assert main(["tasks", "new", name]) == 0
    (tmp_path / "answers.py").write_text(MODULE)

    def valid(*words: str) -> list[str]:
        capsys.readouterr()
        assert main(["tasks", "validate", *words, "--image", rootfs, "--json"]) == 0
        return [task["task"] for task in json.loads(capsys.readouterr().out)["tasks"]]

    assert valid("tasks/a*") == ["a1", "a2"]
    assert valid("tasks/*", "--only", "b1") == ["b1"]
    assert valid("answers:Answer") == ["Answer"]
    assert main(["tasks", "validate", "tasks/*", "--only", "c", "--image", rootfs]) == 2
    assert "--only c: no such task in tasks/*; see: megaflow-hpc tasks list" in capsys.readouterr().err
    (tmp_path / "tasks" / "b1" / "task.toml").write_text("schema_version = 7\n")
    assert valid("tasks", "--only", "a1") == ["a1"]
    assert main(["tasks", "validate", "tasks", "--only", "b1", "--image", rootfs]) == 2
    assert "b1/task.toml:1: schema_version = 7" in capsys.readouterr().err
    (tmp_path / "tasks" / "a2" / "tests" / "test.sh").unlink()
    assert main(["tasks", "validate", "tasks", "--image", rootfs, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert ([task["task"] for task in result["tasks"]], result["valid"]) == (["a1"], False)
    assert sorted(line.partition("tasks/")[2][:2] for line in result["left_out"]) == ["a2", "b1"]
    remove_tree(tmp_path / "scratch")


def test_a_solution_runs_by_its_own_first_line_and_a_missing_network_is_named(
    rootfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path / "scratch"))
    tasks = tmp_path / "tasks"
    for name in ("awk", "fetching", "fetching-tests"):
        assert main(["tasks", "new", name, str(tasks)]) == 0
    (tasks / "awk/solution/solve.sh").write_text('#!/usr/bin/awk -f\nBEGIN { print 3 > "count.txt" }\n')
    fetch = "getent hosts example.org || { echo 'curl: (6) Could not resolve host: example.org'; exit 6; }\n"
    (tasks / "fetching/solution/solve.sh").write_text(f"#!/bin/bash\n{fetch}")
    judging = tasks / "fetching-tests/tests/test.sh"
    judging.write_text(f"#!/bin/bash\n({fetch})\necho 0 > /logs/verifier/reward.txt\n")
    capsys.readouterr()
    assert main(["tasks", "validate", str(tasks), "--image", rootfs, "--json"]) == 1
    found = {task["task"]: task["problems"] for task in json.loads(capsys.readouterr().out)["tasks"]}
    assert found["awk"] == []
    hint = "it printed 'Could not resolve host', and its sandbox has network: none; set environment: {network: host}"
    assert [hint in problem for problem in found["fetching"]] == [True]
    assert [hint in problem for problem in found["fetching-tests"]] == [True]
    remove_tree(tmp_path / "scratch")
