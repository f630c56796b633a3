"""Task formats: objects that read a campaign's sources, and prepare, solve and verify tasks.

Each format is an object named ``FORMAT`` in its own module. Its name is the ``kind`` of its tasks. The formats are
Harbor directories, SWE-bench lines and Python classes. Code that runs a task calls :func:`format_of`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.environments.images.sources import ImageRequest
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.checkout import Patch
from megaflow_hpc.tasks.judging import Judge
from megaflow_hpc.types import ExecResult, Network, Task, Verdict

MAX_REWARD = 3.4028234663852886e38
"""Largest valid reward: the float32 maximum, because rewards are stored as float32."""
TASK_ID = re.compile(r"[A-Za-z0-9._-]+")
"""Pattern of a task id, which is used in directory and column names. In a rollout id, an @ precedes the round."""

MODULES: Mapping[str, str] = {
    "swebench": "megaflow_hpc.tasks.swebench.format",
    "python": "megaflow_hpc.tasks.python_class",
    "harbor": "megaflow_hpc.tasks.harbor.format",
}
"""Kind → module, in the order in which formats may claim a source. Harbor accepts any path, so it is last."""


@dataclass(frozen=True)
class VerificationContext:
    """How to verify a task: the campaign's settings, the agent's patch, and a function to start another sandbox."""

    fresh: bool = False
    """Of the agent's changes, keep only those in the working directory and the declared artifacts."""
    as_left: bool = False
    """Keep all of the agent's changes, including replaced programs."""
    network: Network | None = None
    """Network for the tests, if they may use one. If ``None``, they use the sandbox's network."""
    start: Callable[[Task], Awaitable[ApptainerSandbox]] | None = None
    """Starts a separate verifier's sandbox, whose environment is given as a task."""
    patch: Patch | None = None
    """The agent's changes to the git checkout in the working directory, if there was a checkout."""
    messages: Callable[[], list[dict[str, Any]]] = list
    """Returns the agent's conversation so far."""
    roles: Callable[[], dict[str, list[dict[str, Any]]]] = dict
    """Returns the latest conversation of each role of the campaign's team."""
    judge: Callable[[], AbstractAsyncContextManager[Judge]] | None = None
    """Opens an address at which judges answer. ``None`` if the campaign has none."""


@dataclass(frozen=True)
class StepVerdict:
    """The verdict of the step ``name``. The name is empty for a task without steps."""

    name: str
    verdict: Verdict


class TaskFormat(Protocol):
    """Interface of a task format. Methods with a sandbox run in a worker; ``claims`` to ``files`` run during
    planning."""

    def claims(self, source: str, /) -> bool:
        """Returns whether a campaign's source has this format."""

    def read(
        self, source: str, base: str | os.PathLike[str], dockerfiles: Dockerfiles, wanted: Callable[[str], bool], /
    ) -> list[Task]:
        """Reads the tasks of a source; relative paths are relative to ``base``.

        Args:
            wanted: Returns whether the campaign uses the task with this id. Invalid tasks that are not wanted are
                skipped.

        Raises:
            ConfigError: the source is invalid. The message names file, line, value and remedy.
        """

    def settle(self, tasks: Sequence[Task], /) -> list[Task]:
        """Finishes the tasks selected from one source, so that they are ready to run.

        Raises:
            ConfigError: a task cannot be run here.
        """

    def images(self, task: Task, /) -> list[ImageRequest]:
        """Returns the images of a task: the agent's image first, then those of separate verifiers."""

    def files(self, task: Task, /) -> list[str]:
        """Returns the files and directories that rollouts read from their original location. They must not change
        during a run."""

    def steps(self, task: Task, /) -> list[Task]:
        """Returns the steps of a task in order, each as a task. A task without steps is its own single step."""

    def step_name(self, step: Task, /) -> str:
        """Returns the name of a step. Empty for a task without steps."""

    async def prepare(self, task: Task, sandbox: ApptainerSandbox, /) -> bool:
        """Prepares a fresh sandbox whose work and log directories already exist.

        Kills the processes that the task's own code started. Returns whether anything was run or uploaded.

        Raises:
            SandboxError: the sandbox cannot be prepared; the rollout fails.
        """

    async def begin_step(self, step: Task, sandbox: ApptainerSandbox, /) -> None:
        """Prepares the sandbox for one step.

        Raises:
            SandboxError: the sandbox cannot be prepared; the rollout fails.
        """

    async def solve(self, step: Task, sandbox: ApptainerSandbox, /) -> ExecResult:
        """Runs the task's reference solution.

        Raises:
            ConfigError: the task has no solution.
        """

    async def verify(
        self, step: Task, sandbox: ApptainerSandbox, context: VerificationContext, /, *, stay: bool
    ) -> Verdict:
        """Judges the agent's result after its processes have been killed. The call is repeated if the infrastructure
        failed (:func:`megaflow_hpc.tasks.steps.verify`).

        Args:
            step: the step.
            sandbox: the agent's sandbox.
            context: how to verify.
            stay: restore the agent's container afterwards, because the sandbox will be reused.

        Raises:
            SandboxError: a sandbox was lost. Errors of the tests are in the verdict's ``error``.
            ModelServiceError: a judge model that the task's code uses is down.
            ConfigError: the task cannot be verified in this way.
        """

    def may_continue(self, step: Task, verdict: Verdict, /) -> bool:
        """Returns whether to run the next step after this verdict."""

    def combine(self, task: Task, verdicts: Sequence[StepVerdict], /) -> Verdict:
        """Combines the verdicts of the completed steps (at least one) into the task's verdict."""


class OneStep:
    """Defaults for formats whose tasks have one step and one prebuilt image."""

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

    async def begin_step(self, step: Task, sandbox: ApptainerSandbox, /) -> None:
        pass

    def may_continue(self, step: Task, verdict: Verdict, /) -> bool:
        return True

    def combine(self, task: Task, verdicts: Sequence[StepVerdict]) -> Verdict:
        return verdicts[0].verdict


def format_of(task: Task) -> TaskFormat:
    """Returns the format of a task.

    Raises:
        ConfigError: the kind is unknown to this version.
    """
    if task.kind not in MODULES:
        raise ConfigError(f"task {task.id}: kind {task.kind!r}: expected one of {', '.join(MODULES)}")
    return _format(task.kind)


def format_of_source(source: str) -> TaskFormat:
    """Returns the format that reads a campaign's source."""
    return next(task_format for task_format in map(_format, MODULES) if task_format.claims(source))


def _format(kind: str) -> TaskFormat:
    return cast(TaskFormat, importlib.import_module(MODULES[kind]).FORMAT)
