"""A task from a fresh sandbox to its verdict: prepared, and per step handed to an agent and verified.

Campaigns and ``tasks validate`` both run tasks by :func:`run_steps`, and so judge them alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import LimitError, SetupError
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.formats import StepVerdict, VerificationContext, format_of
from megaflow_hpc.types import Task, Verdict

LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")

RunAgent = Callable[[int, Task], Awaitable[None]]
"""Runs the agent on a step, given its number from 0 and itself."""


async def prepare(task: Task, sandbox: ApptainerSandbox) -> None:
    """Makes a fresh sandbox ready: work and log directories, what the format adds, where a checkout in it stands.

    Ends every process that set-up or a health check left: it could read the agent's key.

    Raises:
        SandboxError: it cannot be done; the rollout fails.
    """
    workdir = task.workdir or "/"
    await checkout.remember(sandbox, workdir, make=LOGS)
    if await format_of(task).prepare(task, sandbox):
        await checkout.remember(sandbox, workdir)
        await sandbox.end_processes()


async def begin(step: Task, sandbox: ApptainerSandbox) -> None:
    """Makes a sandbox ready for one step, under the step's user; ends every process that set-up left.

    Raises:
        SandboxError: the sandbox was lost.
        SetupError: the step cannot be set up.
    """
    found = format_of(step)
    if step.user != sandbox.spec.user:
        await sandbox.restart(replace(sandbox.spec, user=step.user))
    await found.begin_step(step, sandbox)
    if found.step_name(step):
        await checkout.remember_new(sandbox, step.workdir)
        await sandbox.end_processes()


async def run_steps(
    task: Task,
    sandbox: ApptainerSandbox,
    context: VerificationContext,
    run_agent: RunAgent,
    *,
    verdicts: list[StepVerdict] | None = None,
    under_way: bool = False,
    verifying: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Verdict:
    """Runs the steps of a task in a prepared sandbox; a step that fails its minimum is the last, and so is one that
    cannot be set up in what the steps before have left: it has earned nothing.

    Args:
        verdicts: those of steps that were run before, which are not run again; each new one is appended.
        under_way: the first step to run was begun before, and is not begun again.
        verifying: entered while a step is verified.

    Raises:
        SandboxError: a sandbox was lost, or a step cannot be set up.
        ConfigError: the task cannot be verified in this way.
    """
    found = format_of(task)
    verdicts = [] if verdicts is None else verdicts
    steps = found.steps(task)
    for number in range(len(verdicts), len(steps)):
        step = steps[number]
        if not under_way:
            try:
                await begin(step, sandbox)
            except (SetupError, LimitError) as error:
                if not verdicts:  # no agent has been in it
                    raise
                verdicts.append(StepVerdict(found.step_name(step), _not_begun(verdicts, str(error))))
                break
        elif step.user != sandbox.spec.user:
            await sandbox.restart(replace(sandbox.spec, user=step.user))
        under_way = False
        await run_agent(number, step)
        await sandbox.end_processes()
        with verifying():
            verdict = await verify(step, sandbox, context, stay=number < len(steps) - 1)
        verdicts.append(StepVerdict(found.step_name(step), verdict))
        if not found.may_continue(step, verdict):
            break
    return found.combine(task, verdicts)


def _not_begun(before: Sequence[StepVerdict], why: str) -> Verdict:
    """The verdict of a step that an agent has made impossible, be it to keep what it has or to be given another try."""
    names = [name for step in before for name in step.verdict.rewards]
    why = f"the step cannot be set up in what the steps before have left: {why}"
    return replace(Verdict.of(dict.fromkeys(names, 0.0), why), agent_error=why)


async def verify(
    step: Task, sandbox: ApptainerSandbox, context: VerificationContext | None = None, *, stay: bool = False
) -> Verdict:
    """Judges a task, or a step. The agent's processes must have ended.

    Where the work directory is a git checkout, what the agent changed there is the artifact ``patch``.

    Args:
        context: default: in the agent's sandbox, with its network.
        stay: the sandbox is used further: it gets its own container back, without tests and rewards.

    Raises:
        SandboxError: a sandbox was lost. What tests and rewards do wrong is in the verdict's ``error``.
        ConfigError: the task cannot be verified in this way.
    """
    found = format_of(step)
    name = found.step_name(step)
    patch = None if found.submits_a_patch else await checkout.difference(sandbox, step.workdir)
    verdict = await found.verify(step, sandbox, context or VerificationContext(), stay=stay)
    kept = checkout.to_artifacts(patch, f"steps/{name}/" if name else "")
    return replace(verdict, artifacts=[*kept, *verdict.artifacts])
