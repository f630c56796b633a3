"""The agent that carries out the task's own solution: uploads Harbor's ``solution/`` and runs its ``solve.sh``."""

from __future__ import annotations

from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

TAIL = 2000
"""Characters kept of the output of a solution that failed."""


class OracleAgent:
    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Uploads and runs the solution in the task's work directory.

        Raises:
            ConfigError: The task has no ``solution/solve.sh``.
        """
        solution = Path(task.path) / "solution"
        if not (solution / "solve.sh").is_file():
            raise ConfigError(f"task {task.id}: no {solution / 'solve.sh'}; the oracle agent needs one")
        await sandbox.upload(str(solution), "/solution")
        result = await sandbox.exec(["bash", "/solution/solve.sh"], cwd=task.workdir)
        if result.exit_code == 0:
            return AgentResult(sandbox_s=[result.duration_s])
        output = (result.stdout + result.stderr).strip()[-TAIL:]
        return AgentResult(
            exit_code=result.exit_code,
            error=f"solve.sh ended with exit code {result.exit_code}: {output}",
            sandbox_s=[result.duration_s],
        )
