"""Answers by which the unmodified programs of others repair a file, and a training step by several of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.model.gateway.dialects import TABLES
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from megaflow_hpc.trajectory import CALLS_FILE, Trajectory
from tests.support.campaigns import run_local
from tests.support.places import ROOT
from tests.support.scripted import block
from tests.support.stand_in_trainer import interpreter

PATCH = """\
*** Begin Patch
*** Update File: calc.py
@@
-    return a - b
+    return a + b
*** End Patch"""
OLD, NEW = "return a - b", "return a + b"
REPAIR = "calc.add() must add"
"""Beginning of the task's instruction."""
SOLVED = "python3 -c 'import calc; assert calc.add(2, 3) == 5'"
"""Test of the task."""


def calc_task(make_task: Callable[..., Path], folder: Path, test: str) -> Path:
    """Write a task whose function ``calc.add`` subtracts."""
    task = make_task(folder / "tasks", "calc", test=test, agent_s=300)
    (task / "instruction.md").write_text(f"{REPAIR}: repair it.\n")
    (task / "environment" / "README").unlink()
    (task / "environment" / "calc.py").write_text(f"def add(a, b):\n    {OLD}\n")
    return task


def repair(agent: str) -> list[dict[str, Any]]:
    """Return a model's answers that read the file, repair it and report, by the tools of each program."""
    file, done = "/calc.py", {"text": "add() adds now.", "reasoning": "Nothing is left."}
    edit = {"file_path": file, "old_string": OLD, "new_string": NEW}
    if agent == "claude-code":
        look = {"text": "I look first.", "tool": "Read", "arguments": {"file_path": file}}
        return [look, {"tool": "Edit", "arguments": edit, "reasoning": "It subtracts."}, done]
    if agent == "qwen-code":
        look = {"text": "I look first.", "tool": "read_file", "arguments": {"file_path": file}}
        return [look, {"tool": "edit", "arguments": edit, "reasoning": "It subtracts."}, done]
    if agent == "gemini-cli":
        look = {"text": "I look first.", "tool": "read_file", "arguments": {"file_path": file}}
        edit |= {"instruction": "Add instead of subtracting."}
        return [look, {"tool": "replace", "arguments": edit, "reasoning": "It subtracts."}, done]
    if agent == "goose":
        look = {"text": "I look first.", "tool": "shell", "arguments": {"command": "cat calc.py"}}
        edit = {"path": file, "before": OLD, "after": NEW}
        return [look, {"tool": "edit", "arguments": edit, "reasoning": "It subtracts."}, done]
    if agent == "opencode":
        look = {"text": "I look first.", "tool": "read", "arguments": {"filePath": file}}
        edit = {"filePath": file, "oldString": OLD, "newString": NEW}
        return [look, {"tool": "edit", "arguments": edit, "reasoning": "It subtracts."}, done]
    if agent == "pi":
        look = {"text": "I look first.", "tool": "read", "arguments": {"path": file}}
        edit = {"path": file, "edits": [{"oldText": OLD, "newText": NEW}]}
        return [look, {"tool": "edit", "arguments": edit, "reasoning": "It subtracts."}, done]
    command = f"apply_patch <<'EOF'\n{PATCH}\nEOF"
    look = {"text": "I look first.", "tool": "exec_command", "arguments": {"cmd": "cat calc.py"}}
    return [look, {"tool": "exec_command", "arguments": {"cmd": command}, "reasoning": "It subtracts."}, done]


def used_apis(trajectory: Trajectory) -> set[str]:
    """Return the APIs that a rollout's calls used."""
    (lines,) = (one.data for one in trajectory.artifacts if one.name == CALLS_FILE)
    return {json.loads(line)["api"] for line in lines.splitlines()}


def documented_apis(agent: str) -> set[str]:
    """Return the APIs that docs/how-to/agents.md names for an agent."""
    page = (ROOT / "docs/how-to/agents.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{agent}` | `"))
    column = row.split(" | ")[2].replace(":streamGenerateContent", "/v1/models/MODEL:generateContent")
    return {api for api in TABLES if f"`/v1{api}`" in column}


SUB_AGENTS = {"claude-code": ("Agent", "Read"), "opencode": ("task", "read"), "qwen-code": ("agent", "read_file")}
"""Program → its tools that start a sub-agent and read a file."""


def delegation(agent: str, **more: Any) -> list[dict[str, Any]]:
    """Return the tasks of a script in which a program's agent starts a sub-agent, which reads the file.

    Args:
        more: further arguments of the tool that starts it.
    """
    start, read = SUB_AGENTS[agent]
    kind = {"claude-code": "general-purpose", "opencode": "general", "qwen-code": "general-purpose"}[agent]
    asks = {"description": "read calc.py", "prompt": "Report how calc.add() computes.", "subagent_type": kind, **more}
    path = "filePath" if agent == "opencode" else "file_path"
    reads = {"text": "I read.", "tool": read, "arguments": {path: "/calc.py"}}
    return [
        {"when": asks["prompt"], "answers": [reads, {"text": "It subtracts."}]},
        {
            "when": REPAIR,
            "answers": [{"text": "I ask.", "tool": start, "arguments": asks}, {"text": "It subtracts, I hear."}],
        },
    ]


def scaffold_answers(agents: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return a script whose answers depend on the tools that the agent's program offers.

    Pi's tools have the same names as OpenCode's, so its answers are found by its own system prompt, before the others.
    """
    commands = [f"sed -i 's/{OLD}/{NEW}/' /calc.py", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    programs = [{"when": REPAIR, "answers": answers} for name, answers in agents.items() if name != "pi"]
    if "pi" in agents:
        programs.insert(0, {"pattern": r"pi-coding-agent.*calc\.add\(\) must add", "answers": agents["pi"]})
    return {"tasks": programs, "default": [block(command) for command in commands]}


def train_with_programs(
    tmp_path: Path,
    base_sif: Path,
    make_task: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    agents: Mapping[str, list[dict[str, Any]]],
) -> None:
    """Train one policy by mini-swe-agent and other programs, each in a group of its own, in one step."""
    names = ["mini-swe-agent", *agents]
    calc_task(make_task, tmp_path, SOLVED)
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump(scaffold_answers(agents)))
    campaign = {
        "name": "scaffolds",
        "tasks": "tasks/*",
        "agent": names,
        "samples": 2,
        "model": {"engine": "scripted", "script": "answers.yaml"},
        "environment": {"network": "gateway", "images": {"base": str(base_sif)}},
        "training": {"policies": {"default": {}}, "batch": len(names), "staleness": 0, "steps": 1},
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(campaign))
    monkeypatch.setenv("MEGAFLOW_TRAINER_PYTHON", str(interpreter(tmp_path / "python", dies=0)))
    result, done = run_local(tmp_path / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    run = RunDir(result["run"])
    plan = TrainingFiles(run, "default").read(StepPlan, 1)
    assert plan is not None
    assert {rollout.group.rpartition("+")[2]: rollout.reward for rollout in plan.rollouts} == dict.fromkeys(names, 1.0)
    assert Counter(rollout.agent for rollout in plan.rollouts) == dict.fromkeys(names, 2)
    with open_trajectories(run.path) as store:
        assert set(store.column("agent")) == set(names)
        for trajectory in store:
            assert (trajectory.status, trajectory.inexact, trajectory.constrained) == ("completed", 0, 0), trajectory.id
            assert {turn.sequence for turn in trajectory.turns} == {0}, trajectory.id
            (sequence,) = trajectory.sequences
            mask = np.asarray(sequence.loss_mask, bool)
            assert mask.any(), trajectory.id
            assert np.isfinite(np.asarray(sequence.logprobs)[mask]).all(), trajectory.id
