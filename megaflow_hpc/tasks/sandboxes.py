"""Sandboxes of tasks: specs, verification contexts, a stand-in for tasks without an image, and a hint if a network is
missing."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import UserCodeError
from megaflow_hpc.tasks.formats import VerificationContext
from megaflow_hpc.types import ExecResult, Network, Task


def sandbox_spec(task: Task, images: Mapping[str, str], environment: EnvironmentConfig) -> SandboxSpec:
    """Returns the sandbox spec of a task. The campaign's limits apply if the task does not set its own.

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
        nested=environment.nested,
    )


def verification_context(
    task: Task,
    environment: EnvironmentConfig,
    images: Mapping[str, str],
    start: Callable[[SandboxSpec], Awaitable[ApptainerSandbox]],
    **more: Any,
) -> VerificationContext:
    """Returns the context in which a campaign verifies a task.

    Args:
        images: Maps image names in tasks to SIF files or directories.
        start: Starts the sandbox of a separate verifier.
        more: Other fields of the context.
    """
    return VerificationContext(
        fresh=environment.verification_of(task) == "fresh",
        as_left=environment.verification_of(task) == "as-left",
        network="none" if environment.network == "gateway" else environment.network,
        start=lambda task: start(sandbox_spec(task, images, environment)),
        **more,
    )


class NoSandbox:
    """Stand-in for the sandbox of a task without an image, whose agent only takes part in a conversation.

    There is no container, so almost every operation raises an error that blames the calling code.

    Args:
        task: The task, which error messages name.
    """

    breaches: Sequence[Any] = ()

    def __init__(self, task: Task) -> None:
        self._task = task

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        """Raises :class:`UserCodeError`, as do the other operations."""
        self._refuse("exec")

    async def upload(self, source: str, target: str) -> None:
        self._refuse("upload")

    async def download(self, source: str, target: str) -> None:
        self._refuse("download")

    async def read(self, path: str, limit: int = 0) -> bytes | None:
        self._refuse("read")

    async def listen(self, port: int = 0) -> Any:
        self._refuse("listen")

    async def kill_processes(self) -> None:
        """Does nothing, because there are no processes."""

    async def end_processes(self) -> None:
        """Does nothing, because there are no processes."""

    def _refuse(self, operation: str) -> NoReturn:
        raise UserCodeError(f"sandbox.{operation}: task {self._task.id} has no sandbox (image: none); name an image")


_NETWORK_FAILED = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Temporary failure resolving|Name or service not known"
    r"|Network is unreachable|getaddrinfo (?:ENOTFOUND|EAI_AGAIN)|NameResolutionError|no such host",
    re.IGNORECASE,
)


def network_hint(output: str, network: Network) -> str:
    """Returns a hint to append to a failed program's error: the key with which its sandbox gets a network.

    Returns an empty string if the sandbox has the host's network, or if the output shows no network failure.

    Args:
        output: What the program printed.
        network: The sandbox's network.
    """
    failed = None if network == "host" else _NETWORK_FAILED.search(output)
    if failed is None:
        return ""
    return (
        f"; it printed {failed[0]!r}, and its sandbox has network: {network}; set environment: {{network: host}}, or "
        "tasks validate --network host, if the task may use the network, or install what it fetches in the image"
    )
