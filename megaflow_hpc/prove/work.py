"""The task and agents of the campaigns that ``prove`` runs."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from megaflow_hpc.agents.example import MyAgent
from megaflow_hpc.host.process import Identity, parent, read_proc
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

IMAGE = "prove-image"
"""Name of the image of all tasks in ``environment.images``."""
TASKS = 12
"""Number of tasks. Large enough for the walltime trial with any ``slurm.pods.signal``."""
SOLUTION = "echo 42 > answer"


class ProofTask:
    """A task that asks the agent to write 42 into a file."""

    image = IMAGE
    workdir = "/prove"

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def instances(cls) -> dict[str, dict[str, Any]]:
        return {f"work{number}": {"number": number} for number in range(TASKS)}

    def instruction(self) -> str:
        return "Write 42 into the file answer."

    async def score(self, sandbox: Any) -> float:
        """Returns 1 if the file has the expected content, otherwise 0."""
        return float(await sandbox.read("answer") == b"42\n")

    async def solve(self, sandbox: Any) -> None:
        """Solves the task. Used by the oracle agent."""
        await sandbox.exec(SOLUTION)


class KillsItsWorker(MyAgent):
    """An example agent that kills its own MPI rank once per run before solving the task.

    Args:
        mark: File that the agent creates before the kill. If it exists, the agent kills nothing.
    """

    def __init__(self, mark: str, max_turns: int | None = None) -> None:
        super().__init__(max_turns=max_turns)
        self.mark = mark

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        if task.id == "work0" and first(self.mark):
            rank = own_rank()
            if rank is not None:
                rank.kill()
                await asyncio.sleep(60)  # this process ends with its rank
        return await super().run(task, sandbox, model)


class Waits:
    """An agent that waits before solving the task.

    Args:
        seconds: Waiting time in seconds.
        mark: If given, only the first attempt at one of the tasks waits. That attempt creates this file first.
    """

    def __init__(self, seconds: float, mark: str = "") -> None:
        self.seconds, self.mark = seconds, mark

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        if not self.mark or (task.id == "work3" and first(self.mark)):
            await asyncio.sleep(self.seconds)
        done = await sandbox.exec(SOLUTION)
        return AgentResult(error="" if done.exit_code == 0 else f"exit code {done.exit_code}")


def first(mark: str) -> bool:
    """Creates the file ``mark``. Returns false if it already exists."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def own_rank() -> Identity | None:
    """Returns the process of this worker's MPI rank, the topmost ancestor that runs this package. ``None`` if not
    found."""
    rank, pid = None, os.getpid()
    while pid and b"megaflow_hpc" in read_proc(f"/proc/{pid}/cmdline"):
        rank, pid = Identity.of(pid), parent(pid)
    return rank
