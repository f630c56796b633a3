"""Two agents for checking a task: one runs the reference solution, the other does nothing."""

from __future__ import annotations

from typing import cast

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

MAX_OUTPUT_CHARACTERS = 2000
"""Maximum number of characters to keep of a failed solution's output."""


class OracleAgent:
    """Runs the task's reference solution."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Runs the solution. Its failure is reported in the result's ``error``.

        Raises:
            ConfigError: The task has no solution.
        """
        result = await format_of(task).solve(task, cast(ApptainerSandbox, sandbox))
        if result.exit_code == 0:
            return AgentResult()
        output = (result.stdout + result.stderr).strip()[-MAX_OUTPUT_CHARACTERS:]
        return AgentResult(
            exit_code=result.exit_code,
            error=f"the task's solution ended with exit code {result.exit_code}: {output}",
        )


class NopAgent:
    """Does nothing, so the reward is that of the unmodified task."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Returns immediately."""
        return AgentResult()
