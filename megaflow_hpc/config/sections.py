"""Defines the base classes of the campaign file's sections, and several sections, as pydantic models."""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from megaflow_hpc.types import Network, Task

Verification = Literal["fresh", "shared", "as-left"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
METHOD_NAME = re.compile(r"([A-Za-z_]\w*)(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")
"""Matches the name of a function in an importable module, ``package.module:function``."""


STORED = "stored"
"""Key of the validation context for sections that are read from a run directory. An earlier version may have written
them."""


def describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Adds the docstring below each field to the section's JSON Schema.

    Pydantic's ``use_attribute_docstrings`` would do the same on every import, which costs 25 ms per process.
    """
    for section in reversed(model.__mro__):
        if section is not Section and issubclass(section, Section):
            definition = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
            assert isinstance(definition, ast.ClassDef)
            for field, text in pairwise(definition.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(value))):
                        name = model.model_fields[name].alias or name if name in model.model_fields else name
                        if name in schema["properties"]:
                            schema["properties"][name]["description"] = inspect.cleandoc(value)


class Section(BaseModel):
    """Base class of the sections of a campaign file. Unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        str_strip_whitespace=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        json_schema_extra=describe,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name:  # pydantic accepts true as 1
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Any}:
                raise ValueError("a number is expected, and YAML reads yes, no, on and off as true and false")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """Returns the top-level types of an annotation, ignoring nested types."""
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*(_kinds(part) for part in get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else {Any}


class Method(Section):
    """A function that replaces a built-in method, called with ``args`` as keyword arguments. The short form is only the
    name."""

    name: str
    """Function, ``package.module:function``. The module may be in the campaign file's directory."""
    args: dict[str, Any] = {}
    """Keyword arguments to pass to the function."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _function(cls, value: str) -> str:
        if not METHOD_NAME.match(value):
            raise ValueError(f"{value!r} is unknown; a function of your own is written as package.module:function")
        return value

    def __str__(self) -> str:
        return self.name


def as_list(value: Any) -> Any:
    """Wraps a single value in a list."""
    return value if isinstance(value, list | tuple) else [value]


class TaskSource(Section):
    """A source of tasks. The short form is only the path."""

    path: str
    """Harbor task directories or ``*.jsonl`` files (a glob), or a Python class ``package.module:Class``."""
    include: tuple[str, ...] = ()
    """Shell patterns of the task ids to include. Default: every task."""
    exclude: tuple[str, ...] = ()
    """Shell patterns of the task ids to exclude, applied after ``include``. Default: none."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of tasks, in id order, for a trial run. Default: no limit."""
    strict: bool = False
    """Refuse the campaign if a task cannot be read or tested, instead of leaving the task out."""

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class AgentConfig(Section):
    """The agent that works on the tasks, and its limits. The short form is only the name. A rollout that reaches a
    limit is truncated and verified."""

    name: str
    """Built-in agent (``megaflow-hpc agents list``) or a Python class ``package.module:Class``."""
    max_turns: int | None = Field(None, ge=1)
    """Maximum number of model calls per rollout. Default: no limit."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of sampled tokens per rollout. Default: no limit."""
    max_image_mb: float = Field(100.0, gt=0, le=400)
    """Maximum size of a rollout's distinct images in MB (10^6 bytes), which its record keeps. Default: 100, at most
    400."""
    timeout_s: float | None = Field(None, gt=0)
    """Maximum run time of the agent in seconds. Default: the task's timeout."""
    args: dict[str, Any] = {}
    """Arguments of the agent, passed unchanged. Paths of built-in agents (``config``, ``messages_file``, ``toolbox``)
    are relative to the campaign file."""
    label: str | None = Field(None, alias="as")
    """Name of this agent in results, to distinguish two configurations of one agent. Default: ``name``."""
    share: float = Field(1.0, gt=0)
    """Share of a trained policy's groups, relative to the policy's other agents. Default: 1."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("label")
    @classmethod
    def _label(cls, value: str | None) -> str | None:
        if value is not None and not NAME.match(value):
            raise ValueError(f"{value!r} must be letters, digits, dot, dash or underscore")
        return value

    @property
    def title(self) -> str:
        """The agent's name in results: ``as`` if it is set, else ``name``."""
        return self.label or self.name

    @property
    def short_title(self) -> str:
        """The title without the module of a Python class, for use in rollout ids."""
        return self.title.rpartition(":")[2]


def scaffold(agent: AgentConfig, agents: Sequence[AgentConfig]) -> str:
    """Returns the part of a rollout id that names the agent. Empty if the policy has only one agent."""
    return agent.short_title if len(agents) > 1 else ""


class SandboxLimits(Section):
    """Limits of each sandbox. 1 MB is 10^6 bytes."""

    memory_mb: int | None = Field(None, ge=1)
    """Memory in MB of all processes, including tmpfs files. At the limit, the command that uses most is killed.
    Default: no limit."""
    cpus: float | None = Field(None, gt=0)
    """CPUs available to processes, rounded up. Default: no limit."""
    disk_mb: int | None = Field(None, ge=1)
    """Total size in MB of the files written in a sandbox. Default: no limit."""
    processes: int | None = Field(None, ge=16)
    """Maximum number of processes and threads. Default: 512."""


class EnvironmentConfig(Section):
    """Settings of sandboxes: images, network, limits and verification."""

    network: Network = "gateway"
    """Network access of sandboxes. ``none``: no network. ``gateway``: only the model. ``host``: everything that the
    node can reach. A task can restrict it further. Default: ``gateway``."""
    images: dict[str, str] = {}
    """Image name in the tasks → SIF file, definition file, Dockerfile, directory or ``docker://`` reference."""
    image_store: str | None = None
    """Directories that store images, separated by colons. New images are written to the first.
    ``MEGAFLOW_IMAGE_STORE`` overrides it. Default: a scratch or work directory of the site with enough space, else
    ``~/.megaflow-hpc/images``."""
    mirrors: dict[str, str] = {}
    """Registry → mirror to use instead, such as ``docker.io: registry.site.edu/hub``."""
    air_gapped: bool = False
    """Never download from registries. A missing image is then an error. Default: false."""
    build_network: Literal["none", "host"] | None = None
    """Network access of build steps in Dockerfiles. ``host``: all that the planning node can reach, such as package
    indexes. Default: ``host`` if ``network`` is ``host``, else ``none``."""
    limits: SandboxLimits = SandboxLimits()
    """Limits of each sandbox. A task's own limits take precedence."""
    nested: bool = False
    """Allow commands to create user namespaces (bubblewrap, containers). The limits do not fully cover processes in
    such namespaces. Default: false."""
    verification: Verification | None = None
    """Changes by the agent that the tests can see. ``fresh``: the work directory and declared artifacts. ``shared``:
    also files added outside the system directories. ``as-left``: all changes; an agent that replaces programs can
    then choose its own reward. Default: ``fresh`` for tasks with a work directory, else ``shared``."""

    @property
    def network_of_builds(self) -> Literal["none", "host"]:
        """Network access of build steps in Dockerfiles, with the default resolved."""
        return self.build_network or ("host" if self.network == "host" else "none")

    def verification_of(self, task: Task) -> Verification:
        """Returns the verification mode of a task: the campaign's setting or, by default, the mode that suits the
        task."""
        has_workdir = os.path.normpath(task.workdir or "/") != "/"
        return self.verification or ("fresh" if has_workdir else "shared")

    def network_of(self, task: Task) -> Network:
        """Returns the campaign's or the task's network access, whichever is more restrictive."""
        widths = get_args(Network)
        return min(self.network, task.network or self.network, key=widths.index)


class SchedulingConfig(Section):
    """Rules for the placement of rollouts and for their groups."""

    pack: tuple[Literal["cpus", "memory"], ...] = ()
    """Resources of the task's limits that a rank must have free before it starts a rollout. Set it if tasks differ in
    them. Default: a free slot is enough."""
    spare: int = Field(0, ge=0)
    """Extra samples in each group, for rollouts that hang or fail. Once ``samples`` rollouts of a group have a reward,
    the rest are cancelled. Default: 0."""
    signal_after: int | None = Field(None, ge=2)
    """Cancel the remaining samples of a group once it has this many rewards and all are equal. Saves time on tasks
    that always or never pass. Default: never."""


class LimitsConfig(Section):
    """Limits on the campaign's total resource use. Once a limit is reached, pods start no further rollouts. ``resume
    --limit`` raises a limit."""

    core_hours: float | None = Field(None, gt=0)
    """Core-hours allocated to all pods, whether used or idle. Default: no limit."""
    gpu_hours: float | None = Field(None, gt=0)
    """GPU-hours allocated to all engine servers, whether used or idle. Default: no limit."""
    wall: float | None = Field(None, gt=0)
    """Hours since the first pod started. Default: no limit."""
    usd: float | None = Field(None, gt=0)
    """US dollars for all model calls, including those of judges and failed attempts. Needs ``price`` of the models.
    Default: no limit."""
