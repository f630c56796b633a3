"""One rollout from start to verdict.

Sandbox, agent, everything of the agent killed, verifier, in this order (the last three for each step of a task that has
steps); whatever goes wrong becomes a status and a cause, never an exception. Infrastructure that fails is ``failed``
with a kind that says whose fault it is; an agent that fails is ``completed`` and verified like any other.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from megaflow_hpc.agents import create
from megaflow_hpc.agents.remote import Zygote, forked
from megaflow_hpc.config import CampaignConfig, Policy
from megaflow_hpc.config.quotas import gateways
from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.limits import Breach
from megaflow_hpc.environments.steps import StepVerdict, begin_step, combine, goes_on, name_of, steps_of
from megaflow_hpc.environments.tasks import prepare
from megaflow_hpc.environments.verifier import Court, verify
from megaflow_hpc.errors import ConfigError, LimitError, ModelServiceError, SandboxError, UserCodeError
from megaflow_hpc.model.gateway import SEEDS, ModelGateway
from megaflow_hpc.model.limits import CallLimits, Quotas
from megaflow_hpc.pod.recordings import replays_of
from megaflow_hpc.process import node_name
from megaflow_hpc.types import (
    Agent,
    AgentResult,
    Artifact,
    Budget,
    ModelEndpoint,
    Recording,
    Rollout,
    Sandbox,
    Task,
    Trajectory,
)

MAX_ARTIFACT = 1 << 20
"""Bytes kept of one artifact."""
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
SETTLE_S = 1.0
"""After an agent was killed: if it is the job that ends, the signal will have reached the sandbox and us by then, and a
preempted rollout is not to be judged."""


@dataclass
class Services:
    """What the rollouts of one runner share."""

    config: CampaignConfig
    policies: Mapping[str, Policy]
    images: Mapping[str, str]
    """Image name in the tasks → SIF or directory."""
    provider: ApptainerProvider
    gateway: ModelGateway
    agents: Zygote = field(default_factory=lambda: Zygote(()))
    """Where Python agents run."""
    preempted: bool = False
    """Slurm has signalled every process of the step: what ends from now on may have ended of that."""

    @classmethod
    async def open(cls, config: CampaignConfig, policies: Mapping[str, Policy], images: Mapping[str, str]) -> Services:
        gateway = ModelGateway(
            policies=[name for name, policy in policies.items() if policy.model],
            limits=CallLimits(Quotas.of(config.quotas.model_dump()).share(gateways(config.slurm.pods))),
            replays=replays_of(policies),
        )
        await gateway.start()
        agents = Zygote([policy.agent.name for policy in policies.values()])
        return cls(config, policies, images, ApptainerProvider(), gateway, agents)

    async def close(self) -> None:
        self.agents.close()
        await self.provider.close()
        await self.gateway.stop()


def sandbox_spec(services: Services, task: Task) -> SandboxSpec:
    environment = services.config.environment
    limits, default = task.limits, environment.limits
    return SandboxSpec(
        image=services.images[task.image],
        env=dict(task.env),
        workdir=task.workdir,
        user=task.user,
        network=environment.network_of(task),
        memory_mb=limits.memory_mb or default.memory_mb,
        cpus=limits.cpus or default.cpus,
        disk_mb=limits.disk_mb or default.disk_mb,
        processes=default.processes or limits.processes or 512,
        mode=environment.mode_of(task),
        cpu_s=limits.cpu_s or default.cpu_s,
        wall_s=limits.wall_s or default.wall_s,
    )


def blank(rollout: Rollout, attempt: int) -> Trajectory:
    """A trajectory that has just begun, ``failed`` until it is known better."""
    return Trajectory(
        id=rollout.id,
        task_id=rollout.task_id,
        group_id=rollout.group_id,
        policy=rollout.policy,
        agent=rollout.agent,
        sample_index=rollout.sample_index,
        attempt=attempt,
        status="failed",
        node=node_name(),
        started_at=time.time(),
        finished_at=time.time(),
    )


class NoSandbox(SandboxError):
    """None could be started, which may be the node's fault."""


async def execute(services: Services, rollout: Rollout, task: Task, attempt: int) -> Trajectory:
    """Runs one attempt. Cancelling it yields a trajectory with status ``cancelled``."""
    return (await attempt_once(services, rollout, task, attempt))[0]


async def attempt_once(services: Services, rollout: Rollout, task: Task, attempt: int) -> tuple[Trajectory, str]:
    """As :func:`execute`, with the cause of a failure as :mod:`megaflow_hpc.pod.failures` tells causes apart."""
    trajectory, cause = blank(rollout, attempt), ""
    try:
        await _run(services, rollout, task, trajectory)
        if services.preempted:
            raise asyncio.CancelledError
    except asyncio.CancelledError:
        trajectory.status, trajectory.error = "cancelled", "stopped before it ended"
    except SandboxError as error:
        if services.preempted:
            trajectory.status, trajectory.error = "cancelled", f"preempted: {error}"
        else:
            _fail(trajectory, "sandbox", str(error))
            cause = "sandbox-start" if isinstance(error, NoSandbox) else "sandbox-lost"
    except ModelServiceError as error:
        _fail(trajectory, "model", str(error))
    except (ConfigError, UserCodeError) as error:  # says itself where
        _fail(trajectory, "user", str(error))
    except Exception as error:  # a defect in a scaffold or in a task must cost one rollout, not the runner
        _fail(trajectory, "user", f"{error!r} at {traceback.extract_tb(error.__traceback__)[-1]}")
    trajectory.finished_at = time.time()
    return trajectory, cause


def _fail(trajectory: Trajectory, kind: str, error: str) -> None:
    trajectory.status, trajectory.error_kind, trajectory.error = "failed", kind, error


@contextmanager
def _timed(trajectory: Trajectory, name: str) -> Iterator[None]:
    """Adds the seconds of its body to one of the trajectory's timings."""
    began = time.monotonic()
    try:
        yield
    finally:
        setattr(trajectory, name, (getattr(trajectory, name) or 0.0) + time.monotonic() - began)


async def _run(services: Services, rollout: Rollout, task: Task, trajectory: Trajectory) -> None:
    policy = services.policies[rollout.policy]
    if policy.model is not None and services.config.seed is not None:
        trajectory.seed = rollout.seed(services.config.seed, trajectory.attempt)
    try:
        with _timed(trajectory, "setup_s"):
            binds = getattr(create(policy.agent), "binds", ())
            sandbox = await services.provider.start(replace(sandbox_spec(services, task), binds=tuple(binds)))
    except SandboxError as error:
        raise NoSandbox(str(error)) from error
    except OSError as error:
        raise NoSandbox(f"no sandbox could be made: {error}") from error
    try:
        with _timed(trajectory, "setup_s"):
            await prepare(task, sandbox)
        verdicts: list[StepVerdict] = []
        steps = steps_of(task)
        for step in steps:
            if step.user != sandbox.spec.user:
                await sandbox.restart(replace(sandbox.spec, user=step.user))
            await begin_step(step, sandbox)
            before = len(sandbox.breaches)
            with _timed(trajectory, "agent_s"):
                seed = (trajectory.seed + len(trajectory.turns)) % SEEDS if trajectory.seed >= 0 else -1
                result, recording = await _run_agent(services, rollout, step, policy, sandbox, seed)
            _say_limits(result, sandbox.breaches[before:])
            _add(trajectory, result, recording)
            if result.exit_code in KILLED:
                await asyncio.sleep(SETTLE_S)
            await sandbox.kill_processes()
            with _timed(trajectory, "verify_s"):
                verdict = await verify(step, sandbox, court(services), stay=step is not steps[-1])
            verdicts.append(StepVerdict(name_of(step), verdict))
            if not goes_on(step, verdict):
                break
        verdict = combine(task, verdicts)
        trajectory.artifacts += verdict.artifacts
        trajectory.artifacts.append(
            Artifact("verifier.log", verdict.output.encode("utf-8", "backslashreplace")[:MAX_ARTIFACT])
        )
        if verdict.error:
            _fail(trajectory, "verifier", verdict.error)
        else:
            trajectory.reward, trajectory.rewards = verdict.reward, dict(verdict.rewards)
    finally:
        try:
            await sandbox.stop()
        except OSError as error:  # what is left is the janitor's; the rollout is as good as it was
            print(f"{rollout.id}: {error}", file=sys.stderr)


def court(services: Services) -> Court:
    """Where and how this campaign verifies."""
    environment = services.config.environment
    return Court(
        fresh=environment.verification == "fresh",
        network="none" if environment.network == "gateway" else environment.network,
        start=lambda other: services.provider.start(sandbox_spec(services, other)),
    )


def _add(trajectory: Trajectory, result: AgentResult, recording: Recording) -> None:
    """What an agent did, after what it did in earlier steps."""
    if trajectory.status != "truncated":
        trajectory.status = result.status
    if result.exit_code or result.error:
        trajectory.error_kind = "agent"
        trajectory.error = "; ".join(filter(None, (trajectory.error, result.error)))
    trajectory.messages = [*trajectory.messages, *(result.messages or recording.messages)]
    for turn, seconds in zip(recording.turns, result.sandbox_s, strict=False):
        turn.sandbox_s = seconds
    for turn in recording.turns:
        turn.sequence += len(trajectory.sequences)
    trajectory.sequences = [*trajectory.sequences, *recording.sequences]
    trajectory.turns = [*trajectory.turns, *recording.turns]
    trajectory.inexact += recording.inexact
    _keep_raw(trajectory, recording)


def _say_limits(result: AgentResult, breaches: Sequence[Breach]) -> None:
    """A limit that the agent's commands passed is the agent's doing, and is said so even if it went on well."""
    if breaches and not result.error:
        more = f" (and {len(breaches) - 1} more)" if len(breaches) > 1 else ""
        result.error = f"{breaches[0]}{more}"


async def _run_agent(
    services: Services, rollout: Rollout, task: Task, policy: Policy, sandbox: Sandbox, seed: int
) -> tuple[AgentResult, Recording]:
    """Runs the agent within its time; what the gateway recorded is kept even when the agent is cut off."""
    agent = create(policy.agent)
    endpoint = await _open_model(services, rollout, task, agent, sandbox, seed) if policy.model else None
    timeout_s = policy.agent.timeout_s or task.agent_timeout_s
    recording = Recording()
    try:
        try:
            forks = forked(policy.agent.name)
            work = services.agents.run(policy.agent, task, sandbox, endpoint) if forks else None
            result = await asyncio.wait_for(work or agent.run(task, sandbox, endpoint), timeout_s)
        except TimeoutError:
            result = AgentResult(status="truncated", error=f"the agent's {timeout_s:g} s were over")
        except LimitError as error:
            result = AgentResult(status="truncated", error=str(error))
        if endpoint and (trouble := services.gateway.trouble(rollout.id)):
            raise ModelServiceError(trouble)  # whatever the agent's client made of the 503
    finally:
        if endpoint:
            recording = await services.gateway.close(rollout.id)
    if recording.over_budget:  # however the agent took the refusal
        result.status, result.error = "truncated", recording.over_budget
    return result, recording


async def _open_model(
    services: Services, rollout: Rollout, task: Task, agent: Agent, sandbox: Sandbox, seed: int
) -> ModelEndpoint:
    """The rollout's address at the gateway, and for an agent inside the sandbox the way to it from there."""
    network = services.config.environment.network_of(task)
    limits = services.policies[rollout.policy].agent
    budget = Budget(calls=limits.max_turns, tokens=limits.max_tokens)
    if network == "gateway" and getattr(agent, "in_sandbox", False):
        return await services.gateway.open(rollout.id, rollout.policy, await sandbox.listen(), budget, seed)
    endpoint = await services.gateway.open(rollout.id, rollout.policy, budget=budget, seed=seed)
    return replace(endpoint, sandbox_url=endpoint.base_url) if network == "host" else endpoint


def _keep_raw(trajectory: Trajectory, recording: Recording) -> None:
    """The engine's own answers, so that anyone can check the columns against them."""
    if recording.raw:
        lines = "".join(json.dumps(call) + "\n" for call in recording.raw)
        trajectory.artifacts.append(
            Artifact("engine.jsonl", lines.encode("utf-8", "backslashreplace")[: 8 * MAX_ARTIFACT])
        )
