"""The tasks of the learning curve: an operation on a text file, which is another for every rollout.

What must come out is worked out here, outside of the sandbox, from the text that was put in: nothing that an agent
does to ``in`` or to the sandbox's programs changes what it is compared with.
"""

from __future__ import annotations

import random
import shlex
from typing import Any

from operations import OPERATIONS, content, is_done


class ShellTask:
    """One operation, as a task of a campaign (docs/how-to/python-tasks.md)."""

    image = "megaflow-base"
    workdir = "/app"
    env = {"LC_ALL": "C"}  # noqa: RUF012  # read, never written
    timeout_s = 60
    score_timeout_s = 60
    processes = 64

    @classmethod
    def instances(cls) -> dict[str, dict[str, str]]:
        return {name: {"name": name} for name in OPERATIONS}

    def __init__(self, name: str) -> None:
        self.operation = OPERATIONS[name]
        self.instruction = self.operation.instruction
        self.content = ""

    async def setup(self, sandbox: Any) -> None:
        self.content = content(random.SystemRandom())
        await sandbox.exec(f"printf %s {shlex.quote(self.content)} > in", timeout_s=30)

    async def score(self, sandbox: Any) -> float:
        output = await sandbox.read("out")
        return float(output is not None and is_done(self.operation, self.content, output.decode("utf-8", "replace")))

    async def solve(self, sandbox: Any) -> None:
        await sandbox.exec(self.operation.solution, timeout_s=30)
