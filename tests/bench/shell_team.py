"""A writer of shell commands and a checker who says whether each is right, for ``tests.bench.learning team``."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaflow_hpc.agents import ask
from megaflow_hpc.training.algorithms.samples import SampleGroup
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

sys.path.append(str(Path(__file__).parents[2] / "launchers" / "learning"))
from shell_tasks import ShellTask  # type: ignore[import-not-found]


def question(instruction: str, command: str) -> dict[str, Any]:
    """Returns what the checker is asked about a command."""
    return {"role": "user", "content": f"{instruction}\n{command}\nright? yes or no"}


class ShellTeam:
    """The writer answers with one command, the checker says yes or no, and the sandbox runs the command anyway."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        command = (await ask(model, task.instruction, "writer", max_tokens=24)).text
        await ask(model, [question(task.instruction, command)], "checker", max_tokens=4)
        await sandbox.exec(command.replace("\0", ""), timeout_s=10)
        return AgentResult()


class CheckedShellTask(ShellTask):  # type: ignore[misc]
    """A shell task that rewards the checker for being right about the command."""

    async def score(self, sandbox: Any, roles: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
        reward = await super().score(sandbox)
        verdict = str(roles["checker"][-1]["content"]).strip()
        return {"reward": reward, "right": float(verdict == ("yes" if reward else "no"))}


def of_another(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Gives each rollout the advantage of another one of the step, drawn by lot: a control that teaches nothing."""
    advantages = {
        sample.id: sample.reward - float(np.mean([other.reward for other in group.samples]))
        for group in groups
        for sample in group.samples
    }
    values = list(advantages.values())
    random.Random(sorted(advantages)[0]).shuffle(values)
    return dict(zip(advantages, values, strict=True))
