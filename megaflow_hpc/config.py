"""The campaign file: its models, one line of doc per field, and errors that name file, line, value and remedy.

:func:`load` reads YAML into a :class:`CampaignConfig`; :func:`schema` exports it as JSON Schema for editors. Relative
paths in the file are relative to the file.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Network, SandboxMode

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
WALLTIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}\Z")


class Section(BaseModel):
    """A part of the campaign file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)


class TaskSource(Section):
    """Where tasks come from."""

    path: str
    """Harbor directories (a glob), ``*.jsonl``, or ``package.module:Class``."""
    include: tuple[str, ...] = ()
    """Shell patterns on task ids; empty takes all."""
    exclude: tuple[str, ...] = ()
    """Shell patterns on task ids to leave out, applied after ``include``."""
    limit: int | None = Field(None, ge=1)
    """Take at most this many, in order of id."""


class AgentConfig(Section):
    """Which scaffold drives a rollout."""

    name: str
    """Short name (``oracle``, ``nop``, ``mini-swe-agent``, ``command``, ``replay``) or ``package.module:Class``."""
    max_turns: int | None = Field(None, ge=1)
    """Model calls after which the rollout is truncated."""
    max_tokens: int | None = Field(None, ge=1)
    """Sampled tokens after which the rollout is truncated."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds after which the rollout is truncated; default: what the task says."""
    args: dict[str, Any] = {}
    """Handed to the scaffold as they are."""


class ServerCount(Section):
    """How many engine servers."""

    min: int = Field(1, ge=0)
    """Started with the campaign."""
    max: int = Field(1, ge=1)
    """Upper bound; elements above ``min`` are submitted held."""

    @model_validator(mode="after")
    def _ordered(self) -> ServerCount:
        if self.min > self.max:
            raise ValueError(f"servers.min {self.min} is larger than servers.max {self.max}")
        return self


class ModelConfig(Section):
    """What answers the agents of one policy."""

    engine: Literal["vllm", "sglang", "transformers", "scripted", "external"] = "vllm"
    """Which inference engine; ``external`` is an endpoint that exists already."""
    path: str | None = None
    """Model directory or name."""
    servers: ServerCount = ServerCount()
    """Size of the engine array."""
    gpus: int = Field(1, ge=0)
    """GPUs a server; tensor parallel over them."""
    args: dict[str, Any] = {}
    """Engine options as they stand on its command line, without the dashes."""
    python: str | None = None
    """Interpreter (or virtual environment) of the engine; default ``MEGAFLOW_ENGINE_VENV``."""
    base_url: str | None = None
    """``external`` only: address ending in /v1."""
    api_key_file: str | None = None
    """``external`` only: a 0600 file with the key."""
    script: str | None = None
    """``scripted`` only: the answers."""
    agent: AgentConfig | None = None
    """Instead of the campaign's agent, for this policy."""
    samples: int | None = Field(None, ge=1)
    """Instead of the campaign's samples, for this policy."""
    include: tuple[str, ...] = ()
    """Shell patterns on task ids: this policy runs only these."""

    @field_validator("agent", mode="before")
    @classmethod
    def _bare_agent(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> ModelConfig:
        needs = {"vllm": "path", "sglang": "path", "transformers": "path", "scripted": "script", "external": "base_url"}
        field = needs[self.engine]
        if getattr(self, field) is None:
            raise ValueError(f"engine {self.engine} needs {field!r}")
        return self


class SandboxLimits(Section):
    """What one sandbox may use where its task does not say. MB are 10^6 bytes."""

    memory_mb: int | None = Field(None, ge=1)
    """Memory of all its processes, and its files in memory."""
    cpus: float | None = Field(None, gt=0)
    """Processors; a fraction counts as a whole one."""
    disk_mb: int | None = Field(None, ge=1)
    """What it writes on scratch."""
    processes: int | None = Field(None, ge=16)
    """Processes and threads. Default 512."""
    cpu_s: float | None = Field(None, gt=0)
    """CPU seconds; agent and verifier apart."""
    wall_s: float | None = Field(None, gt=0)
    """Seconds from its start; agent and verifier apart."""


class EnvironmentConfig(Section):
    """The sandboxes."""

    mode: SandboxMode = "ephemeral"
    """``ephemeral``: a fresh sandbox a rollout; ``persistent``: reset between rollouts."""
    network: Network = "gateway"
    """``none``, ``gateway`` (only the model answers) or ``host``."""
    images: dict[str, str] = {}
    """Image name in the tasks → SIF file, definition file, directory or ``docker://``."""
    mirrors: dict[str, str] = {}
    """Registry → what stands for it here, as ``docker.io: registry.site.edu/hub``; ``MEGAFLOW_IMAGE_MIRRORS`` too."""
    air_gapped: bool = False
    """Fetch nothing: an image that the store lacks is an error; ``MEGAFLOW_AIR_GAPPED`` too."""
    limits: SandboxLimits = SandboxLimits()
    """What one sandbox may use where its task does not say."""
    verification: Literal["shared", "fresh"] = "shared"
    """``shared``: tests run in the agent's sandbox; ``fresh``: in the image with the agent's work directory alone."""


def _walltime(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    if not isinstance(value, str) or not WALLTIME.match(value):
        raise ValueError(f"{value!r} is not a time; write minutes (30), HH:MM:SS or D-HH:MM:SS")
    return value


class PodsConfig(Section):
    """The pod array: elements are MPI worlds that run sandboxes."""

    partition: str | None = None
    """CPU partition; default: the site's."""
    count: int = Field(1, ge=1)
    """Array elements."""
    nodes: int = Field(1, ge=1)
    """Nodes an element."""
    ranks_per_node: int | None = Field(None, ge=1)
    """MPI ranks a node; rank 0 of the pod schedules, the others run rollouts. Default 2."""
    slots_per_rank: int | None = Field(None, ge=1)
    """Rollouts at once per worker rank. Default: ``cpus_per_rank``."""
    cpus_per_rank: int | None = Field(None, ge=1)
    """CPUs a rank. Default 2."""
    mem_gb: float | None = Field(None, gt=0)
    """Memory a node in GB (10^9 bytes); default: the partition's."""
    time: str | int | None = None
    """Walltime."""
    extra: dict[str, Any] = {}
    """Further sbatch options."""

    _time = field_validator("time", mode="before")(_walltime)


class ServersConfig(Section):
    """The engine array."""

    partition: str | None = None
    """GPU partition; default: the site's default partition."""
    time: str | int | None = None
    """Walltime."""
    extra: dict[str, Any] = {}
    """Further sbatch options."""

    _time = field_validator("time", mode="before")(_walltime)


class SlurmConfig(Section):
    """How jobs are asked for."""

    account: str | None = None
    """Account to charge."""
    setup: tuple[str, ...] = ()
    """Shell lines run before anything else in each job (module load, proxies)."""
    extra: dict[str, Any] = {}
    """sbatch options for every job."""
    requeues: int = Field(3, ge=0)
    """How often one array element may be requeued after a crash or a drain."""
    pods: PodsConfig = PodsConfig()
    servers: ServersConfig = ServersConfig()

    @field_validator("setup", mode="before")
    @classmethod
    def _lines(cls, value: Any) -> Any:
        return value.splitlines() if isinstance(value, str) else value


class SchedulingConfig(Section):
    """Which rollout starts next, and where."""

    order: Literal["fifo", "longest", "fair"] = "fifo"
    """As planned; longest expected first; or the policy that was given the least."""
    weights: dict[str, float] = {}
    """Of policies, for ``fair``; 1 where not named."""
    pack: tuple[Literal["cpus", "memory"], ...] = ()
    """What a task asks for that a rank must have free beside a slot."""


class LimitsConfig(Section):
    """When a campaign stops by itself."""

    core_hours: float | None = Field(None, gt=0)
    gpu_hours: float | None = Field(None, gt=0)
    failures: int | None = Field(None, ge=1)
    """Failed rollouts after which a pod starts no more."""
    wall: float | None = Field(None, gt=0)
    """Hours."""


class CampaignConfig(Section):
    """One campaign file."""

    name: str
    """Also the Slurm job name."""
    run_dir: str = "runs"
    """Where run directories are made."""
    tasks: tuple[TaskSource, ...]
    """Where tasks come from."""
    agent: tuple[AgentConfig, ...]
    """The scaffold; with a list and no model, every task is run by each, the agent's name being the policy."""
    samples: int = Field(1, ge=1)
    """Rollouts per task and policy."""
    model: ModelConfig | None = None
    """One model; the policy is then called ``default``."""
    models: dict[str, ModelConfig] = {}
    """Several, by policy."""
    environment: EnvironmentConfig = EnvironmentConfig()
    slurm: SlurmConfig = SlurmConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    limits: LimitsConfig = LimitsConfig()

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.match(value):
            raise ValueError(
                f"{value!r} must be letters, digits, dot, dash or underscore, starting with a letter or digit"
            )
        return value

    @field_validator("tasks", mode="before")
    @classmethod
    def _bare_tasks(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        return [{"path": item} if isinstance(item, str) else item for item in items]

    @field_validator("agent", mode="before")
    @classmethod
    def _bare_agents(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        return [{"name": item} if isinstance(item, str) else item for item in items]

    @model_validator(mode="after")
    def _policies(self) -> CampaignConfig:
        if not self.tasks:
            raise ValueError("tasks is empty; name at least one source")
        if not self.agent:
            raise ValueError("agent is empty; name one, for example: agent: oracle")
        if self.model and self.models:
            raise ValueError("give either model or models, not both")
        if len(self.agent) > 1 and (self.model or self.models):
            raise ValueError("a list of agents goes without a model; give each policy of models its own agent")
        names = list(self.models) or [agent.name.rpartition(":")[2] for agent in self.agent]
        for name in names:
            if self.models and not NAME.match(name):
                raise ValueError(f"policy {name!r} must be letters, digits, dot, dash or underscore")
        if len(set(names)) != len(names):
            raise ValueError(f"agents {names} are not distinct")
        return self

    def policies(self) -> dict[str, Policy]:
        """What runs every task, by name."""
        if self.models:
            models: Mapping[str, ModelConfig | None] = self.models
        elif self.model:
            models = {"default": self.model}
        else:
            return {a.name.rpartition(":")[2]: Policy(agent=a, samples=self.samples) for a in self.agent}
        return {
            name: Policy(
                agent=(model and model.agent) or self.agent[0],
                model=model,
                samples=(model and model.samples) or self.samples,
                include=model.include if model else (),
            )
            for name, model in models.items()
        }


class Policy(Section):
    """One agent with one model (or none): what a task is run under. Resolved, never written by a user."""

    agent: AgentConfig
    model: ModelConfig | None = None
    samples: int = 1
    include: tuple[str, ...] = ()


# --- reading --------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML without base-60 numbers (``time: 1:00:00`` stays a string) and with duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?\d+\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.inf|\.nan)\Z"),
    list("-+0123456789."),
)


def read_yaml(path: str | os.PathLike[str]) -> tuple[Any, yaml.Node | None]:
    """A YAML file's value and its node tree (for line numbers).

    Raises:
        ConfigError: the file cannot be read or is not YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from None
    finally:
        loader.dispose()
    return value, node


def line_of(node: yaml.Node | None, location: Sequence[Any]) -> int | None:
    """Line (from 1) of the deepest part of ``location`` that the file has."""
    line = None if node is None else node.start_mark.line + 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == str(part)), None)
            if found is None:
                continue
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def explain(error: ValidationError, path: str, node: yaml.Node | None, model: type[BaseModel]) -> str:
    """The first problem of a validation error as one line: file, line, key, value and what to do.

    An unknown key comes first: it is often the reason why another one is missing.
    """
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    location = [part for part in problem["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    line = line_of(node, location)
    where = f"{path}:{line}" if line else path
    key = ".".join(str(part) for part in location)
    value = problem.get("input")
    shown = "" if isinstance(value, dict | list | tuple) or problem["type"] == "missing" else f" {value!r}"
    if problem["type"] == "extra_forbidden":
        known = sorted(_keys(model, location[:-1]))
        close = difflib.get_close_matches(str(location[-1]), known, 1)
        remedy = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"{where}: unknown key {key!r}; {remedy}"
    if problem["type"] == "missing":
        return f"{where}: {key!r} is missing; add it"
    message = problem["msg"].removeprefix("Value error, ")
    parts = [where, key + shown if key else "", message[0].lower() + message[1:]]
    return ": ".join(part for part in parts if part)


def _keys(model: type[BaseModel], location: Sequence[Any]) -> set[str]:
    """Field names of the section at ``location``, through lists, mappings and optionals."""

    def sections(annotation: Any) -> list[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [annotation]
        return [s for a in getattr(annotation, "__args__", ()) for s in sections(a)]

    here: list[type[BaseModel]] = [model]
    for part in location:
        deeper = [s for m in here if part in m.model_fields for s in sections(m.model_fields[part].annotation)]
        here = deeper or here
    return {name for m in here for name in m.model_fields}


def load(path: str | os.PathLike[str]) -> CampaignConfig:
    """Reads and validates a campaign file.

    Raises:
        ConfigError: names file, line, value and remedy.
    """
    value, node = read_yaml(path)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: holds {type(value).__name__}, expected a mapping; start with: megaflow-hpc init {path}"
        )
    return parse(value, str(path), node)


def parse(fields: Mapping[str, Any], source: str = "campaign", node: yaml.Node | None = None) -> CampaignConfig:
    """A campaign from Python values; ``source`` and ``node`` serve the error message."""
    try:
        return CampaignConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(explain(error, source, node, CampaignConfig)) from None


def schema() -> dict[str, Any]:
    """JSON Schema of the campaign file, for editors."""
    return CampaignConfig.model_json_schema()
