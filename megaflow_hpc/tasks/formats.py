"""Task formats.

A format reads tasks from a campaign's sources, and prepares, solves and verifies them. Each format is an object named
``FORMAT`` in its own module, and handles the tasks of one ``kind``. The formats are Harbor directories, SWE-bench lines
and Python classes. To run a task, get its format from :func:`format_of`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, cast

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.environments.images.sources import ImageRequest
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.checkout import Patch
from megaflow_hpc.tasks.judging import Judge
from megaflow_hpc.types import ExecResult, Network, Task, Verdict

TASK_ID = re.compile(r"[A-Za-z0-9._-]+")
"""Matches a task id. Task ids are used in directory and column names. In rollout ids, an @ separates the round."""

MODULES: Mapping[str, str] = {
    "swebench": "megaflow_hpc.tasks.swebench.format",
    "python": "megaflow_hpc.tasks.python_class",
    "harbor": "megaflow_hpc.tasks.harbor.format",
}
"""Maps kinds to modules, in the order in which they are asked whether a source has their format. Harbor comes last
because it accepts any path."""


Refuse = Callable[[ConfigError], None]
"""Function called with the error of a task that cannot be read or tested. If it returns, the task is left out."""


def refuse_into(messages: list[str]) -> Refuse:
    """Returns a function that appends the message of each error to a list. Errors themselves are not kept, because
    their tracebacks would keep tasks in memory."""
    return lambda error: messages.append(str(error))


def raise_error(error: ConfigError) -> None:
    """Raises the error, so that a source with an invalid task is refused."""
    raise error


OpenJudge = Callable[..., AbstractAsyncContextManager[Judge]]
"""Function that opens access to judges. Takes a listening socket or no argument."""


@dataclass(frozen=True)
class VerificationContext:
    """Inputs of a verification: the campaign's settings, the agent's patch, and a function to start another sandbox."""

    fresh: bool = False
    """Keep only the agent's changes in the working directory and in declared artifacts."""
    as_left: bool = False
    """Keep all of the agent's changes, even to the image's programs."""
    network: Network | None = None
    """Network for tests that may use one. If ``None``, tests use the sandbox's network."""
    start: Callable[[Task], Awaitable[ApptainerSandbox]] | None = None
    """Starts the sandbox of a separate verifier, given the verifier's environment as a task."""
    patch: Patch | None = None
    """The agent's changes to the git checkout in the working directory. ``None`` if there was no checkout."""
    messages: Callable[[], list[dict[str, Any]]] = list
    """Returns the agent's conversation so far."""
    roles: Callable[[], dict[str, list[dict[str, Any]]]] = dict
    """Returns the latest conversation of each role in the campaign's team."""
    artifacts: Callable[[], dict[str, bytes]] = dict
    """Returns the files stored with the rollout so far, by name."""
    judge: OpenJudge | None = None
    """Opens access to the campaign's judges, optionally at a socket that listens inside a sandbox. ``None`` if the
    campaign has no judges."""


@dataclass(frozen=True)
class StepVerdict:
    """The verdict on one step. ``name`` is empty for a task without steps."""

    name: str
    verdict: Verdict


class TaskFormat:
    """Base class of task formats. Methods that take a sandbox run in workers. The methods from ``claims`` to ``files``
    run during planning. The defaults suit formats whose tasks have a single step and a single prebuilt image."""

    def claims(self, source: str, /) -> bool:
        """Returns whether a campaign's source has this format."""
        raise NotImplementedError

    def read(
        self,
        source: str,
        base: str | os.PathLike[str],
        dockerfiles: Dockerfiles,
        wanted: Callable[[str], bool],
        refuse: Refuse,
        /,
    ) -> list[Task]:
        """Reads the tasks of a source. Relative paths are relative to ``base``.

        Args:
            wanted: Returns whether the campaign uses the task with this id. Other tasks may be skipped.
            refuse: Called for each wanted task that is invalid.

        Raises:
            ConfigError: The source is invalid. The message names file, line, value and remedy.
        """
        raise NotImplementedError

    def settle(self, tasks: Sequence[Task], refuse: Refuse, /) -> list[Task]:
        """Completes the tasks selected from one source, so that they are ready to run.

        Args:
            refuse: Called for each task that cannot be tested.

        Raises:
            ConfigError: A program that all of these tasks need is missing on this machine.
        """
        return list(tasks)

    def images(self, task: Task, /) -> list[ImageRequest]:
        """Returns the images that a task needs: the agent's image first, then separate verifiers' images."""
        return [ImageRequest(task.image, path=task.path)]

    def files(self, task: Task, /) -> list[str]:
        """Returns the paths that rollouts read from their original location. These must not change during a run."""
        return []

    def asks_judge(self, task: Task, /) -> bool:
        """Returns whether the verification of a task needs a judge."""
        return False

    def steps(self, task: Task, /) -> list[Task]:
        """Returns the steps of a task in order, each as a task. A task without steps is its own single step."""
        return [task]

    def step_name(self, step: Task, /) -> str:
        """Returns the name of a step. Empty for a task without steps."""
        return ""

    async def prepare(self, task: Task, sandbox: ApptainerSandbox, /) -> bool:
        """Prepares a fresh sandbox, whose work and log directories already exist.

        Kills all processes that the task's own code has started. Returns whether anything was run or uploaded.

        Raises:
            SandboxError: The sandbox cannot be prepared. The rollout fails.
        """
        raise NotImplementedError

    async def begin_step(self, step: Task, sandbox: ApptainerSandbox, /) -> None:
        """Prepares the sandbox for one step.

        Raises:
            SandboxError: The sandbox cannot be prepared. The rollout fails.
        """

    async def solve(self, step: Task, sandbox: ApptainerSandbox, /) -> ExecResult:
        """Runs the task's reference solution.

        Raises:
            ConfigError: The task has no solution.
        """
        raise NotImplementedError

    async def verify(
        self, step: Task, sandbox: ApptainerSandbox, context: VerificationContext, /, *, stay: bool
    ) -> Verdict:
        """Judges the agent's work after its processes have been killed.

        The call is repeated if the infrastructure failed (:func:`megaflow_hpc.tasks.steps.verify`).

        Args:
            step: The step to verify.
            sandbox: The agent's sandbox.
            context: How to verify.
            stay: Whether to restore the agent's container afterwards, because the sandbox will be reused.

        Raises:
            SandboxError: A sandbox was lost. Errors in the tests are reported in the verdict's ``error`` instead.
            ModelServiceError: A judge model that the task's code uses is down.
            ConfigError: The task cannot be verified in this way.
        """
        raise NotImplementedError

    async def put_back(self, task: Task, sandbox: ApptainerSandbox, stored: Mapping[str, bytes], /) -> bool:
        """Restores the artifacts that the task declares from a stored rollout's artifacts.

        Args:
            stored: Artifacts by name.

        Returns:
            True if the tests need no other files from the agent.

        Raises:
            UnscoredError: Some of the artifacts are not stored.
        """
        return False

    def may_continue(self, step: Task, verdict: Verdict, /) -> bool:
        """Returns whether to run the next step after this verdict."""
        return True

    def combine(self, task: Task, verdicts: Sequence[StepVerdict], /) -> Verdict:
        """Combines the verdicts of the completed steps (at least one) into the task's verdict."""
        return verdicts[0].verdict


def format_of(task: Task) -> TaskFormat:
    """Returns the format of a task.

    Raises:
        ConfigError: This version does not know the task's kind.
    """
    if task.kind not in MODULES:
        raise ConfigError(f"task {task.id}: kind {task.kind!r}: expected one of {', '.join(MODULES)}")
    return _format(task.kind)


def format_of_source(source: str) -> TaskFormat:
    """Returns the format that reads a campaign's source."""
    return next(task_format for task_format in map(_format, MODULES) if task_format.claims(source))


def _format(kind: str) -> TaskFormat:
    return cast(TaskFormat, importlib.import_module(MODULES[kind]).FORMAT)
