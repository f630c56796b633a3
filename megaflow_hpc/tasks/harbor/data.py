"""Typed fields that only Harbor tasks have. They are stored as a plain mapping in ``task.metadata["harbor"]``.

Block files and messages contain this mapping, so released fields must never change name or meaning.
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
    """``[environment.healthcheck]``, like Docker's HEALTHCHECK. Times are in seconds. An empty command disables it."""

    command: str = ""
    retries: int = 3
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_interval_sec: float = 5.0
    start_period_sec: float = 0.0


class CollectHook(Struct, frozen=True, omit_defaults=True):
    """``[[verifier.collect]]``: a command that writes artifacts. Runs as ``user`` if set, otherwise as the agent's
    user."""

    command: str
    timeout_s: float = 60.0
    user: str | None = None


class DeclaredArtifact(Struct, frozen=True, omit_defaults=True):
    """An entry of ``artifacts``: a path to collect, its name in the trajectory, and exclude patterns."""

    source: str
    destination: str | None = None
    exclude: list[str] = field(default_factory=list)


class VerifierRules(Struct, frozen=True, omit_defaults=True):
    """``[verifier]``. Values in a step override those of the task."""

    timeout_s: float = 600.0
    user: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    judge: list[str] = field(default_factory=list)
    """Names of the variables that are set to the key for the campaign's judges (:data:`.JUDGE_KEYS`). Empty if the
    tests use no judge."""
    network: str | None = None
    """Network for the tests. ``None`` means the agent's network. An empty string means the campaign's network, even if
    the agent has no network."""
    collect: list[CollectHook] = field(default_factory=list)
    environment: dict[str, Any] | None = None
    """Environment of a separate verifier, as a task in the form of :meth:`Task.to_dict`. The task's other fields are
    ignored."""
    bundled: bool = False
    """True if the separate verifier's image already contains the tests."""
    secrets: list[str] = field(default_factory=list)
    """Values of the user's variables that are passed to the verifier. These are secret, so they are masked in stored
    results."""


class Judging(Struct, frozen=True, omit_defaults=True):
    """Settings for verifying a task or step: test and solution directories, artifacts and verifier."""

    tests: list[str] = field(default_factory=list)
    solution: str = ""
    solution_env: dict[str, str] = field(default_factory=dict)
    artifacts: list[DeclaredArtifact] = field(default_factory=list)
    verifier: VerifierRules = VerifierRules()

    def verifier_environment(self, task_id: str) -> Task | None:
        """Returns a separate verifier's environment as a task. ``None`` if the tests run in the agent's sandbox."""
        environment = self.verifier.environment
        return replace(Task.from_dict(environment), id=task_id) if environment else None


def fields_of(judging: Judging) -> dict[str, Any]:
    """Returns the values of the :class:`Judging` fields, for constructing an instance of a subclass."""
    return {name: getattr(judging, name) for name in Judging.__struct_fields__}


class HarborStep(Judging, frozen=True, omit_defaults=True, kw_only=True):
    """An entry of ``[[steps]]``. Fields that are ``None`` or empty fall back to the task's values."""

    name: str
    instruction: str
    agent_timeout_s: float | None = None
    user: str | None = None
    min_reward: dict[str, float] = field(default_factory=dict)
    """Maps reward names to the minimum values required to continue with the next step."""
    healthcheck: Healthcheck = Healthcheck()
    workdir: str | None = None
    """Host directory whose content is copied into the working directory."""


class HarborData(Judging, frozen=True, omit_defaults=True, kw_only=True):
    """All Harbor fields of a task. If ``step`` is set, the task represents a single step."""

    dockerfile: str = ""
    """Dockerfile to build. Empty if the image is used as is."""
    base: str = field(default="", name="from")
    """Image named in the Dockerfile's last FROM."""
    build_timeout_s: float | None = None
    upload_environment: bool = False
    """True if ``environment/`` is copied into the working directory."""
    healthcheck: Healthcheck = Healthcheck()
    steps: list[HarborStep] = field(default_factory=list)
    reward_strategy: str = "mean"
    """How the rewards of steps are combined: ``mean`` over all steps, or ``final`` for the last step's rewards."""
    step: HarborStep | None = None

    @classmethod
    def of(cls, task: Task) -> Self:
        """Returns the Harbor fields of a task.

        Raises:
            ConfigError: This version cannot read the stored fields.
        """
        try:
            return msgspec.convert(task.metadata.get(KEY, {}), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"task {task.id}: metadata.{KEY}: {error}; plan the campaign again") from None

    def put(self, task: Task) -> Task:
        """Returns a copy of the task with these Harbor fields."""
        return replace(task, metadata={**task.metadata, KEY: msgspec.to_builtins(self)})
