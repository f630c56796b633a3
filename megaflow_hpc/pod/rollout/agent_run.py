"""The agent's part of a rollout: it runs on each step of the task, and what it did goes into the trajectory."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

from megaflow_hpc.agents import create
from megaflow_hpc.agents.remote import forked
from megaflow_hpc.config import Policy
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import LimitError, LostError, ModelServiceError, UserCodeError
from megaflow_hpc.model.gateway.replay import calls_artifact
from megaflow_hpc.model.gateway.server import SEEDS
from megaflow_hpc.pod.rollout.partial import CutShort, Partial
from megaflow_hpc.pod.rollout.sandboxes import Sandboxes
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks.formats import StepVerdict
from megaflow_hpc.trajectory import Recording, Trajectory, linked
from megaflow_hpc.types import Agent, AgentResult, CallBudget, ModelEndpoint, ResumableAgent, Rollout, Sandbox, Task

KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
SETTLE_S = 1.0
"""After an agent was killed: if it is the job that ends, the signal will have reached the sandbox and us by then, and a
preempted rollout is not to be judged."""


@contextmanager
def timed(trajectory: Trajectory, name: str) -> Iterator[None]:
    """Adds the seconds of its body to one of the trajectory's timings."""
    began = time.monotonic()
    try:
        yield
    finally:
        setattr(trajectory, name, (getattr(trajectory, name) or 0.0) + time.monotonic() - began)


class AgentRun:
    """The agent's part of each step: it runs, and what it did goes into the trajectory.

    Args:
        resumed: the partial rollout to go on with; its step comes first.
    """

    def __init__(
        self,
        services: Services,
        rollout: Rollout,
        policy: Policy,
        sandbox: ApptainerSandbox,
        sandboxes: Sandboxes,
        trajectory: Trajectory,
        resumed: Partial | None,
    ) -> None:
        self._sandboxes = sandboxes
        self._services, self._rollout, self._policy = services, rollout, policy
        self._sandbox, self._trajectory, self._resumed = sandbox, trajectory, resumed
        self.verdicts: list[StepVerdict] = resumed.verdicts if resumed else []
        """Of the steps that are done."""

    async def run(self, number: int, step: Task) -> None:
        """Runs the agent on one step.

        Raises:
            CutShort: the allocation ends; the rollout was kept, where it can go on.
        """
        trajectory, sandbox = self._trajectory, self._sandbox
        resumed, self._resumed = self._resumed, None
        before, before_s = len(sandbox.breaches), trajectory.agent_s or 0.0
        try:
            with timed(trajectory, "agent_s"):
                seed = (trajectory.seed + len(trajectory.turns)) % SEEDS if trajectory.seed >= 0 else -1
                result, recording = await _run_agent(
                    self._services, self._rollout, step, self._policy, sandbox, seed, resumed, trajectory.attempt
                )
        except CutShort as cut:
            spent_s = (trajectory.agent_s or 0.0) - before_s + (resumed.agent_s if resumed else 0.0)
            if cut.agent is not None:
                passed = _breaches(sandbox, before, resumed)
                self._sandboxes.count(trajectory)
                kept = Partial(trajectory, number, self.verdicts, spent_s, cut.agent, cut.recorded, passed)
                cut.kept, cut.why = await self._services.suspension.keep(self._rollout.id, kept, sandbox)
            raise
        _report_breaches(result, _breaches(sandbox, before, resumed))
        _add(trajectory, result, recording)
        if result.exit_code in KILLED:
            await asyncio.sleep(SETTLE_S)


async def _run_agent(
    services: Services,
    rollout: Rollout,
    task: Task,
    policy: Policy,
    sandbox: ApptainerSandbox,
    seed: int,
    resumed: Partial | None,
    attempt: int,
) -> tuple[AgentResult, Recording]:
    """Runs the agent within its time limit. The gateway's recording is kept even if the agent is cut off.

    An agent that ended by itself is verified, even after an error. The model service is to blame for an unanswered call
    only if it was down (:meth:`.ModelGateway.outage`). An exception of the agent's code after an answer counts as the
    agent's failure, because the answer may have caused it.

    Raises:
        CutShort: the allocation ends, and the gateway refused a model call of the agent for that reason.
        ModelServiceError: the model service was down.
        UserCodeError: the agent's code failed before the model had answered.
        LostError: the sandbox was lost in the first attempt. In a second attempt, the agent is held responsible.
    """
    agent = create(policy.agent)
    recorded, state = (resumed.recorded, resumed.agent) if resumed else (None, None)
    endpoint = await _open_model(services, rollout, task, agent, sandbox, seed, recorded) if policy.model else None
    timeout_s = policy.agent.timeout_s or task.agent_timeout_s
    left_s = max(0.0, timeout_s - (resumed.agent_s if resumed else 0.0))
    recording = Recording()
    raised: UserCodeError | ModelServiceError | None = None
    goes_on = endpoint is not None and hasattr(agent, "resume") and task.kind != "python"  # its code has a state too
    watching = services.suspension.watching(rollout.id, sandbox) if goes_on else nullcontext()
    try:
        try:
            forks = forked(policy.agent.name)
            if state is not None and not forks:
                cast(ResumableAgent, agent).resume(state)
            timed = partial(services.gateway.in_sandbox, rollout.id)
            asked = (policy.agent, task, sandbox, endpoint, state, rollout.id, timed)
            work = services.agents.run(*asked) if forks else None
            with watching:
                result = await asyncio.wait_for(work or agent.run(task, sandbox, endpoint), left_s)
        except TimeoutError:
            result = AgentResult(status="truncated", error=f"the agent's {timeout_s:g} s were over")
        except LimitError as error:
            result = AgentResult(status="truncated", error=str(error))
        except LostError as error:
            if attempt == 0:
                raise
            result = AgentResult(exit_code=KILLED[0], error=str(error))
        except (UserCodeError, ModelServiceError) as error:
            result, raised = AgentResult(), error  # perhaps that is what its client made of a refusal
        if endpoint and (known := services.gateway.suspended(rollout.id)) is not None:
            raise CutShort(result.state, known)
        if endpoint and (failure := await services.gateway.outage(rollout.id)):
            raise ModelServiceError(failure) from raised  # whatever the agent's client made of the 503
    finally:
        if endpoint:
            recording = await services.gateway.close(rollout.id)
    if recording.over_budget:  # however the agent took the refusal
        result.status, result.error = "truncated", recording.over_budget
    elif raised is not None:
        if endpoint is None or not recording.turns:
            raise raised
        result.exit_code, result.error = 1, str(raised)
    return result, recording


async def _open_model(
    services: Services,
    rollout: Rollout,
    task: Task,
    agent: Agent,
    sandbox: Sandbox,
    seed: int,
    recorded: Mapping[str, Any] | None,
) -> ModelEndpoint:
    """The rollout's address at the gateway, and for an agent inside the sandbox the way to it from there."""
    network = services.config.environment.network_of(task)
    limits = services.policies[rollout.policy].agent
    budget = CallBudget(calls=limits.max_turns, tokens=limits.max_tokens)
    if network == "gateway" and getattr(agent, "in_sandbox", False):
        return await services.gateway.open(rollout.id, rollout.policy, await sandbox.listen(), budget, seed)
    endpoint = await services.gateway.open(rollout.id, rollout.policy, None, budget, seed, recorded)
    return replace(endpoint, sandbox_url=endpoint.base_url) if network == "host" else endpoint


def _add(trajectory: Trajectory, result: AgentResult, recording: Recording) -> None:
    """Adds what an agent did to what it did in earlier steps."""
    if trajectory.status != "truncated":
        trajectory.status = result.status
    if result.exit_code or result.error:
        trajectory.error_kind = "agent"
        trajectory.error = "; ".join(filter(None, (trajectory.error, result.error)))
    # Use the agent's own messages only if the gateway recorded none.
    messages, parents = (recording.messages, recording.parents) if recording.messages else (result.messages, [])
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
    trajectory.inexact += recording.inexact
    trajectory.constrained += recording.constrained
    if recording.calls:
        trajectory.artifacts.append(calls_artifact(recording))


def _breaches(sandbox: ApptainerSandbox, before: int, resumed: Partial | None) -> list[str]:
    """The limits that an agent's commands passed in this step, ``before`` of the sandbox having come earlier."""
    return [*(resumed.breaches if resumed else ()), *map(str, sandbox.breaches[before:])]


def _report_breaches(result: AgentResult, breaches: Sequence[str]) -> None:
    """Makes a limit that the agent's commands passed the error of its result, even if it went on well."""
    if breaches and not result.error:
        more = f" (and {len(breaches) - 1} more)" if len(breaches) > 1 else ""
        result.error = f"{breaches[0]}{more}"
