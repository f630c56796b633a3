"""Runs a Harbor task's own solution, ``solution/solve.sh``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.types import ExecResult, Sandbox, Task

SCRIPT = "solve.sh"


async def solve(task: Task, sandbox: Sandbox) -> ExecResult:
    """Uploads the solution of a task or of a step and runs it in the work directory.

    Raises:
        ConfigError: the task has no solution.
    """
    data = HarborData.of(task)
    solution = Path(data.solution or Path(task.path) / "solution")
    files = TaskFiles(task.path)
    if not (solution / SCRIPT).is_file():
        raise ConfigError(f"task {task.id}: no {solution / SCRIPT}; the oracle agent needs one")
    files.require(solution / SCRIPT)
    if files.any_rules(solution):
        with tempfile.TemporaryDirectory() as scratch:
            files.copy(solution, Path(scratch, "solution"))
            await sandbox.upload(str(Path(scratch, "solution")), "/solution")
    else:
        await sandbox.upload(str(solution), "/solution")
    env = {"DEBIAN_FRONTEND": "noninteractive", **data.solution_env}
    return await sandbox.exec(["bash", f"/solution/{SCRIPT}"], cwd=task.workdir, env=env)
