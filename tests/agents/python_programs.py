"""aider, OpenHands and Terminus 2, unmodified, repair a file in a sandbox that reaches only the gateway.

They are not part of the suite, because each needs 0.3 to 0.7 GB. Run
``launchers/agents.sh aider openhands terminus-2``, then ``launchers/test tests/agents/python_programs.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.agents.command import PACKAGES
from tests.support.campaigns import run_local
from tests.support.programs import (
    NEW,
    OLD,
    REPAIR,
    SOLVED,
    calc_task,
    documented_apis,
    repair,
    train_with_programs,
    used_apis,
)

EDIT = f"It subtracts.\n\ncalc.py\n```python\n<<<<<<< SEARCH\n    {OLD}\n=======\n    {NEW}\n>>>>>>> REPLACE\n```\n"


def terminal(plan: str, *commands: str, done: bool = False) -> str:
    """Return an answer in the format of Terminus 2."""
    typed = [{"keystrokes": f"{command}\n", "duration": 1.0} for command in commands]
    return json.dumps({"analysis": plan, "plan": plan, "commands": typed, "task_complete": done})


ANSWERS: dict[str, list[Any]] = {
    "aider": [EDIT],
    "openhands": [
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
    ],
    "terminus-2": [
        terminal("I look first.", "cat calc.py"),
        terminal("It subtracts.", f"sed -i 's/{OLD}/{NEW}/' calc.py", done=True),
        terminal("add() adds now.", done=True),
    ],
}


@pytest.mark.parametrize("agent", ANSWERS)
def test_each_program_repairs_a_file_and_is_recorded_as_one_sequence(
    tmp_path: Path, base_sif: Path, make_task: Callable[..., Path], agent: str
) -> None:
    """The table of agents and APIs in docs/how-to/agents.md is compared with these runs."""
    calc_task(make_task, tmp_path, SOLVED)
    script = {"tasks": [{"when": REPAIR, "answers": ANSWERS[agent]}]}
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump(script))
    campaign = {
        "name": "python-programs",
        "tasks": "tasks/*",
        "agent": agent,
        "model": {"engine": "scripted", "script": "answers.yaml"},
        "environment": {"network": "gateway", "images": {"base": str(base_sif)}},
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(campaign))
    result, done = run_local(tmp_path / "campaign.yaml")
    with open_trajectories(result["run"]) as store:
        (found,) = store
        assert (found.status, found.reward, found.error) == ("completed", 1.0, ""), done.stderr
        assert [turn.sequence for turn in found.turns] == [0] * len(ANSWERS[agent])
        assert (found.constrained, found.inexact) == (0, 0)
        assert used_apis(found) == documented_apis(agent)


def test_all_programs_feed_one_training_step(
    tmp_path: Path, base_sif: Path, make_task: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {**{agent: repair(agent) for agent in PACKAGES}, "openhands": ANSWERS["openhands"]}
    train_with_programs(tmp_path, base_sif, make_task, monkeypatch, answers)
