"""The sections of a campaign file, each a pydantic model; unknown keys are errors."""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from megaflow_hpc.types import Network, Task

Verification = Literal["fresh", "shared", "as-left"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Puts the docstring below each field into the JSON Schema of its section.

    Pydantic's ``use_attribute_docstrings`` does so too, at every import: 25 ms for each rank, runner and command.
    """
    for section in reversed(model.__mro__):
        if section is not Section and issubclass(section, Section):
            definition = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
            assert isinstance(definition, ast.ClassDef)
            for field, text in pairwise(definition.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(value))):
                        if name in schema["properties"]:
                            schema["properties"][name]["description"] = inspect.cleandoc(value)


RUN_DIRECTORY = "run directory"
"""Validation context of sections that a run directory holds, perhaps in the form of an earlier version."""


class Section(BaseModel):
    """A part of the campaign file; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, str_strip_whitespace=True, allow_inf_nan=False, json_schema_extra=_describe
    )

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name:  # pydantic takes true for 1
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Any}:
                raise ValueError("a number is expected, and YAML reads yes, no, on and off as true and false")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of, those within others left out."""
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*(_kinds(part) for part in get_args(annotation)))
    return {bool} if annotation is bool else {annotation} if isinstance(annotation, type) else {Any}


class TaskSource(Section):
    """A source of tasks."""

    path: str
    """Harbor task directories (a glob), ``*.jsonl`` files (a glob), or a Python class ``package.module:Class``."""
    include: tuple[str, ...] = ()
    """Shell patterns on task ids; only matching tasks are taken. Default: every task."""
    exclude: tuple[str, ...] = ()
    """Shell patterns on task ids; matching tasks are left out, after ``include``."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of tasks, taken in order of their ids. Default: no limit."""


class AgentConfig(Section):
    """The agent scaffold that drives a rollout."""

    name: str
    """Short name (``oracle``, ``nop``, ``mini-swe-agent``, ``command``, ``replay``, …) or ``package.module:Class``."""
    max_turns: int | None = Field(None, ge=1)
    """Maximum number of model calls; the rollout is then truncated. Default: no limit."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of sampled tokens; the rollout is then truncated. Default: no limit."""
    timeout_s: float | None = Field(None, gt=0)
    """Maximum run time of the agent in seconds; the rollout is then truncated. Default: the task's."""
    args: dict[str, Any] = {}
    """Arguments of the scaffold, passed to it unchanged."""


class SandboxLimits(Section):
    """Limits of one sandbox where its task states none. 1 MB is 10^6 bytes."""

    memory_mb: int | None = Field(None, ge=1)
    """Memory in MB of all processes, and of files in memory. Default: no limit."""
    cpus: float | None = Field(None, gt=0)
    """CPUs; a fraction is rounded up. Default: no limit."""
    disk_mb: int | None = Field(None, ge=1)
    """Scratch space in MB. Default: no limit."""
    processes: int | None = Field(None, ge=16)
    """Number of processes and threads. Default: 512."""
    wall_s: float | None = Field(None, gt=0)
    """Wall-clock time in seconds, for agent and verifier each. Default: no limit."""


class EnvironmentConfig(Section):
    """The sandboxes."""

    network: Network = "gateway"
    """Network access: ``none``, ``gateway`` (only the model is reachable) or ``host``."""
    images: dict[str, str] = {}
    """SIF file, definition file, directory or ``docker://`` reference of each image name in the tasks."""
    image_store: str | None = None
    """Directories in which images are kept, separated by colons; the first is written to. ``MEGAFLOW_IMAGE_STORE``
    comes before it. Default: a place of the site with room, else the home directory."""
    mirrors: dict[str, str] = {}
    """Mirror of each registry, as ``docker.io: registry.site.edu/hub``."""
    air_gapped: bool = False
    """Whether to fetch nothing: an image that is not in the store is an error. Default: false."""
    build_network: Literal["none", "host"] | None = None
    """Network of the steps of Dockerfiles: ``none``, or the ``host``'s, by which they fetch packages and reach whatever
    the planning node reaches. Default: ``host`` where ``network`` is, else ``none``."""
    limits: SandboxLimits = SandboxLimits()
    """Limits of one sandbox where its task states none."""
    nested: bool = False
    """Whether commands may make user namespaces of their own (bubblewrap, containers); limits do not see all of what
    runs there. Default: false."""
    verification: Verification | None = None
    """Which of the agent's changes the tests see. ``fresh``: those in the work directory and at declared artifacts.
    ``shared``: also files that the agent added outside the system directories. ``as-left``: all; an agent that replaces
    programs can then choose its reward. Default: ``fresh`` for tasks with a work directory, else ``shared``."""

    @property
    def network_of_builds(self) -> Literal["none", "host"]:
        """What the steps of Dockerfiles get."""
        return self.build_network or ("host" if self.network == "host" else "none")

    def verification_of(self, task: Task) -> Verification:
        """Returns how a task is verified: the campaign's setting, or the default for the task."""
        has_workdir = os.path.normpath(task.workdir or "/") != "/"
        return self.verification or ("fresh" if has_workdir else "shared")

    def network_of(self, task: Task) -> Network:
        """The narrower of what the campaign gives and the task allows."""
        widths = get_args(Network)
        return min(self.network, task.network or self.network, key=widths.index)


class SchedulingConfig(Section):
    """The order of rollouts, and where each runs."""

    order: Literal["fifo", "longest", "fair"] = "fifo"
    """``fifo``: as planned; ``longest``: longest expected first; ``fair``: the policy that has used the least time
    first."""
    learn_from: tuple[str, ...] = ()
    """Run directories or trajectories.h5 of earlier campaigns, from which durations are expected."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Weight of each policy under ``fair``. Default: 1."""
    pack: tuple[Literal["cpus", "memory"], ...] = ()
    """Task limits that a worker rank must have free, beside a slot, before a rollout starts there."""
    spare: int = Field(0, ge=0)
    """Extra samples of each group; a group with ``samples`` rewards is closed and its other samples are cancelled.
    Default: 0."""
    signal_after: int | None = Field(None, ge=2)
    """Number of equal rewards in a group after which its waiting samples are dropped. Default: never."""


class LimitsConfig(Section):
    """Limits at which pods start no more rollouts."""

    core_hours: float | None = Field(None, gt=0)
    """Core-hours of all pods' allocations, idle or not. Default: no limit."""
    gpu_hours: float | None = Field(None, gt=0)
    """GPU-hours of all engine servers, idle or not. Default: no limit."""
    wall: float | None = Field(None, gt=0)
    """Hours since the first pod started. Default: no limit."""
