"""What a Harbor task says beyond what every task has, typed; as a plain mapping it is ``task.metadata["harbor"]``.

The mapping is what block files and messages carry, so a field keeps its name and meaning once a release has written it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import msgspec
from msgspec import Struct, field

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Task

KEY = "harbor"


class Healthcheck(Struct, frozen=True, omit_defaults=True):
    """``[environment.healthcheck]``, as Docker's HEALTHCHECK; times in seconds. Without a command there is none."""

    command: str = ""
    retries: int = 3
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_interval_sec: float = 5.0
    start_period_sec: float = 0.0


class CollectHook(Struct, frozen=True, omit_defaults=True):
    """``[[verifier.collect]]``: a command that writes what is to be collected, as ``user`` or as the agent did."""

    command: str
    timeout_s: float = 60.0
    user: str | None = None


class DeclaredArtifact(Struct, frozen=True, omit_defaults=True):
    """An entry of ``artifacts``: what to keep, under which name, without what ``exclude`` matches."""

    source: str
    destination: str | None = None
    exclude: list[str] = field(default_factory=list)


class VerifierRules(Struct, frozen=True, omit_defaults=True):
    """``[verifier]``, a step's over the task's."""

    timeout_s: float = 600.0
    user: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    network: str | None = None
    """``""`` leaves it to the campaign, even where the agent has no network; ``None``: as the agent's."""
    collect: list[CollectHook] = field(default_factory=list)
    environment: dict[str, Any] | None = None
    """A separate verifier's environment, as :meth:`Task.to_dict` of a task of which only the environment counts."""
    bundled: bool = False
    """The tests are in the separate verifier's image."""
    secrets: list[str] = field(default_factory=list)
    """Values of the user's variables that the verifier gets. They are masked in stored results."""


class Judging(Struct, frozen=True, omit_defaults=True):
    """How a task, or one of its steps, ends: directories of tests and of the solution, artifacts, verifier."""

    tests: list[str] = field(default_factory=list)
    solution: str = ""
    solution_env: dict[str, str] = field(default_factory=dict)
    artifacts: list[DeclaredArtifact] = field(default_factory=list)
    verifier: VerifierRules = VerifierRules()

    def verifier_environment(self, task_id: str) -> Task | None:
        """A separate verifier's environment as a task; ``None`` where the tests run in the agent's sandbox."""
        environment = self.verifier.environment
        return replace(Task.from_dict(environment), id=task_id) if environment else None


def fields_of(judging: Judging) -> dict[str, Any]:
    """The fields of :class:`Judging`, for a subclass that has them too."""
    return {name: getattr(judging, name) for name in Judging.__struct_fields__}


class HarborStep(Judging, frozen=True, omit_defaults=True, kw_only=True):
    """One of ``[[steps]]``. What is ``None`` or empty is the task's."""

    name: str
    instruction: str
    agent_timeout_s: float | None = None
    user: str | None = None
    min_reward: dict[str, float] = field(default_factory=dict)
    """Least value by name of the reward, for the next step to begin."""
    healthcheck: Healthcheck = Healthcheck()
    workdir: str | None = None
    """Directory on the host that is copied into the work directory."""


class HarborData(Judging, frozen=True, omit_defaults=True, kw_only=True):
    """All of it, of a task or (with ``step``) of a step as a task of its own."""

    dockerfile: str = ""
    """To be built; empty where the image is used as it is."""
    base: str = field(default="", name="from")
    """Image that the Dockerfile ends on."""
    build_timeout_s: float | None = None
    upload_environment: bool = False
    """Whether ``environment/`` is copied into the work directory."""
    healthcheck: Healthcheck = Healthcheck()
    steps: list[HarborStep] = field(default_factory=list)
    reward_strategy: str = "mean"
    """``mean`` of the steps, or ``final``: the last step's."""
    step: HarborStep | None = None

    @classmethod
    def of(cls, task: Task) -> Self:
        """What a task carries.

        Raises:
            ConfigError: it is not what this version knows.
        """
        try:
            return msgspec.convert(task.metadata.get(KEY, {}), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"task {task.id}: metadata.{KEY}: {error}; plan the campaign again") from None

    def put(self, task: Task) -> Task:
        """The task with these data instead of its own."""
        return replace(task, metadata={**task.metadata, KEY: msgspec.to_builtins(self)})
