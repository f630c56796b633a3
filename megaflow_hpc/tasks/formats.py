"""Task formats: what reads a source of a campaign, and prepares, solves and judges the tasks it holds.

A format is an object named ``FORMAT`` in a module of its own; its name is the ``kind`` of its tasks. Harbor's
directories, SWE-bench lines and Python classes are peers: whoever runs a task asks :func:`format_of`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.environments.images.mapping import ImageRequest
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.checkout import Patch
from megaflow_hpc.types import ExecResult, Network, Task, Verdict

LARGEST = 3.4028234663852886e38
"""Largest reward: rewards are stored as float32."""
TASK_ID = re.compile(r"[A-Za-z0-9._-]+")
"""A task's id: it names directories and columns. What follows an @ in the id of a rollout is the round."""

MODULES: Mapping[str, str] = {
    "swebench": "megaflow_hpc.tasks.swebench.format",
    "python": "megaflow_hpc.tasks.python_class",
    "harbor": "megaflow_hpc.tasks.harbor.format",
}
"""Module of each kind. They are asked in this order whether a source is theirs; Harbor's takes every path."""


@dataclass(frozen=True)
class VerificationContext:
    """How a campaign verifies."""

    fresh: bool = False
    """Keep of the agent's changes only the work directory and the declared artifacts."""
    as_left: bool = False
    """Keep all of the agent's changes, replaced programs too."""
    network: Network | None = None
    """Network of tests that may use one; ``None``: the network that the sandbox has."""
    start: Callable[[Task], Awaitable[ApptainerSandbox]] | None = None
    """Starts the sandbox of a separate verifier, given its environment as a task."""
    patch: Patch | None = None
    """The agent's changes to the git checkout in the work directory, if there was a checkout."""


@dataclass(frozen=True)
class StepVerdict:
    """``verdict`` of the step ``name``; the name is empty for a task without steps."""

    name: str
    verdict: Verdict


class TaskFormat(Protocol):
    """One way to write tasks. Methods that take a sandbox run in a worker, ``claims`` to ``settle`` during planning."""

    def claims(self, source: str, /) -> bool:
        """Whether a source of a campaign file is of this format."""

    def read(self, source: str, base: str | os.PathLike[str], dockerfiles: Dockerfiles, /) -> list[Task]:
        """The tasks of a source; relative paths are relative to ``base``.

        Raises:
            ConfigError: names file, line, value and remedy.
        """

    def settle(self, tasks: Sequence[Task], /) -> list[Task]:
        """The tasks that a campaign has chosen of one source, ready to run.

        Raises:
            ConfigError: one of them cannot be run here.
        """

    def images(self, task: Task, /) -> list[ImageRequest]:
        """The images that a task wants: the agent's first, then those of separate verifiers."""

    def files(self, task: Task, /) -> list[str]:
        """Files and directories that rollouts of a task read where they lie, and that must not change meanwhile."""

    def steps(self, task: Task, /) -> list[Task]:
        """The steps of a task in their order, each a task of its own; a task without steps is its only one."""

    def step_name(self, step: Task, /) -> str:
        """Name of a step; empty for a task without steps."""

    async def prepare(self, task: Task, sandbox: ApptainerSandbox, /) -> bool:
        """Prepares a fresh sandbox, which has its work and log directories.

        Ends the processes that the task's own code started. Returns whether anything was run or uploaded.

        Raises:
            SandboxError: it cannot be done; the rollout fails.
        """

    async def begin_step(self, step: Task, sandbox: ApptainerSandbox, /) -> None:
        """Makes the sandbox ready for one step.

        Raises:
            SandboxError: it cannot be done; the rollout fails.
        """

    async def solve(self, step: Task, sandbox: ApptainerSandbox, /) -> ExecResult:
        """Carries out the task's own solution.

        Raises:
            ConfigError: the task has none.
        """

    async def verify(
        self, step: Task, sandbox: ApptainerSandbox, context: VerificationContext, /, *, stay: bool
    ) -> Verdict:
        """Judges the state that the agent left, after its processes have ended. Called again if the infrastructure
        failed (:func:`megaflow_hpc.tasks.steps.verify`).

        Args:
            stay: the sandbox is used again afterwards, so restore the agent's container.

        Raises:
            SandboxError: a sandbox was lost. Errors of the tests are in the verdict's ``error``.
            ModelServiceError: a judge that the task's own code asks is down.
            ConfigError: the task cannot be verified in this way.
        """

    def may_continue(self, step: Task, verdict: Verdict, /) -> bool:
        """Whether the next step may begin after this verdict."""

    def combine(self, task: Task, verdicts: Sequence[StepVerdict], /) -> Verdict:
        """The verdict of a task from those of the steps that were run, at least one."""


class OneStep:
    """Defaults of formats whose tasks have one step, and one image that is used as it is."""

    def settle(self, tasks: Sequence[Task]) -> list[Task]:
        return list(tasks)

    def images(self, task: Task) -> list[ImageRequest]:
        return [ImageRequest(task.image, path=task.path)]

    def files(self, task: Task) -> list[str]:
        return []

    def steps(self, task: Task) -> list[Task]:
        return [task]

    def step_name(self, step: Task) -> str:
        return ""

    async def begin_step(self, step: Task, sandbox: ApptainerSandbox) -> None:
        pass

    def may_continue(self, step: Task, verdict: Verdict) -> bool:
        return True

    def combine(self, task: Task, verdicts: Sequence[StepVerdict]) -> Verdict:
        return verdicts[0].verdict


def format_of(task: Task) -> TaskFormat:
    """The format of a task.

    Raises:
        ConfigError: this version knows no such kind.
    """
    if task.kind not in MODULES:
        raise ConfigError(f"task {task.id}: kind {task.kind!r}: expected one of {', '.join(MODULES)}")
    return _format(task.kind)


def format_of_source(source: str) -> TaskFormat:
    """The format that reads a source of a campaign file."""
    return next(found for found in map(_format, MODULES) if found.claims(source))


def _format(kind: str) -> TaskFormat:
    return cast(TaskFormat, importlib.import_module(MODULES[kind]).FORMAT)
