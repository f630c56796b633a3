"""The agent that carries out the task's own solution: Harbor's ``solution/solve.sh``, or what another format has."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.types import AgentResult, ExecResult, ModelEndpoint, Sandbox, Task

TAIL = 2000
"""Characters kept of the output of a solution that failed."""


class OracleAgent:
    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Uploads and runs the solution in the task's work directory.

        Raises:
            ConfigError: The task has no solution.
        """
        if task.kind != "harbor":
            from megaflow_hpc.tasks.formats import format_of

            return _ended(await format_of(task).solve(task, sandbox), "the task's solution")
        harbor = task.metadata.get("harbor", {})
        solution = Path(harbor.get("solution") or Path(task.path) / "solution")
        files = TaskFiles(task.path)
        if not (solution / "solve.sh").is_file():
            raise ConfigError(f"task {task.id}: no {solution / 'solve.sh'}; the oracle agent needs one")
        files.require(solution / "solve.sh")
        if files.any_rules(solution):
            with tempfile.TemporaryDirectory() as scratch:
                files.copy(solution, Path(scratch, "solution"))
                await sandbox.upload(str(Path(scratch, "solution")), "/solution")
        else:
            await sandbox.upload(str(solution), "/solution")
        env = {"DEBIAN_FRONTEND": "noninteractive", **harbor.get("solution_env", {})}
        result = await sandbox.exec(["bash", "/solution/solve.sh"], cwd=task.workdir, env=env)
        return _ended(result, "solve.sh")


def _ended(result: ExecResult, what: str) -> AgentResult:
    if result.exit_code == 0:
        return AgentResult(sandbox_s=[result.duration_s])
    output = (result.stdout + result.stderr).strip()[-TAIL:]
    return AgentResult(
        exit_code=result.exit_code,
        error=f"{what} ended with exit code {result.exit_code}: {output}",
        sandbox_s=[result.duration_s],
    )
