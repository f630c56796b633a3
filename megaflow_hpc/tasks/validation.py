"""Checks that tasks distinguish solved from unsolved states. The reward must be 1 with the reference solution and 0
without it.

Each task runs twice, in fresh sandboxes and with the same steps as a rollout: prepare, solve or do nothing, verify. If
the verifier writes ``results.json`` (as named_tests.py does), individual tests are checked too. Tests listed as failing
must *fail* without the solution, where a collection error does not count, and pass with it. Tests listed as passing
must pass both times.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError, SandboxError, UserCodeError
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.tasks.sandboxes import NoSandbox, network_hint, sandbox_spec, verification_context
from megaflow_hpc.tasks.services import services_of
from megaflow_hpc.tasks.steps import prepare, run_conversation, run_steps
from megaflow_hpc.types import Agent, Task


@dataclass
class ValidationRun:
    """One run of a task. ``failing`` and ``passing`` are the outcomes of the tests in the lists of these names, if
    known."""

    reward: float | None = None
    error: str = ""
    output: str = ""
    hint: str = ""
    """Hint to add to a message about a wrong reward, if the tests may have needed a network."""
    duration_s: float = 0.0
    """Seconds in the sandbox, excluding the time spent waiting for the sandbox and staging its image."""
    failing: dict[str, str] = field(default_factory=dict)
    passing: dict[str, str] = field(default_factory=dict)


@dataclass
class Validation:
    """The result of validating a task, with any problems found."""

    task: str
    before: ValidationRun
    after: ValidationRun
    problems: list[str]

    @property
    def valid(self) -> bool:
        """True if no problems were found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Returns the result in a JSON-compatible form.

        It contains the outcome of each test listed as failing, without and with the solution.
        """
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


def judge(before: ValidationRun, after: ValidationRun) -> list[str]:
    """Returns the problems found in a task, given its runs without and with the solution."""
    problems = []
    for name, run, reward in (("without the solution", before, 0.0), ("with the solution", after, 1.0)):
        if run.error:
            problems.append(f"{name}: {run.error}")
        elif run.reward != reward:
            problems.append(f"{name}: reward {run.reward}, expected {reward}{run.hint}")
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
    tasks: Sequence[Task],
    images: Mapping[str, str],
    oracle: Agent,
    provider: ApptainerProvider,
    environment: EnvironmentConfig | None = None,
    jobs: int = 2,
) -> AsyncIterator[Validation]:
    """Validates tasks, up to ``jobs`` concurrently, and yields each result as soon as it is ready.

    Args:
        images: Maps image names in tasks to image files, including images of separate verifiers.
        oracle: Runs a task's reference solution.
        jobs: Maximum number of tasks to validate concurrently.
        environment: A campaign's limits, network and verification. Default: no network and no additional limits.
    """
    environment = environment or EnvironmentConfig(network="none")
    slots = asyncio.Semaphore(jobs)

    async def one(task: Task) -> Validation:
        async with slots:
            before = await _run(task, images, None, provider, environment)
            after = await _run(task, images, oracle, provider, environment)
        return Validation(task.id, before, after, judge(before, after))

    running = [asyncio.create_task(one(task)) for task in tasks]
    try:
        for finished in asyncio.as_completed(running):
            yield await finished
    finally:
        for waiting in running:
            waiting.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _SolutionFailed(Exception):
    """The reference solution failed, so the run is not verified."""


async def _run(
    task: Task,
    images: Mapping[str, str],
    agent: Agent | None,
    provider: ApptainerProvider,
    environment: EnvironmentConfig,
) -> ValidationRun:
    async def solve(number: int, step: Task) -> None:
        if agent is None:
            return
        async with asyncio.timeout(step.agent_timeout_s):
            result = await agent.run(step, sandbox, None)
        if result.exit_code:
            raise _SolutionFailed(result.error)

    context = verification_context(task, environment, images, provider.start)
    if task.metadata.get("python", {}).get("teamed"):
        return ValidationRun(error="its score takes the roles of a team, which only a campaign has")
    if format_of(task).asks_judge(task):
        return ValidationRun(error="its verification asks a judge: run a campaign that has one, with the agent oracle")
    try:
        if not task.image:
            none = NoSandbox(task)
            sandbox = cast(ApptainerSandbox, none)
            started = time.monotonic()
            verdict = await run_conversation(task, none, context, solve)
            return ValidationRun(verdict.reward, verdict.error, duration_s=time.monotonic() - started)
        async with services_of(task, images, environment, provider.start) as services:
            spec = replace(sandbox_spec(task, images, environment), services=services.reachable)
            async with await provider.start(spec) as sandbox:
                started = time.monotonic()
                await prepare(task, sandbox)
                verdict = await services.guard(run_steps(task, sandbox, context, solve))
                duration_s = time.monotonic() - started
    except (SandboxError, ConfigError, UserCodeError, _SolutionFailed) as error:
        return ValidationRun(error=str(error))
    except TimeoutError:
        return ValidationRun(error=f"the solution ran longer than its {task.agent_timeout_s:g} s")
    hint = network_hint(verdict.output, spec.network)
    run = ValidationRun(verdict.reward, verdict.error, verdict.output, hint, duration_s)
    for artifact in verdict.artifacts:
        if artifact.name == "verifier/results.json":
            results = json.loads(artifact.data)
            run.failing, run.passing = results["failing"], results["passing"]
    return run
