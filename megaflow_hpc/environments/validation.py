"""Proves that tasks can be told apart: reward 0 as they are handed out, reward 1 with their own solution.

Each task runs twice in fresh sandboxes, along the path a rollout takes: prepared, left alone or solved, verified. Where
the verifier writes ``results.json`` (named_tests.py does) single tests are judged too: those named as failing must
*fail* without the solution, which a test that cannot be collected does not, and pass with it; the others pass always.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.provider import ApptainerProvider
from megaflow_hpc.environments.spec import SandboxSpec
from megaflow_hpc.environments.tasks import prepare
from megaflow_hpc.environments.verifier import verify
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.types import Agent, Task


@dataclass
class Run:
    """One verification. ``failing`` and ``passing`` give the outcome of each named test, where they are known."""

    reward: float | None = None
    error: str = ""
    failing: dict[str, str] = field(default_factory=dict)
    passing: dict[str, str] = field(default_factory=dict)
    output: str = ""
    duration_s: float = 0.0
    """In the sandbox: without waiting for one, and without staging its image."""


@dataclass
class Validation:
    """A task, and what speaks against it."""

    task: str
    before: Run
    after: Run
    problems: list[str]

    @property
    def valid(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The evidence: per test named as failing the outcome without and with the solution."""
        tests = dict.fromkeys([*self.before.failing, *self.after.failing])
        return {
            "task": self.task,
            "valid": self.valid,
            "reward_before": self.before.reward,
            "reward_after": self.after.reward,
            "failing": {test: [self.before.failing.get(test), self.after.failing.get(test)] for test in tests},
            "passing": len(self.after.passing),
            "problems": self.problems,
            "duration_s": round(self.before.duration_s + self.after.duration_s, 2),
        }


def judge(before: Run, after: Run) -> list[str]:
    """What is wrong with a task, from its run without and its run with the solution."""
    problems = []
    for name, run, reward in (("without the solution", before, 0.0), ("with the solution", after, 1.0)):
        if run.error:
            problems.append(f"{name}: {run.error}")
        elif run.reward != reward:
            problems.append(f"{name}: reward {run.reward}, expected {reward}")
    for test in dict.fromkeys([*before.failing, *after.failing]):
        outcomes = before.failing.get(test, "not run"), after.failing.get(test, "not run")
        if outcomes != ("failed", "passed"):
            problems.append(
                f"{test}: {outcomes[0]} without the solution and {outcomes[1]} with it; expected failed and passed"
            )
    for name, run in (("without", before), ("with", after)):
        broken = (f"{test}: {outcome}" for test, outcome in run.passing.items() if outcome in ("failed", "error"))
        problems += [f"{test} {name} the solution; expected passed, since `passing` names it" for test in broken]
    return problems


async def validate(
    tasks: Sequence[Task], images: Mapping[str, str], oracle: Agent, provider: ApptainerProvider
) -> AsyncIterator[Validation]:
    """Validates tasks, as many at once as the provider lets sandboxes live; each is yielded when it is done.

    Args:
        images: image file of every ``task.image``.
        oracle: carries out a task's own solution.
    """

    async def one(task: Task) -> Validation:
        before = await _run(task, images[task.image], None, provider)
        after = await _run(task, images[task.image], oracle, provider)
        return Validation(task.id, before, after, judge(before, after))

    running = [asyncio.create_task(one(task)) for task in tasks]
    try:
        for finished in asyncio.as_completed(running):
            yield await finished
    finally:
        for waiting in running:
            waiting.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run(task: Task, image: str, agent: Agent | None, provider: ApptainerProvider) -> Run:
    limits = task.limits
    spec = SandboxSpec(
        image=image,
        env=task.env,
        workdir=task.workdir,
        user=task.user,
        network="none",
        memory_mb=limits.memory_mb,
        cpus=limits.cpus,
        disk_mb=limits.disk_mb,
        processes=limits.processes,
    )
    try:
        async with await provider.start(spec) as sandbox:
            started = time.monotonic()
            await prepare(task, sandbox)
            if agent is not None:
                result = await agent.run(task, sandbox, None)
                if result.exit_code:
                    return Run(error=result.error)
            verdict = await verify(task, sandbox)
            run = Run(reward=verdict.reward, error=verdict.error, output=verdict.output)
            with tempfile.TemporaryDirectory() as scratch:
                file = Path(scratch) / "results.json"
                if (await sandbox.exec(["test", "-f", "/logs/verifier/results.json"], cwd="/")).exit_code == 0:
                    await sandbox.download("/logs/verifier/results.json", str(file))
                    results = json.loads(file.read_text())
                    run.failing, run.passing = results["failing"], results["passing"]
            run.duration_s = time.monotonic() - started
            return run
    except SandboxError as error:
        return Run(error=str(error))
