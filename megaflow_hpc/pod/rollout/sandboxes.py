"""Starts the sandboxes of a rollout and measures their resource usage. Can also recreate a sandbox for inspection by a
user."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from megaflow_hpc.agents import create
from megaflow_hpc.agents.registry import NAMES
from megaflow_hpc.config.sections import AgentConfig, EnvironmentConfig
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.tasks.sandboxes import sandbox_spec
from megaflow_hpc.tasks.steps import begin, prepare
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Network, Task


def rollout_spec(
    task: Task, agent: AgentConfig, images: Mapping[str, str], environment: EnvironmentConfig
) -> SandboxSpec:
    """Returns the specification of a rollout's sandbox, including the agent's binds."""
    return replace(sandbox_spec(task, images, environment), binds=_binds(agent))


def _binds(agent: AgentConfig) -> tuple[str, ...]:
    return tuple(getattr(create(agent), "binds", ()))


class Sandboxes:
    """Starts the sandboxes of one attempt, including those of its verifiers, and records their usage."""

    def __init__(self, provider: ApptainerProvider | None) -> None:
        self._provider = provider
        self._started: list[ApptainerSandbox] = []

    async def start(self, spec: SandboxSpec, kept: Snapshot | None = None) -> ApptainerSandbox:
        """Starts a sandbox through :meth:`ApptainerProvider.start`, and tracks its usage."""
        assert self._provider is not None, "a task has an image"
        sandbox = await self._provider.start(spec, kept)
        self._started.append(sandbox)
        return sandbox

    def add_usage(self, trajectory: Trajectory) -> None:
        """Adds the resource usage of these sandboxes to a trajectory. Call it once, when the attempt ends."""
        for sandbox in self._started:
            used = sandbox.consumption()
            trajectory.cpu_s = (trajectory.cpu_s or 0.0) + used.cpu_s
            trajectory.memory_peak_mb = max(trajectory.memory_peak_mb or 0.0, used.memory_peak_mb)
            if used.disk_peak_mb is not None:
                trajectory.disk_peak_mb = max(trajectory.disk_peak_mb or 0.0, used.disk_peak_mb)


@asynccontextmanager
async def recreated(
    provider: ApptainerProvider,
    task: Task,
    agent: AgentConfig,
    images: Mapping[str, str],
    environment: EnvironmentConfig,
    network: Network,
    own_code: bool,
) -> AsyncIterator[ApptainerSandbox]:
    """Recreates a rollout's sandbox, without time limits, in the state in which the agent started the first step.

    Args:
        own_code: True to call the agent and task classes that the run names, outside of any sandbox. Set it only for
            trusted run directories, because a run directory may name any class.

    Raises:
        ConfigError: The task has no sandbox, or only its own code can prepare the sandbox and ``own_code`` is False.
        SandboxError: The sandbox cannot be started or prepared.
    """
    if task.kind == "python" and not own_code:
        raise ConfigError(
            f"task {task.id}: the Python class {task.path} prepares its sandbox and runs outside of any sandbox; if "
            "you trust this run directory, add --own-code"
        )
    if not task.image:
        raise ConfigError(f"task {task.id} has no sandbox (image: none)")
    spec = sandbox_spec(task, images, environment)
    if own_code or agent.name in NAMES:
        spec = replace(spec, binds=_binds(agent))
    spec = replace(spec, network=network, cpu_s=None)
    async with await provider.start(spec) as sandbox:
        await prepare(task, sandbox)
        await begin(format_of(task).steps(task)[0], sandbox)
        yield sandbox
