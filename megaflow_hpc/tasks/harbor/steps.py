"""Steps of a multi-step Harbor task. Steps run in order in one sandbox, each with its own agent run and verdict.

Each step is represented as an ordinary :class:`Task`, so agents and the verifier need not handle steps specially.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from megaflow_hpc.errors import SetupError
from megaflow_hpc.tasks.formats import StepVerdict
from megaflow_hpc.tasks.harbor.data import HarborData, Healthcheck, fields_of
from megaflow_hpc.types import Sandbox, Task, Verdict

SETUP_TIMEOUT_S = 600.0
"""Timeout of a step's ``setup.sh`` in seconds."""


def steps_of(task: Task) -> list[Task]:
    """Returns one task per step, in order. A task without steps is its own single step."""
    data = HarborData.of(task)
    if not data.steps:
        return [task]
    return [
        HarborData(**fields_of(step), step=step).put(
            replace(
                task,
                instruction=step.instruction,
                user=step.user or task.user,
                agent_timeout_s=step.agent_timeout_s or task.agent_timeout_s,
                verifier_timeout_s=step.verifier.timeout_s,
            )
        )
        for step in data.steps
    ]


def step_name(step: Task) -> str:
    """Returns the name of a step. Empty for a task without steps."""
    harbor_step = HarborData.of(step).step
    return harbor_step.name if harbor_step else ""


async def begin_step(task: Task, sandbox: Sandbox) -> None:
    """Uploads the step's ``workdir/``, runs its ``setup.sh`` and waits until the environment is healthy.

    Raises:
        SetupError: The step cannot be set up.
    """
    step = HarborData.of(task).step
    if step is None:
        return
    workdir = task.workdir or "/"
    if files := step.workdir:
        await sandbox.upload(files, workdir)
        if os.path.isfile(os.path.join(files, "setup.sh")):
            done = await sandbox.exec(
                ["bash", os.path.join(workdir, "setup.sh")], cwd=workdir, timeout_s=SETUP_TIMEOUT_S
            )
            if done.exit_code:
                raise SetupError(
                    f"task {task.id}: step {step.name}: setup.sh ended with {done.exit_code}: "
                    f"{done.stderr.strip()[-300:]}"
                )
    await wait_healthy(f"{task.id}: step {step.name}", sandbox, step.healthcheck)


def may_continue(task: Task, verdict: Verdict) -> bool:
    """Returns whether the next step may run: every reward must reach the step's ``min_reward``."""
    step = HarborData.of(task).step
    least = step.min_reward if step else {}
    unnamed = 0.0 if verdict.error else float("-inf")
    return all(verdict.rewards.get(name, unnamed) >= value for name, value in least.items())


def combine(task: Task, verdicts: Sequence[StepVerdict]) -> Verdict:
    """Combines the verdicts of the completed steps into one verdict for the task.

    With ``mean``, each named reward is averaged over these steps. A reward that a step does not report counts as 0.
    With ``final``, the rewards are those of the last completed step. A step whose verifier failed has reward 0.
    """
    if len(verdicts) == 1 and not verdicts[0].name:
        return verdicts[0].verdict
    artifacts = [artifact for step in verdicts for artifact in step.verdict.artifacts]
    output = "".join(f"=== step {step.name} ===\n{step.verdict.output}\n" for step in verdicts)
    errors = [f"step {step.name}: {step.verdict.error}" for step in verdicts if step.verdict.error]
    counted = verdicts[-1:] if HarborData.of(task).reward_strategy == "final" else verdicts
    naming = [step for step in counted if not step.verdict.error] or verdicts[-1:]
    names = list(dict.fromkeys(name for step in naming for name in step.verdict.rewards))
    rewards = {n: sum(step.verdict.rewards.get(n, 0.0) for step in counted) / len(counted) for n in names}
    agent_error = verdicts[-1].verdict.agent_error
    return replace(Verdict.of(rewards, output, artifacts), error="; ".join(errors), agent_error=agent_error)


async def wait_healthy(who: str, sandbox: Sandbox, check: Healthcheck) -> None:
    """Runs the health check until it succeeds. Failures during the start period do not count.

    Args:
        who: Name of the task or step, for the error message.
        sandbox: The sandbox to check.
        check: The health check. If its command is empty, returns immediately.

    Raises:
        SetupError: The health check failed ``retries`` times.
    """
    if not check.command:
        return
    started = time.monotonic()
    failures = 0
    while True:
        result = await sandbox.exec(check.command, timeout_s=check.timeout_sec)
        if result.exit_code == 0:
            return
        starting = time.monotonic() - started < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            raise SetupError(
                f"task {who}: not healthy: {check.command!r} ended with {result.exit_code}: {result.stderr[-300:]}"
            )
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
