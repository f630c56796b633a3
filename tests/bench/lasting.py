"""An agent whose rollouts last as those of working agents do: log-normally, one in a hundred up to a limit."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task
from tests.bench.pace import MEAN_S, duration

sys.path.append(str(Path(__file__).parents[2] / "launchers" / "learning"))
from shell_agent import ShellAgent  # type: ignore[import-not-found]


class Lasting(ShellAgent):  # type: ignore[misc]
    """The agent of the learning curve, which takes a while.

    Args:
        mean_s: seconds in the mean.
    """

    def __init__(self, mean_s: float) -> None:
        super().__init__()
        self._mean_s = mean_s

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        await asyncio.sleep(self._mean_s / MEAN_S * duration(random.SystemRandom()))
        result: AgentResult = await super().run(task, sandbox, model)
        return result
