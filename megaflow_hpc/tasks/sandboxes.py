"""Derives a task's sandbox spec and verification context from the campaign's environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.tasks.formats import VerificationContext
from megaflow_hpc.tasks.judging import Judge
from megaflow_hpc.types import Task


def sandbox_spec(task: Task, images: Mapping[str, str], environment: EnvironmentConfig) -> SandboxSpec:
    """Returns the sandbox spec of a task. Limits that the task does not set are the campaign's.

    Args:
        images: Maps image names in tasks to SIF files or directories.
        environment: The campaign's ``environment`` section.
    """
    limits, default = task.limits, environment.limits
    return SandboxSpec(
        image=images[task.image],
        env=dict(task.env),
        workdir=task.workdir,
        user=task.user,
        network=environment.network_of(task),
        memory_mb=limits.memory_mb or default.memory_mb,
        cpus=limits.cpus or default.cpus,
        disk_mb=limits.disk_mb or default.disk_mb,
        processes=default.processes or limits.processes or 512,
        cpu_s=limits.cpu_s,
        wall_s=limits.wall_s or default.wall_s,
        nested=environment.nested,
    )


def verification_context(
    task: Task,
    environment: EnvironmentConfig,
    images: Mapping[str, str],
    start: Callable[[SandboxSpec], Awaitable[ApptainerSandbox]],
    messages: Callable[[], list[dict[str, Any]]] = list,
    judge: Callable[[], AbstractAsyncContextManager[Judge]] | None = None,
    roles: Callable[[], dict[str, list[dict[str, Any]]]] = dict,
) -> VerificationContext:
    """Returns the context in which a campaign verifies a task.

    Args:
        images: Maps image names in tasks to SIF files or directories.
        start: Starts the sandbox of a separate verifier.
        messages: Returns the agent's conversation so far.
        judge: Opens access to the campaign's judges.
        roles: Returns the latest conversation of each role.
    """
    return VerificationContext(
        fresh=environment.verification_of(task) == "fresh",
        as_left=environment.verification_of(task) == "as-left",
        network="none" if environment.network == "gateway" else environment.network,
        start=lambda task: start(sandbox_spec(task, images, environment)),
        messages=messages,
        judge=judge,
        roles=roles,
    )
