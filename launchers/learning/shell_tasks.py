"""The tasks of the learning curve. Their files differ in every rollout.

The expected result is computed here, outside of the sandbox, from the text that was put in. Nothing that an agent does
to its files or to the sandbox's programs changes it.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

from operations import OPERATIONS, content, is_done
from searches import SEARCHES


class ShellTask:
    """One operation on the file ``in``, as a task of a campaign (docs/how-to/python-tasks.md)."""

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
        await _write(sandbox, {"in": self.content})

    async def score(self, sandbox: Any) -> float:
        output = await sandbox.read("out")
        return float(output is not None and is_done(self.operation, self.content, output.decode("utf-8", "replace")))

    async def solve(self, sandbox: Any) -> None:
        await sandbox.exec(self.operation.solution, timeout_s=30)


class TwoTurns:
    """Finds the file about an animal, and works on it."""

    image, workdir, env = ShellTask.image, ShellTask.workdir, ShellTask.env
    timeout_s, score_timeout_s, processes = ShellTask.timeout_s, ShellTask.score_timeout_s, ShellTask.processes
    turns: ClassVar[int] = 2

    @classmethod
    def instances(cls) -> dict[str, dict[str, str]]:
        return {name: {"name": name} for name in SEARCHES[cls.turns]}

    def __init__(self, name: str) -> None:
        self.search = SEARCHES[self.turns][name]
        self.instruction = self.search.instruction

    async def setup(self, sandbox: Any) -> None:
        self.world = self.search.world(random.SystemRandom())
        files = {f"d/{self.world.names[animal]}": text for animal, text in self.world.contents.items()}
        if self.search.animal is None:
            files["note"] = f"{self.world.animal}\n"
        await _write(sandbox, files)

    async def score(self, sandbox: Any) -> float:
        output = await sandbox.read("out")
        return float(output is not None and self.search.is_done(self.world, output.decode("utf-8", "replace")))

    async def solve(self, sandbox: Any) -> None:
        for command, _ in self.search.turns(self.world):
            await sandbox.exec(command, timeout_s=30)


class ThreeTurns(TwoTurns):
    """Reads which animal is meant, finds the file about it, and works on it."""

    turns = 3


async def _write(sandbox: Any, files: Mapping[str, str]) -> None:
    """Writes files by one command."""
    texts = " && ".join(f"printf %s {shlex.quote(text)} > {name}" for name, text in files.items())
    await sandbox.exec(f"mkdir -p d && {texts}", timeout_s=30)
