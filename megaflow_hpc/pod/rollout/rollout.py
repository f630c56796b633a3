"""Runs one rollout from start to verdict.

The steps are: start the sandbox, run the agent, kill all of the agent's processes, verify. Tasks with several steps
repeat the last three for each step. Every error becomes a status and a cause, never an exception. An infrastructure
failure gives ``failed``, with an error kind that says what is to blame. A failed agent gives ``completed`` and is
verified as usual, unless its program could not be started: that gives ``failed``. A failed verifier gives reward 0. If
the allocation ends first, the rollout is ``cancelled`` and resumes in another allocation from its checkpoint
(preemption.py).
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from dataclasses import dataclass

from megaflow_hpc.config.sections import AgentConfig
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError, ModelServiceError, SandboxError, UserCodeError
from megaflow_hpc.host.process import node_name
from megaflow_hpc.pod.rollout.agent_run import AgentRun, NoProgramError, timed
from megaflow_hpc.pod.rollout.checkpoint import Checkpoint, CutShort
from megaflow_hpc.pod.rollout.judges import Judges, conversation
from megaflow_hpc.pod.rollout.sandboxes import Sandboxes, rollout_spec
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.digests import check_unchanged
from megaflow_hpc.tasks.sandboxes import verification_context
from megaflow_hpc.tasks.steps import prepare, run_steps
from megaflow_hpc.texts import printable
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Artifact, Rollout, Status, Task

MAX_ARTIFACT_BYTES = 1 << 20


def blank(rollout: Rollout, attempt: int) -> Trajectory:
    """Returns the trajectory of an attempt that has just begun, with the provisional status ``failed``."""
    return Trajectory.begin(rollout, attempt, "failed", node=node_name())


class NoSandboxError(SandboxError):
    """No sandbox could be started. The node may be at fault."""


@dataclass
class AttemptResult:
    """The result of one attempt."""

    trajectory: Trajectory
    cause: str = ""
    """Cause of a failure, one of those in :mod:`megaflow_hpc.pod.scheduling.failures`."""
    checkpoint: str = ""
    """Checkpoint from which an interrupted attempt resumes. Empty if there is none."""


async def run_attempt(
    services: Services, rollout: Rollout, task: Task, attempt: int, checkpoint: str = ""
) -> AttemptResult:
    """Runs one attempt and reports any error in its trajectory. On cancellation, the trajectory has status
    ``cancelled``.

    Args:
        checkpoint: checkpoint of an interrupted attempt to resume from. Empty if there is none.
    """
    began = time.time()
    ended = AttemptResult(blank(rollout, attempt))
    trajectory = ended.trajectory
    try:
        await _run(services, rollout, task, trajectory, checkpoint)
        if services.preemption.preempted:
            raise asyncio.CancelledError
    except CutShort as cut:
        ended.trajectory = trajectory = blank(rollout, attempt)  # the checkpoint holds the work so far
        ended.checkpoint = cut.checkpoint
        _cancel(services, trajectory, str(cut))
    except asyncio.CancelledError:
        _cancel(services, trajectory, "stopped before it ended")
    except SandboxError as error:
        if services.preemption.preempted:
            _cancel(services, trajectory, f"preempted: {error}")
        else:
            _end(trajectory, "failed", "sandbox", str(error))
            ended.cause = "sandbox-start" if isinstance(error, NoSandboxError) else "sandbox-lost"
    except ModelServiceError as error:
        _end(trajectory, "failed", "model", str(error))
    except NoProgramError as error:
        _end(trajectory, "failed", "agent", str(error))
    except (ConfigError, UserCodeError) as error:  # the message names the location
        _end(trajectory, "failed", "user", str(error))
    except Exception as error:  # a bug in a scaffold or a task must cost one rollout, not the runner
        place = traceback.extract_tb(error.__traceback__)[-1]
        _end(trajectory, "failed", "user", f"{error!r} at {place}")
    trajectory.started_at = began
    trajectory.finished_at = time.time()
    return ended


def _cancel(services: Services, trajectory: Trajectory, error: str) -> None:
    _end(trajectory, "cancelled", services.preemption.kind, error)


def _end(trajectory: Trajectory, status: Status, kind: str, error: str) -> None:
    """Ends a trajectory without a verdict. Clears the reward, because a file with a reward for such a rollout is
    invalid."""
    trajectory.status, trajectory.error_kind, trajectory.error = status, kind, error
    trajectory.reward, trajectory.rewards = None, {}


async def _run(services: Services, rollout: Rollout, task: Task, trajectory: Trajectory, checkpoint: str) -> None:
    policy = services.policies[rollout.policy]
    agent = policy.agent(rollout.agent)
    if policy.model is not None and services.config.seed is not None:
        trajectory.seed = rollout.seed(services.config.seed, trajectory.attempt)
    await asyncio.to_thread(check_unchanged, task)
    sandboxes = Sandboxes(services.provider)
    with timed(trajectory, "setup_s"):
        sandbox, resumed = await _start_sandbox(services, sandboxes, task, agent, checkpoint)
    try:
        with timed(trajectory, "setup_s"):
            if resumed is None:
                await prepare(task, sandbox)
            else:
                checkout.write_note(sandbox, resumed.note)
        if resumed is not None:
            resumed.carry_over(trajectory)
        agent_run = AgentRun(
            services, rollout, agent, policy.model is not None, sandbox, sandboxes, trajectory, resumed
        )
        judges = Judges(services.gateway, rollout.id, services.config.judges())
        verdict = await run_steps(
            task,
            sandbox,
            verification_context(
                task,
                services.config.environment,
                services.images,
                sandboxes.start,
                lambda: conversation(trajectory),
                judges.open if judges.models else None,
            ),
            agent_run.run,
            verdicts=agent_run.verdicts,
            under_way=resumed is not None,
            verifying=lambda: timed(trajectory, "verify_s"),
        )
        await asyncio.to_thread(check_unchanged, task)  # the task must not have changed during the rollout
        output = verdict.output.encode("utf-8", "backslashreplace")[:MAX_ARTIFACT_BYTES]
        trajectory.artifacts += [*verdict.artifacts, *judges.artifacts(), Artifact("verifier.log", output)]
        trajectory.reward, trajectory.rewards = verdict.reward, {**trajectory.rewards, **verdict.rewards}
        if verdict.agent_error or verdict.error:
            trajectory.error_kind = "verifier" if verdict.error else "agent"
            trajectory.error = "; ".join(filter(None, (trajectory.error, verdict.agent_error, verdict.error)))
    finally:
        try:
            await sandbox.stop()
        except Exception as error:  # the janitor cleans up, and the verdict stays valid
            print(printable(f"{rollout.id}: {error}"), file=sys.stderr)
        sandboxes.add_usage(trajectory)


async def _start_sandbox(
    services: Services, sandboxes: Sandboxes, task: Task, agent: AgentConfig, checkpoint: str
) -> tuple[ApptainerSandbox, Checkpoint | None]:
    """Starts a rollout's sandbox, restoring the files of its checkpoint if there is one."""
    try:
        spec = rollout_spec(task, agent, services.images, services.config.environment)
        resumed = await services.preemption.load(checkpoint)
        if resumed is not None:
            try:
                return await sandboxes.start(spec, resumed.layer), resumed
            except SandboxError as error:
                print(printable(f"{error}; the rollout starts anew"), file=sys.stderr)
            finally:
                services.preemption.remove(checkpoint)
        return await sandboxes.start(spec), None
    except SandboxError as error:
        raise NoSandboxError(str(error)) from error
    except OSError as error:
        raise NoSandboxError(f"no sandbox could be made: {error}") from error
