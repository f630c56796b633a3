"""Runs a task from a fresh sandbox to its verdict.

It prepares the sandbox, then runs the agent and the verifier for each step.

Campaigns and ``tasks validate`` both use :func:`run_steps`, so they judge tasks identically.

Once an agent has ended, it always gets a verdict, whatever the tested code does. In every format, if the verifier
writes no valid reward, the reward is 0 and the verdict contains the verifier's error. If the node may be at fault, the
verification is repeated on the files that the agent left (see :func:`_on_kept_state`).
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import (
    LimitError,
    LostError,
    MegaflowError,
    ModelServiceError,
    SandboxError,
    SetupError,
    UserCodeError,
)
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.formats import StepVerdict, VerificationContext, format_of
from megaflow_hpc.tasks.sandboxes import NoSandbox
from megaflow_hpc.types import Task, Verdict, whole_rewards

T = TypeVar("T")
RETRY_DELAYS_S = 1.0, 5.0
"""Seconds before the second and third attempt of a verification after an infrastructure failure. If the failure
occurred because the job is ending, this process is signalled during the first delay."""
LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")

RunAgent = Callable[[int, Task], Awaitable[None]]
"""Function that runs the agent on a step. Takes the step's index, counted from 0, and the step."""


async def prepare(task: Task, sandbox: ApptainerSandbox) -> None:
    """Prepares a fresh sandbox. Creates work and log directories, runs the format's setup, and records the git commit.

    Kills all processes that the setup or a health check left running, because these could read the agent's API key.

    Raises:
        SandboxError: The sandbox cannot be prepared. The rollout fails.
    """
    workdir = task.workdir or "/"
    await checkout.remember(sandbox, workdir, make=LOGS)
    if await format_of(task).prepare(task, sandbox):
        await checkout.remember(sandbox, workdir)


async def begin(step: Task, sandbox: ApptainerSandbox) -> None:
    """Prepares a sandbox for one step, as the step's user. Kills all processes that the setup left running.

    Raises:
        SandboxError: The sandbox was lost.
        SetupError: The step cannot be set up.
    """
    task_format = format_of(step)
    if step.user != sandbox.spec.user:
        await sandbox.restart(replace(sandbox.spec, user=step.user))
    await task_format.begin_step(step, sandbox)
    if task_format.step_name(step):
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
    """Runs the steps of a task in a prepared sandbox. Stops after a step whose reward is below the required minimum.
    Also stops if a step cannot be set up on the files of earlier steps. In that case, this step and all later steps get
    reward 0.

    Args:
        verdicts: Verdicts of steps that are already completed, which are not run again. New verdicts are appended.
        under_way: True if :func:`begin` has already prepared the next step.
        verifying: Returns a context manager that is active while a step is verified.

    Raises:
        SandboxError: A sandbox was lost, or the first step cannot be set up.
        ModelServiceError: A judge model that the task's code uses is down.
        ConfigError: The task cannot be verified in this way.
    """
    task_format = format_of(task)
    verdicts = [] if verdicts is None else verdicts
    steps = task_format.steps(task)
    for number in range(len(verdicts), len(steps)):
        step = steps[number]
        if under_way:
            if step.user != sandbox.spec.user:
                await sandbox.restart(replace(sandbox.spec, user=step.user))
        elif not verdicts:  # no agent has run in this sandbox yet
            await begin(step, sandbox)
        else:
            _, why = await _on_kept_state(partial(begin, step, sandbox), step, context)
            if why:  # later steps cannot run either
                lost = _setup_failed(verdicts, why)
                verdicts += [StepVerdict(task_format.step_name(missed), lost) for missed in steps[number:]]
                break
        under_way = False
        await run_agent(number, step)
        names = _names(verdicts)
        with verifying():
            verdict = await verify(step, sandbox, context, stay=number < len(steps) - 1, names=names)
        verdicts.append(StepVerdict(task_format.step_name(step), verdict))
        if not task_format.may_continue(step, verdict):
            break
    return task_format.combine(task, verdicts)


def _setup_failed(before: Sequence[StepVerdict], why: str) -> Verdict:
    """Returns the verdict on a step that cannot be set up because of the agent's files."""
    why = f"the step cannot be set up on the files of the earlier steps: {why}"
    return replace(Verdict.of(dict.fromkeys(_names(before), 0.0), why), agent_error=why)


def _names(verdicts: Sequence[StepVerdict]) -> list[str]:
    """Returns the names of the steps' rewards. Omits rewards of turns, because each turn belongs to one step."""
    return [name for step in verdicts for name in whole_rewards(step.verdict.rewards)]


async def verify(
    step: Task,
    sandbox: ApptainerSandbox,
    context: VerificationContext | None = None,
    *,
    stay: bool = False,
    names: Sequence[str] = (),
) -> Verdict:
    """Judges a task or step after its agent has ended. Kills the agent's remaining processes first.

    If the working directory is a git checkout, the artifact ``patch`` contains the agent's changes. If the verifier
    writes no valid reward, the reward is 0 and the verdict has an ``error``.

    Args:
        step: The task or step.
        sandbox: The agent's sandbox.
        context: How to verify. Default: in the agent's sandbox, with its network.
        stay: Whether to restore the agent's container afterwards, without tests and rewards, because the sandbox will
            be reused.
        names: Known reward names of the task. They are set to 0 if the verifier fails.

    Raises:
        SandboxError: This node cannot run the tests. Errors in tests and rewards are reported in the verdict's
            ``error`` instead.
        ModelServiceError: A judge model that the task's code uses is down.
        ConfigError: The task cannot be verified in this way.
    """
    task_format = format_of(step)
    name = task_format.step_name(step)
    context = context or VerificationContext()
    before = sandbox.spec
    patches: list[checkout.Patch | None] = []

    async def judge() -> Verdict:
        if sandbox.spec == before:
            await sandbox.end_processes()
        else:  # the previous attempt left the verifier's container running
            await sandbox.restart(before)
        if not patches:  # tests may change the checkout
            patches.append(await _difference(sandbox, step))
        return await task_format.verify(step, sandbox, replace(context, patch=patches[0]), stay=stay)

    verdict = _zero_if_failed(*await _on_kept_state(judge, step, context), names)
    if patches:
        patch = checkout.to_artifacts(patches[0], f"steps/{name}/" if name else "")
        verdict = replace(verdict, artifacts=[*patch, *verdict.artifacts])
    return verdict


def _zero_if_failed(verdict: Verdict | None, why: str, names: Sequence[str]) -> Verdict:
    """Returns the verdict, with reward 0 if the verifier failed. If there is no verdict, ``why`` becomes its error."""
    verdict = verdict or Verdict(error=why)
    if not verdict.error:
        return verdict
    zeros = dict.fromkeys(whole_rewards(verdict.rewards) or names or ["reward"], 0.0)
    return replace(verdict, reward=0.0, rewards=zeros)


async def run_conversation(
    task: Task,
    sandbox: NoSandbox,
    context: VerificationContext,
    run_agent: RunAgent,
    verifying: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Verdict:
    """Runs a task that has no sandbox. Raises the errors of :func:`run_steps`."""
    task_format, none = format_of(task), cast(ApptainerSandbox, sandbox)
    await task_format.prepare(task, none)
    await run_agent(0, task)
    with verifying():
        judge = partial(task_format.verify, task, none, context, stay=False)
        return _zero_if_failed(*await _on_kept_state(judge, task, replace(context, start=None)), [])


async def _difference(sandbox: ApptainerSandbox, step: Task) -> checkout.Patch | None:
    try:
        return await checkout.difference(sandbox, step.workdir)
    except LimitError as error:  # the agent's programs exceeded a limit; usage is reset for the tests
        return checkout.Patch(b"", str(error))


async def _on_kept_state(
    work: Callable[[], Awaitable[T]], step: Task, context: VerificationContext
) -> tuple[T | None, str]:
    """Runs ``work`` on an agent's final files, and attributes a failure to the node or to the rollout.

    If a limit is exceeded, a file is invalid or the task's own code raises an exception, the rollout is at fault. If
    the container is lost or does not start on the agent's files, either the node or the rollout may be at fault. In
    that case, a sandbox of the same image is started without the agent's files. If it starts on this node, the work is
    retried, and further failures are attributed to the rollout.

    Returns:
        The result of ``work`` and an empty string, or ``None`` and the reason why the rollout is at fault.

    Raises:
        SandboxError: This node cannot do the work.
        ModelServiceError: A judge model that the task's code uses is down.
        ConfigError: The task cannot be verified in this way.
    """
    node_works = False
    for pause_s in (*RETRY_DELAYS_S, None):
        failure: MegaflowError
        try:
            return await work(), ""
        except (LimitError, UserCodeError) as error:
            return None, str(error)
        except (LostError, SetupError, OSError) as error:
            if node_works:
                return None, f"{error} (a second time; a sandbox without the agent's files works here)"
            failure = error if isinstance(error, SandboxError) else SandboxError(f"verification: {error}")
        except (SandboxError, ModelServiceError) as error:
            failure = error
        except MegaflowError:
            raise
        except Exception as error:  # a bug, which the agent's files may trigger on purpose
            return None, f"{error!r} at {traceback.extract_tb(error.__traceback__)[-1]}"
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            node_works = await _can_start(step, context)
    raise failure


async def _can_start(step: Task, context: VerificationContext) -> bool:
    """Returns whether a sandbox of the task's image starts on this node and runs a command."""
    if context.start is None:
        return True
    try:
        async with await context.start(step) as other:
            await other.exec("true", timeout_s=60)
    except (SandboxError, OSError):
        return False
    return True
