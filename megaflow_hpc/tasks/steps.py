"""A task from a fresh sandbox to its verdict: prepared, and per step handed to an agent and verified.

Campaigns and ``tasks validate`` both run tasks by :func:`run_steps`, and so judge them alike.

Once an agent has ended there is a verdict, whatever the code that is tested does: a verifier that leaves no valid
reward is reward 0 with the verifier's error, in every format. The verification is repeated on what the agent left,
which the agent cannot be asked for again, if the node may have failed; see :func:`_on_kept_state`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

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
from megaflow_hpc.types import Task, Verdict

T = TypeVar("T")
PAUSES_S = 1.0, 5.0
"""Seconds before the second and the third try of a verification that failed by no fault of the tested code. If it is
the job that ends, its signal has reached this process after the first."""
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
        SandboxError: a sandbox was lost, or the first step cannot be set up.
        ModelServiceError: a judge that the task's own code asks is away.
        ConfigError: the task cannot be verified in this way.
    """
    found = format_of(task)
    verdicts = [] if verdicts is None else verdicts
    steps = found.steps(task)
    for number in range(len(verdicts), len(steps)):
        step = steps[number]
        if under_way:
            if step.user != sandbox.spec.user:
                await sandbox.restart(replace(sandbox.spec, user=step.user))
        elif not verdicts:  # no agent has been in it
            await begin(step, sandbox)
        else:
            _, why = await _on_kept_state(partial(begin, step, sandbox), step, context)
            if why:  # the steps after it cannot be reached either
                lost = _not_begun(verdicts, why)
                verdicts += [StepVerdict(found.step_name(missed), lost) for missed in steps[number:]]
                break
        under_way = False
        await run_agent(number, step)
        names = [name for earlier in verdicts for name in earlier.verdict.rewards]
        with verifying():
            verdict = await verify(step, sandbox, context, stay=number < len(steps) - 1, names=names)
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
    step: Task,
    sandbox: ApptainerSandbox,
    context: VerificationContext | None = None,
    *,
    stay: bool = False,
    names: Sequence[str] = (),
) -> Verdict:
    """Judges a task, or a step, after its agent has ended; what is left of the agent's processes is ended first.

    Where the work directory is a git checkout, what the agent changed there is the artifact ``patch``. A verifier that
    leaves no valid reward is reward 0 with its ``error``.

    Args:
        context: default: in the agent's sandbox, with its network.
        stay: the sandbox is used further: it gets its own container back, without tests and rewards.
        names: rewards that the task is known to have; they are 0 where the verifier fails.

    Raises:
        SandboxError: this node cannot run the tests. What tests and rewards do wrong is in the verdict's ``error``.
        ModelServiceError: a judge that the task's own code asks is away.
        ConfigError: the task cannot be verified in this way.
    """
    found = format_of(step)
    name = found.step_name(step)
    context = context or VerificationContext()
    before = sandbox.spec
    patches: list[checkout.Patch | None] = []

    async def judge() -> Verdict:
        if sandbox.spec == before:
            await sandbox.end_processes()
        else:  # the last try left the verifier's
            await sandbox.restart(before)
        if not patches:  # tests may change the checkout
            patches.append(await _difference(sandbox, step))
        return await found.verify(step, sandbox, replace(context, patch=patches[0]), stay=stay)

    verdict, why = await _on_kept_state(judge, step, context)
    verdict = verdict or Verdict(error=why)
    if verdict.error:
        zeros = dict.fromkeys(verdict.rewards or names or ["reward"], 0.0)
        verdict = replace(verdict, reward=0.0, rewards=zeros)
    kept = checkout.to_artifacts(patches[0], f"steps/{name}/" if name else "") if patches else []
    return replace(verdict, artifacts=[*kept, *verdict.artifacts])


async def _difference(sandbox: ApptainerSandbox, step: Task) -> checkout.Patch | None:
    try:
        return await checkout.difference(sandbox, step.workdir)
    except LimitError as error:  # a program of the agent's took what there was; the tests get it anew
        return checkout.Patch(b"", str(error))


async def _on_kept_state(
    work: Callable[[], Awaitable[T]], step: Task, context: VerificationContext
) -> tuple[T | None, str]:
    """Does something with what an agent left. Tells failures of the node from what the agent's files and programs do.

    A limit that was passed, a wrong file and an error of the task's own code are the rollout's doing. A container that
    was lost, or that does not start on the agent's files, may be either's: if a sandbox of the same image starts here
    without those files, the work is done once more, and a second failure is the rollout's doing.

    Returns:
        What the work returned and nothing, or nothing and why the rollout is to blame.

    Raises:
        SandboxError: this node cannot do it.
        ModelServiceError: a judge that the task's own code asks is away.
        ConfigError: the task cannot be verified in this way.
    """
    node_works = False
    for pause_s in (*PAUSES_S, None):
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
        except Exception as error:  # a defect that the agent's files may have met on purpose
            return None, f"{error!r} at {traceback.extract_tb(error.__traceback__)[-1]}"
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            node_works = await _starts(step, context)
    raise failure


async def _starts(step: Task, context: VerificationContext) -> bool:
    """Whether a sandbox of the task's image starts on this node and runs a command."""
    if context.start is None:
        return True
    try:
        async with await context.start(step) as other:
            await other.exec("true", timeout_s=60)
    except (SandboxError, OSError):
        return False
    return True
