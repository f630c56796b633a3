"""The sandbox of a rollout: what it is to be, and one made anew for a person who looks into it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from megaflow_hpc.agents import create
from megaflow_hpc.config import Policy
from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.tasks.sandboxes import sandbox_spec
from megaflow_hpc.tasks.steps import begin, prepare
from megaflow_hpc.types import Network, Task


def rollout_spec(task: Task, policy: Policy, images: Mapping[str, str], environment: EnvironmentConfig) -> SandboxSpec:
    """Returns the sandbox of a rollout, with what its agent brings along.

    Raises:
        ConfigError: the task's image was not built.
    """
    if task.unbuilt:  # no node's fault, and no further attempt has one
        raise ConfigError(f"its image was not built: {task.unbuilt}")
    binds = getattr(create(policy.agent), "binds", ())
    return replace(sandbox_spec(task, images, environment), binds=tuple(binds))


@asynccontextmanager
async def recreated(
    provider: ApptainerProvider,
    task: Task,
    policy: Policy,
    images: Mapping[str, str],
    environment: EnvironmentConfig,
    network: Network,
) -> AsyncIterator[ApptainerSandbox]:
    """The sandbox of a rollout once more, as its agent got it for the first step; a person has no limit of time.

    Raises:
        ConfigError: the task's image was not built.
        SandboxError: no sandbox comes up, or it cannot be prepared.
    """
    spec = rollout_spec(task, policy, images, environment)
    spec = replace(spec, network=network, mode="ephemeral", cpu_s=None, wall_s=None)
    async with await provider.start(spec) as sandbox:
        await prepare(task, sandbox)
        await begin(format_of(task).steps(task)[0], sandbox)
        yield sandbox
