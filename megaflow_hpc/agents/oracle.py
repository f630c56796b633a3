"""The two agents that a task is proved by: its own solution, as each format has it, and nothing."""

from __future__ import annotations

from typing import cast

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

TAIL = 2000
"""Characters kept of the output of a solution that failed."""


class OracleAgent:
    """Carries out the task's own solution."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Runs the task's own solution; one that fails is the result's ``error``.

        Raises:
            ConfigError: The task has no solution.
        """
        result = await format_of(task).solve(task, cast(ApptainerSandbox, sandbox))
        if result.exit_code == 0:
            return AgentResult()
        output = (result.stdout + result.stderr).strip()[-TAIL:]
        return AgentResult(
            exit_code=result.exit_code,
            error=f"the task's solution ended with exit code {result.exit_code}: {output}",
        )


class NopAgent:
    """Leaves the sandbox as it is: its reward is the untouched task's."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Returns at once."""
        return AgentResult()
