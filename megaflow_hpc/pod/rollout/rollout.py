"""Runs one attempt at a rollout, from the start of its sandbox to its verdict.

An attempt starts the sandbox, runs the agent, kills all of the agent's processes, and verifies the result. If a task
has several steps, the last three are repeated for each step. Errors are not raised but reported in the trajectory, as a
status and a cause:

- If the infrastructure fails, the status is ``failed``, and the error kind names the faulty part.
- If the agent fails, the status is ``completed``, and its work is verified as usual. If its program cannot be started,
  the status is ``failed``.
- If the verifier fails, the reward is 0.
- If the allocation ends first, the status is ``cancelled``. The rollout resumes in another allocation, from its
  checkpoint if it has one.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec

from megaflow_hpc.agents import create
from megaflow_hpc.agents.registry import forked
from megaflow_hpc.agents.remote import AgentJob, ProcessLostError
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.environments.sandbox.spec import Reachable, SandboxSpec
from megaflow_hpc.errors import (
    ConfigError,
    LimitError,
    LostError,
    MegaflowError,
    ModelServiceError,
    SandboxError,
    ServiceError,
    SetupError,
    UserCodeError,
)
from megaflow_hpc.host.process import node_name
from megaflow_hpc.model.gateway.open_rollout import SEEDS
from megaflow_hpc.model.gateway.replay import calls_artifact
from megaflow_hpc.pod.outcome import COST_FILE
from megaflow_hpc.pod.rollout.judges import by_role, conversation, used
from megaflow_hpc.pod.rollout.preemption import Checkpoint, CutShort
from megaflow_hpc.pod.rollout.sandboxes import Sandboxes, rollout_spec
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.digests import check_unchanged
from megaflow_hpc.tasks.formats import StepVerdict, VerificationContext
from megaflow_hpc.tasks.sandboxes import NoSandbox, verification_context
from megaflow_hpc.tasks.scoring import check_turns
from megaflow_hpc.tasks.services import services_of
from megaflow_hpc.tasks.steps import prepare, run_conversation, run_steps
from megaflow_hpc.texts import printable
from megaflow_hpc.trajectory import Recording, Trajectory, linked
from megaflow_hpc.types import (
    MAX_REWARDS,
    TURN_REWARD,
    Agent,
    AgentResult,
    Artifact,
    CallBudget,
    ErrorKind,
    ModelEndpoint,
    ResumableAgent,
    Rollout,
    Status,
    Task,
    Verdict,
    checked_rewards,
    whole_rewards,
)

# --- the agent ---


KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
NO_PROGRAM = (126, 127)
"""Exit codes with which a shell reports that a program cannot be executed or does not exist."""
SETTLE_S = 1.0
"""Seconds to wait after an agent was killed, because Slurm may be ending the job. If its signal arrives during that
time, the rollout counts as preempted and is not verified."""


class NoProgramError(MegaflowError):
    """The agent's program could not be started, so there is nothing to verify."""


@contextmanager
def timed(trajectory: Trajectory, name: str) -> Iterator[None]:
    """Context manager that adds the duration of its block to the trajectory's timing ``name``, in seconds."""
    began = time.monotonic()
    try:
        yield
    finally:
        setattr(trajectory, name, (getattr(trajectory, name) or 0.0) + time.monotonic() - began)


class AgentRun:
    """Runs the agent of one attempt on each step, and adds its work to the trajectory.

    Args:
        sandbox: The sandbox, or its stand-in if the task has none.
        resumed: The checkpoint to resume from, or ``None``.
    """

    def __init__(self, attempt: RunningAttempt, sandbox: ApptainerSandbox, resumed: Checkpoint | None = None) -> None:
        self._services, self._rollout, self._agent = attempt.services, attempt.rollout, attempt.agent
        self._has_model, self._sandboxes = attempt.has_model, attempt.sandboxes
        self._trajectory, self._sandbox, self._resumed = attempt.trajectory, sandbox, resumed
        self.verdicts: list[StepVerdict] = resumed.verdicts if resumed else []
        """Verdicts of the completed steps."""

    async def run(self, number: int, step: Task) -> None:
        """Runs the agent on one step.

        Raises:
            CutShort: The allocation ends. The exception names the checkpoint, if one was saved.
        """
        trajectory, sandbox = self._trajectory, self._sandbox
        resumed, self._resumed = self._resumed, None
        breaches_before, agent_s_before = len(sandbox.breaches), trajectory.agent_s or 0.0

        def breaches() -> list[str]:
            new = [str(breach) for breach in sandbox.breaches[breaches_before:]]
            return [*resumed.breaches, *new] if resumed else new

        try:
            with timed(trajectory, "agent_s"):
                result, recording = await self._run_agent(step, resumed)
        except CutShort as cut:
            if cut.agent is not None:
                spent_s = (trajectory.agent_s or 0.0) - agent_s_before + (resumed.agent_s if resumed else 0.0)
                self._sandboxes.add_usage(trajectory)
                checkpoint = Checkpoint(trajectory, number, self.verdicts, spent_s, cut.agent, cut.recorded, breaches())
                cut.checkpoint, cut.why = await self._services.preemption.save(self._rollout.id, checkpoint, sandbox)
            raise
        _report_breaches(result, breaches())
        _add(trajectory, result, recording)
        if result.exit_code in KILLED:
            await asyncio.sleep(SETTLE_S)

    async def _run_agent(self, task: Task, resumed: Checkpoint | None) -> tuple[AgentResult, Recording]:
        """Runs the agent. An agent without a sandbox is run again if its shared process ended, because another agent
        may have caused that."""
        if not task.image and forked(self._agent.name):
            with suppress(ProcessLostError):
                return await self._run_agent_once(task, resumed, shared=True)
        return await self._run_agent_once(task, resumed, shared=False)

    async def _run_agent_once(
        self, task: Task, resumed: Checkpoint | None, shared: bool
    ) -> tuple[AgentResult, Recording]:
        """Runs the agent within its time limit. Returns the gateway's recording, even if the agent is interrupted.

        The agent's work is verified even if the agent ended with an error. An unanswered model call counts as a failure
        of the model service only if the service was down (:meth:`.ModelGateway.outage`). An exception that the agent's
        code raises after a response counts as the agent's failure, because the response may have caused it. The same
        applies to a step inside the sandbox that fails after a response, in this step of the task or in an earlier one.

        Raises:
            CutShort: The allocation ends, and the gateway refused a model call of the agent.
            ModelServiceError: The model service was down.
            NoProgramError: The agent's program in the sandbox could not be started.
            UserCodeError, ConfigError, SetupError: The agent's code, or a step in the sandbox that it needs, failed
                before the model's first response.
            LostError: The sandbox was lost in the first attempt. In later attempts, the loss counts as the agent's
                failure.
            ProcessLostError: The process that the agent shared with others ended.
        """
        services, rollout, settings = self._services, self._rollout, self._agent
        agent = create(settings)
        recorded, state = (resumed.recorded, resumed.agent) if resumed else (None, None)
        endpoint = await self._open_model(task, agent, recorded) if self._has_model else None
        timeout_s = settings.timeout_s or task.agent_timeout_s
        remaining_s = max(0.0, timeout_s - (resumed.agent_s if resumed else 0.0))
        recording = Recording()
        raised: MegaflowError | None = None
        # The state of Python tasks and of services cannot be saved.
        resumable = endpoint is not None and hasattr(agent, "resume") and task.kind != "python" and not task.services
        watching = services.preemption.watching(rollout.id, self._sandbox) if resumable else nullcontext()
        try:
            try:
                if forked(settings.name):
                    in_sandbox = partial(services.gateway.in_sandbox, rollout.id)
                    job = AgentJob(settings, task, self._sandbox, endpoint, state, rollout.id, in_sandbox)
                    if task.image:
                        work = services.agents.run(job)
                    else:
                        work = services.conversing.run(job) if shared else services.conversing.run_alone(job)
                else:
                    if state is not None:
                        cast(ResumableAgent, agent).resume(state)
                    work = agent.run(task, self._sandbox, endpoint)
                with watching:
                    async with asyncio.timeout(remaining_s):
                        result = await work
            except TimeoutError:
                result = AgentResult(status="truncated", error=f"the agent's {timeout_s:g} s were over")
            except LimitError as error:
                result = AgentResult(status="truncated", error=str(error))
            except LostError as error:
                if self._trajectory.attempt == 0:
                    raise
                result = AgentResult(exit_code=KILLED[0], error=str(error))
            except (UserCodeError, ModelServiceError, ConfigError, SetupError) as error:
                if shared and isinstance(error, ProcessLostError):
                    raise
                result, raised = AgentResult(), error  # perhaps because the gateway refused a call
            if endpoint:
                suspended = services.gateway.suspended(rollout.id)
                if suspended is not None:
                    raise CutShort(result.state, suspended)
                outage = await services.gateway.outage(rollout.id)
                if outage:
                    raise ModelServiceError(outage) from raised
        finally:
            if endpoint:
                recording = await services.gateway.close(rollout.id)
        called = bool(recording.turns or self._trajectory.turns)
        if recording.over_budget:  # no matter how the agent handled the refusal
            result.status, result.error = "truncated", recording.over_budget
        elif raised is not None:
            if not called:
                raise raised
            result.exit_code, result.error = 1, str(raised)
        if result.exit_code in NO_PROGRAM and getattr(agent, "in_sandbox", False) and not called:
            raise NoProgramError(result.error or f"the agent's program ended with exit code {result.exit_code}")
        return result, recording

    async def _open_model(self, task: Task, agent: Agent, recorded: Mapping[str, Any] | None) -> ModelEndpoint:
        """Opens a URL for the rollout's model calls. If the agent runs in a sandbox that can reach only the gateway,
        the gateway listens inside that sandbox."""
        gateway, rollout, trajectory = self._services.gateway, self._rollout, self._trajectory
        network = self._services.config.environment.network_of(task)
        limits = self._agent
        stored = sum(len(image.data) for image in trajectory.images.values())
        image_bytes = max(0, int(limits.max_image_mb * 1e6) - stored)
        budget = CallBudget(limits.max_turns, limits.max_tokens, image_bytes)
        seed = (trajectory.seed + len(trajectory.turns)) % SEEDS if trajectory.seed >= 0 else -1
        if network == "gateway" and getattr(agent, "in_sandbox", False):
            return await gateway.open(rollout.id, rollout.policy, await self._sandbox.listen(), budget, seed)
        endpoint = await gateway.open(rollout.id, rollout.policy, None, budget, seed, recorded)
        return replace(endpoint, sandbox_url=endpoint.base_url) if network == "host" else endpoint


def _add(trajectory: Trajectory, result: AgentResult, recording: Recording) -> None:
    """Adds the agent's work in one step to the trajectory of the earlier steps."""
    if trajectory.status != "truncated":
        trajectory.status = result.status
    if result.exit_code or result.error:
        _blame(trajectory, "agent", result.error)
    messages, parents = recording.messages, recording.parents
    if not messages:
        messages, parents = result.messages, []
    _add_rewards(trajectory, result, len(recording.turns))
    first = len(trajectory.messages)
    for turn in recording.turns:
        turn.sequence += len(trajectory.sequences) if turn.sequence >= 0 else 0
        turn.message += first if turn.message >= 0 else 0
        turn.started_by += len(trajectory.turns) if turn.started_by >= 0 else 0
    moved = [parent + first if parent >= 0 else -1 for parent in linked(parents, len(messages))]
    trajectory.parents = [*trajectory.parents, *moved]
    trajectory.messages = [*trajectory.messages, *messages]
    trajectory.sequences = [*trajectory.sequences, *recording.sequences]
    trajectory.turns = [*trajectory.turns, *recording.turns]
    trajectory.images = {**trajectory.images, **recording.images}
    trajectory.inexact += recording.inexact
    trajectory.constrained += recording.constrained
    if recording.calls:
        trajectory.artifacts.append(calls_artifact(recording))


def _add_rewards(trajectory: Trajectory, result: AgentResult, turns: int) -> None:
    """Adds the agent's rewards of a step with ``turns`` model calls.

    If a turn's reward belongs to a call that was not made, all rewards of turns are left out, and an error is recorded.
    Rewards of roles are kept, because they do not depend on calls.
    """
    of_turns = {f"{TURN_REWARD}{n}": value for n, value in enumerate(result.turn_rewards, len(trajectory.turns))}
    try:
        check_turns(of_turns, len(trajectory.turns) + turns)
    except UserCodeError as error:
        of_turns = {}
        _blame(trajectory, "agent", f"the agent's rewards of turns are left out: {error}")
    trajectory.rewards = {**trajectory.rewards, **result.rewards, **of_turns}


def _blame(trajectory: Trajectory, kind: ErrorKind, error: str) -> None:
    trajectory.error_kind = kind
    trajectory.error = "; ".join(filter(None, (trajectory.error, error)))


def _report_breaches(result: AgentResult, breaches: Sequence[str]) -> None:
    """Sets the result's error to the first limit that the agent's commands exceeded, unless it already has an error."""
    if breaches and not result.error:
        more = f" (and {len(breaches) - 1} more)" if len(breaches) > 1 else ""
        result.error = f"{breaches[0]}{more}"


# --- the attempt ---


MAX_ARTIFACT_BYTES = 1 << 20


def blank(rollout: Rollout, attempt: int) -> Trajectory:
    """Returns a trajectory for an attempt that has just begun, with the provisional status ``failed``."""
    return Trajectory.begin(rollout, attempt, "failed", node=node_name())


class NoSandboxError(SandboxError):
    """Raised if the sandbox could not be started. The node may be at fault."""


@dataclass
class AttemptResult:
    """Trajectory of one attempt, with its failure cause and its checkpoint."""

    trajectory: Trajectory
    cause: str = ""
    """Cause of a failure (:mod:`megaflow_hpc.pod.scheduling.failures`). If empty, the trajectory's error kind
    determines it."""
    checkpoint: str = ""
    """Checkpoint from which an interrupted attempt can resume. Empty if there is none."""


async def run_attempt(
    services: Services, rollout: Rollout, task: Task, attempt: int, checkpoint: str = ""
) -> AttemptResult:
    """Runs one attempt. Reports errors and cancellation in the returned trajectory instead of raising them.

    Args:
        checkpoint: Checkpoint of an interrupted attempt to resume from. Empty to start from the beginning.
    """
    began = time.time()
    ended = AttemptResult(blank(rollout, attempt))
    trajectory = ended.trajectory
    try:
        await RunningAttempt(services, rollout, task, trajectory, checkpoint).run()
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
            causes = {NoSandboxError: "sandbox-start", ServiceError: "service"}
            ended.cause = causes.get(type(error), "sandbox-lost")
    except ModelServiceError as error:
        _end(trajectory, "failed", "model", str(error))
    except NoProgramError as error:
        _end(trajectory, "failed", "agent", str(error))
    except (ConfigError, UserCodeError) as error:  # the message names the location
        _end(trajectory, "failed", "user", str(error))
    except Exception as error:  # a bug in a scaffold or a task must not end the runner
        location = traceback.extract_tb(error.__traceback__)[-1]
        _end(trajectory, "failed", "user", f"{error!r} at {location}")
    trajectory.started_at = began
    trajectory.finished_at = time.time()
    return ended


def _cancel(services: Services, trajectory: Trajectory, error: str) -> None:
    _end(trajectory, "cancelled", services.preemption.kind, error)


def _end(trajectory: Trajectory, status: Status, kind: str, error: str) -> None:
    """Ends a trajectory without a verdict. Clears the reward, which a trajectory without a verdict must not have."""
    trajectory.status, trajectory.error_kind, trajectory.error = status, kind, error
    trajectory.reward, trajectory.rewards = None, {}


def _storable(verdict: Verdict, turns: int) -> Verdict:
    """Returns the verdict if a trajectory can store its rewards. Otherwise returns reward 0 with an error.

    A verdict that rewards model calls which the rollout did not make is invalid too.
    """
    try:
        check_turns(verdict.rewards, turns)
        checked_rewards(verdict.rewards)
    except (UserCodeError, ValueError) as error:
        whole = [*whole_rewards(verdict.rewards)][:MAX_REWARDS]
        return replace(verdict, reward=0.0, rewards=dict.fromkeys(whole or ["reward"], 0.0), error=str(error))
    return verdict


def _add_verdict(trajectory: Trajectory, verdict: Verdict) -> None:
    """Adds a verdict's rewards, which replace the agent's rewards of the same names. If a trajectory cannot store all
    of them, the agent's rewards are left out and an error is recorded."""
    rewards = {**trajectory.rewards, **verdict.rewards}
    try:
        checked_rewards(rewards)
    except ValueError as error:
        rewards = dict(verdict.rewards)
        _blame(trajectory, "agent", f"the agent's rewards are left out: together with the verifier's, {error}")
    trajectory.reward, trajectory.rewards = verdict.reward, rewards
    if verdict.agent_error or verdict.error:
        why = "; ".join(filter(None, (verdict.agent_error, verdict.error)))
        _blame(trajectory, "verifier" if verdict.error else "agent", why)


class RunningAttempt:
    """A running attempt: its task, its agent, and the state that its steps share.

    Args:
        trajectory: The trajectory to complete.
        checkpoint: Name of the checkpoint to resume from. Empty if there is none.
    """

    def __init__(
        self, services: Services, rollout: Rollout, task: Task, trajectory: Trajectory, checkpoint: str
    ) -> None:
        policy = services.policies[rollout.policy]
        self.services, self.rollout, self.task, self.trajectory = services, rollout, task, trajectory
        self.agent, self.has_model = policy.agent(rollout.agent), policy.model is not None
        """The agent, and whether it has a model. The agent calls the model through the gateway."""
        self.sandboxes = Sandboxes(services.provider)
        self._checkpoint = checkpoint
        self._judges = services.judges(rollout.id)

    async def run(self) -> None:
        """Runs the attempt until it has a verdict. Raises any error that prevents a verdict."""
        task, trajectory, config = self.task, self.trajectory, self.services.config
        if self.has_model and config.seed is not None:
            trajectory.seed = self.rollout.seed(config.seed, trajectory.attempt)
        await asyncio.to_thread(check_unchanged, task)
        context = verification_context(
            task,
            config.environment,
            self.services.images,
            self.sandboxes.start,
            messages=lambda: conversation(trajectory),
            judge=self._judges.open if self._judges.models else None,
            roles=lambda: by_role(trajectory),
            artifacts=lambda: {artifact.name: artifact.data for artifact in trajectory.artifacts},
        )
        verdict = await (self._run_in_sandbox(context) if task.image else self._converse(context))
        verdict = _storable(verdict, len(trajectory.turns))
        await asyncio.to_thread(check_unchanged, task)  # the task must not have changed during the rollout
        output = verdict.output.encode("utf-8", "backslashreplace")[:MAX_ARTIFACT_BYTES]
        trajectory.artifacts += [*verdict.artifacts, *self._judges.artifacts(), Artifact("verifier.log", output)]
        if models := used(trajectory, self._judges, self.services.metered):
            trajectory.artifacts.append(Artifact(COST_FILE, msgspec.json.encode(models)))
        _add_verdict(trajectory, verdict)

    def _verifying(self) -> AbstractContextManager[None]:
        return timed(self.trajectory, "verify_s")

    async def _converse(self, context: VerificationContext) -> Verdict:
        none = NoSandbox(self.task)
        conversing = AgentRun(self, cast(ApptainerSandbox, none))
        return await run_conversation(self.task, none, context, conversing.run, self._verifying)

    async def _run_in_sandbox(self, context: VerificationContext) -> Verdict:
        """Starts the task's services and a sandbox, runs the steps of the task in the sandbox, then stops both."""
        trajectory, services = self.trajectory, self.services
        async with AsyncExitStack() as stack:
            stack.callback(self.sandboxes.add_usage, trajectory)
            with timed(trajectory, "setup_s"):
                environment = services.config.environment
                beside = services_of(self.task, services.images, environment, self._start, services.shared)
                await stack.enter_async_context(beside)
                sandbox, resumed = await self._start_sandbox(beside.reachable)
            stack.push_async_callback(self._stop, sandbox)

            async def work() -> Verdict:
                with timed(trajectory, "setup_s"):
                    if resumed is None:
                        await prepare(self.task, sandbox)
                    else:
                        checkout.write_note(sandbox, resumed.note)
                if resumed is not None:
                    resumed.carry_over(trajectory)
                in_sandbox = AgentRun(self, sandbox, resumed)
                return await run_steps(
                    self.task,
                    sandbox,
                    context,
                    in_sandbox.run,
                    verdicts=in_sandbox.verdicts,
                    under_way=resumed is not None,
                    verifying=self._verifying,
                )

            return await beside.guard(work())

    async def _stop(self, sandbox: ApptainerSandbox) -> None:
        try:
            await sandbox.stop()
        except Exception as error:  # the verdict stays valid, and the janitor cleans up
            print(printable(f"{self.trajectory.id}: {error}"), file=sys.stderr)

    async def _start_sandbox(self, reachable: Reachable | None) -> tuple[ApptainerSandbox, Checkpoint | None]:
        """Starts the sandbox. Restores the files of the checkpoint if there is one."""
        services = self.services
        spec = rollout_spec(self.task, self.agent, services.images, services.config.environment)
        spec = replace(spec, services=reachable)
        resumed = await services.preemption.load(self._checkpoint)
        if resumed is not None:
            try:
                return await self._start(spec, resumed.layer), resumed
            except NoSandboxError as error:
                print(printable(f"{error}; the rollout restarts from the beginning"), file=sys.stderr)
            finally:
                services.preemption.remove(self._checkpoint)
        return await self._start(spec), None

    async def _start(self, spec: SandboxSpec, kept: Snapshot | None = None) -> ApptainerSandbox:
        try:
            return await self.sandboxes.start(spec, kept)
        except SandboxError as error:
            raise NoSandboxError(str(error)) from error
        except OSError as error:
            raise NoSandboxError(f"no sandbox could be made: {error}") from error
