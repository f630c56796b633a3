"""OpenHands, unmodified, repairs a file by its own tools in a sandbox that reaches only the gateway.

It is not part of the suite, because it needs half a gigabyte. Run ``launchers/agents.sh openhands``, then
``launchers/test tests/agents/openhands.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.agents.command import PACKAGES
from tests.support.programs import repair, train_with_programs

OLD, NEW = "return a - b", "return a + b"
ANSWERS = [
    {"text": "I look first.", "tool": "terminal", "arguments": {"command": "cat calc.py", "summary": "look"}},
    {
        "reasoning": "It subtracts.",
        "tool": "file_editor",
        "arguments": {
            "command": "str_replace",
            "path": "/calc.py",
            "old_str": OLD,
            "new_str": NEW,
            "summary": "repair",
        },
    },
    {"tool": "finish", "arguments": {"message": "add() adds now.", "summary": "done"}},
]


def test_openhands_repairs_a_file_and_is_recorded_as_one_sequence(
    tmp_path: Path, base_sif: Path, make_task: Callable[..., Path]
) -> None:
    task = make_task(
        tmp_path / "tasks", "calc", test="python3 -c 'import calc; assert calc.add(2, 3) == 5'", agent_s=300
    )
    (task / "instruction.md").write_text("calc.add() must add: repair it.\n")
    (task / "environment" / "README").unlink()
    (task / "environment" / "calc.py").write_text(f"def add(a, b):\n    {OLD}\n")
    script = {"tasks": [{"when": "calc.add() must add", "answers": ANSWERS}]}
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump(script))
    campaign = {
        "name": "openhands",
        "tasks": "tasks/*",
        "agent": "openhands",
        "model": {"engine": "scripted", "script": "answers.yaml"},
        "environment": {"network": "gateway", "images": {"base": str(base_sif)}},
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(campaign))
    command = [sys.executable, "-m", "megaflow_hpc", "run", str(tmp_path / "campaign.yaml"), "--launcher", "local"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr
    with open_trajectories(json.loads(done.stdout)["run"]) as store:
        (found,) = store
        assert (found.status, found.reward, found.error) == ("completed", 1.0, "")
        assert [turn.sequence for turn in found.turns] == [0, 0, 0]
        assert [len(m.get("tool_calls") or ()) for m in found.messages if m["role"] == "assistant"] == [1, 1, 1]


def test_five_programs_feed_one_training_step(
    tmp_path: Path, base_sif: Path, make_task: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {**{agent: repair(agent) for agent in PACKAGES}, "openhands": ANSWERS}
    train_with_programs(tmp_path, base_sif, make_task, monkeypatch, answers)
