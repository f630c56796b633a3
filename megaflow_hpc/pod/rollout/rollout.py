"""One rollout from start to verdict.

The order is: start the sandbox, run the agent, kill all processes of the agent, verify (the last three for each step of
a task with steps). Every error becomes a status and a cause, never an exception. A failure of the infrastructure gives
``failed`` with a kind that says who is to blame. A failed agent gives ``completed`` and is verified as usual. A failed
verifier gives reward 0. If the allocation ends first, the rollout is ``cancelled`` and continues in another allocation
from where it was (suspension.py).
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from dataclasses import dataclass

from megaflow_hpc.config import Policy
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError, ModelServiceError, SandboxError, UserCodeError
from megaflow_hpc.host.process import node_name
from megaflow_hpc.pod.rollout.agent_run import AgentRun, timed
from megaflow_hpc.pod.rollout.partial import CutShort, Partial
from megaflow_hpc.pod.rollout.sandboxes import Sandboxes, rollout_spec
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.digests import check_unchanged
from megaflow_hpc.tasks.sandboxes import verification_context
from megaflow_hpc.tasks.steps import prepare, run_steps
from megaflow_hpc.texts import printable
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import (
    Artifact,
    Rollout,
    Status,
    Task,
)

MAX_ARTIFACT = 1 << 20
"""Bytes kept of one artifact."""


def blank(rollout: Rollout, attempt: int) -> Trajectory:
    """A trajectory that has just begun, ``failed`` until it is known better."""
    return Trajectory.begin(rollout, attempt, "failed", node=node_name())


class NoSandbox(SandboxError):
    """No sandbox could be started, which may be the node's fault."""


@dataclass
class AttemptResult:
    """What one attempt left."""

    trajectory: Trajectory
    cause: str = ""
    """Cause of a failure, one of those of :mod:`megaflow_hpc.pod.scheduling.failures`."""
    partial: str = ""
    """File with which an attempt that was cut short goes on."""


async def run_attempt(
    services: Services, rollout: Rollout, task: Task, attempt: int, partial: str = ""
) -> AttemptResult:
    """Runs one attempt; what goes wrong is in its trajectory. Cancelling it yields one with status ``cancelled``.

    Args:
        partial: file with which an attempt that was cut short goes on.
    """
    began = time.time()
    ended = AttemptResult(blank(rollout, attempt))
    trajectory = ended.trajectory
    try:
        await _run(services, rollout, task, trajectory, partial)
        if services.suspension.preempted:
            raise asyncio.CancelledError
    except CutShort as cut:
        ended.trajectory = trajectory = blank(rollout, attempt)  # what it was is in the file, or forgotten
        ended.partial = cut.kept
        _cancel(services, trajectory, str(cut))
    except asyncio.CancelledError:
        _cancel(services, trajectory, "stopped before it ended")
    except SandboxError as error:
        if services.suspension.preempted:
            _cancel(services, trajectory, f"preempted: {error}")
        else:
            _fail(trajectory, "sandbox", str(error))
            ended.cause = "sandbox-start" if isinstance(error, NoSandbox) else "sandbox-lost"
    except ModelServiceError as error:
        _fail(trajectory, "model", str(error))
    except (ConfigError, UserCodeError) as error:  # says itself where
        _fail(trajectory, "user", str(error))
    except Exception as error:  # a defect in a scaffold or in a task must cost one rollout, not the runner
        _fail(trajectory, "user", f"{error!r} at {traceback.extract_tb(error.__traceback__)[-1]}")
    trajectory.started_at = began
    trajectory.finished_at = time.time()
    return ended


def _cancel(services: Services, trajectory: Trajectory, error: str) -> None:
    _end(trajectory, "cancelled", services.suspension.kind, error)


def _fail(trajectory: Trajectory, kind: str, error: str) -> None:
    _end(trajectory, "failed", kind, error)


def _end(trajectory: Trajectory, status: Status, kind: str, error: str) -> None:
    """Without a verdict, whatever it had until then: a file in which such a rollout has a reward is not valid."""
    trajectory.status, trajectory.error_kind, trajectory.error = status, kind, error
    trajectory.reward, trajectory.rewards = None, {}


async def _run(services: Services, rollout: Rollout, task: Task, trajectory: Trajectory, partial: str) -> None:
    policy = services.policies[rollout.policy]
    if policy.model is not None and services.config.seed is not None:
        trajectory.seed = rollout.seed(services.config.seed, trajectory.attempt)
    await asyncio.to_thread(check_unchanged, task)
    sandboxes = Sandboxes(services.provider)
    with timed(trajectory, "setup_s"):
        sandbox, resumed = await _sandbox(services, sandboxes, task, policy, partial)
    try:
        with timed(trajectory, "setup_s"):
            await _prepare(task, sandbox, resumed)
        if resumed:
            resumed.carry_over(trajectory)
        agent_run = AgentRun(services, rollout, policy, sandbox, sandboxes, trajectory, resumed)
        verdict = await run_steps(
            task,
            sandbox,
            verification_context(task, services.config.environment, services.images, sandboxes.start),
            agent_run.run,
            verdicts=agent_run.verdicts,
            under_way=resumed is not None,
            verifying=lambda: timed(trajectory, "verify_s"),
        )
        await asyncio.to_thread(check_unchanged, task)  # nor while it ran
        trajectory.artifacts += verdict.artifacts
        trajectory.artifacts.append(
            Artifact("verifier.log", verdict.output.encode("utf-8", "backslashreplace")[:MAX_ARTIFACT])
        )
        trajectory.reward, trajectory.rewards = verdict.reward, dict(verdict.rewards)
        if verdict.agent_error or verdict.error:
            trajectory.error_kind = "verifier" if verdict.error else "agent"
            trajectory.error = "; ".join(filter(None, (trajectory.error, verdict.agent_error, verdict.error)))
    finally:
        try:
            await sandbox.stop()
        except Exception as error:  # what is left is the janitor's; the verdict is as good as it was
            print(printable(f"{rollout.id}: {error}"), file=sys.stderr)
        sandboxes.count(trajectory)


async def _sandbox(
    services: Services, sandboxes: Sandboxes, task: Task, policy: Policy, partial: str
) -> tuple[ApptainerSandbox, Partial | None]:
    """A sandbox for a rollout, with the partial rollout that is in it, where there is one to go on with."""
    try:
        spec = rollout_spec(task, policy, services.images, services.config.environment)
        resumed = await services.suspension.read(partial)
        if resumed is not None:
            try:
                sandbox = await sandboxes.start(spec, resumed.layer)
                return sandbox, resumed
            except SandboxError as error:
                print(printable(f"{error}; the rollout starts anew"), file=sys.stderr)
            finally:
                services.suspension.remove(partial)
        return await sandboxes.start(spec), None
    except SandboxError as error:
        raise NoSandbox(str(error)) from error
    except OSError as error:
        raise NoSandbox(f"no sandbox could be made: {error}") from error


async def _prepare(task: Task, sandbox: ApptainerSandbox, resumed: Partial | None) -> None:
    """Makes a sandbox ready for the agent."""
    if resumed is None:
        await prepare(task, sandbox)
    else:
        checkout.write_note(sandbox, resumed.note)
