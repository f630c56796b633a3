"""The sections of a campaign file, each a pydantic model; unknown keys are errors."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from megaflow_hpc.types import Network, SandboxMode, Task

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


class Section(BaseModel):
    """A part of the campaign file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True, json_schema_extra=_describe)

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
    mode: SandboxMode | None = None
    """Sandbox mode of these tasks, in place of what each task says. Default: the task's, else ``environment.mode``."""


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


class ServerCount(Section):
    """The number of engine servers of a policy, and when to start more."""

    min: int = Field(1, ge=0)
    """Servers started with the campaign. Default: 1."""
    max: int = Field(1, ge=1)
    """Maximum number of servers; those above ``min`` are queued held, and released on demand. Default: 1."""
    queue: float = Field(4, gt=0)
    """Average number of requests in an engine's queue at which another server is released, if ``wait_s`` is also
    reached. Default: 4."""
    wait_s: float = Field(10, ge=0)
    """Expected waiting time in seconds of the last queued request at which another server is released. Default: 10."""

    @model_validator(mode="after")
    def _ordered(self) -> ServerCount:
        if self.min > self.max:
            raise ValueError(f"servers.min {self.min} is larger than servers.max {self.max}")
        return self


class WeightsConfig(Section):
    """How running servers load newly published weights."""

    update: Literal["rolling", "together"] = "rolling"
    """``rolling``: the servers of a policy load one after the other; ``together``: all at once."""
    running: Literal["finish", "continue"] = "finish"
    """Requests in progress: ``finish`` on the old version, or ``continue`` on the new one."""
    poll_s: float = Field(5.0, gt=0, allow_inf_nan=False)
    """Seconds between two looks for a new version. A look costs the file system one open of each server. Default: 5."""


ALSO = (
    *("engine", "path", "servers", "gpus", "nodes", "args", "python", "image", "binds"),
    *("base_url", "name", "api_key_file", "script", "weight"),
)
"""What further servers of a policy may have of their own."""


class ModelConfig(Section):
    """The model of one policy, and the servers that run it."""

    engine: Literal["vllm", "sglang", "transformers", "scripted", "external", "replay"] = "vllm"
    """Inference engine. ``external`` is an existing endpoint, ``replay`` a recorded campaign."""
    path: str | None = None
    """Model directory or Hugging Face name; for ``replay`` a run directory or a trajectories file."""
    pool: str | None = None
    """Run directory of an engine pool that answers in place of servers of this campaign."""
    servers: ServerCount = ServerCount()
    """Number of engine servers."""
    gpus: int = Field(1, ge=0)
    """GPUs of each server on each of its nodes; used for tensor parallelism. Default: 1; always 0 for ``external``."""
    nodes: int = Field(1, ge=1)
    """Nodes of each server; used for pipeline parallelism (``vllm`` only). Default: 1."""
    weights: WeightsConfig = WeightsConfig()
    """How published weights are loaded."""
    args: dict[str, Any] = {}
    """Command-line options of the engine, without the dashes."""
    media_domains: tuple[str, ...] = ()
    """Hosts from which engines may fetch images that agents name by URL. Default: none; agents send images as data."""
    python: str | None = None
    """Interpreter or virtual environment of the engine. Default: ``MEGAFLOW_ENGINE_VENV``; python3 in images."""
    image: str | None = None
    """Apptainer image (SIF file or directory) that contains the engine. Default: none; it runs on the host."""
    binds: tuple[str, ...] = ()
    """Further host paths visible to an engine in an image: ``SRC[:DEST[:ro]]``."""
    base_url: str | None = None
    """``external`` only: address of the endpoint, to which ``/chat/completions`` is added; a bare host gets ``/v1``."""
    name: str | None = None
    """``external`` only: name of the model at the endpoint. Default: ``path``, else the policy's name."""
    api_key_file: str | None = None
    """``external`` only: file with the API key, which nobody else may read (mode 0600). Default: no key."""
    script: str | None = None
    """``scripted`` only: YAML file with the answers."""
    agent: AgentConfig | None = None
    """Agent of this policy, in place of the campaign's."""
    samples: int | None = Field(None, ge=0)
    """Samples per task of this policy, in place of the campaign's. 0: it runs no tasks and only answers agents of other
    policies, under its name."""
    weight: float = Field(1.0, gt=0)
    """Relative share of requests that each of these servers gets among its policy's servers. Default: 1."""
    also: tuple[dict[str, Any], ...] = ()
    """Further kinds of servers of this policy; each states what differs from this section (engine, gpus, servers,
    weight, …)."""
    include: tuple[str, ...] = ()
    """Shell patterns on task ids; this policy runs only matching tasks. Default: every task."""

    @field_validator("agent", mode="before")
    @classmethod
    def _bare_agent(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _without_gpus(cls, value: Any) -> Any:
        """An endpoint that exists already takes no GPU of this campaign, whatever the servers beside it take."""
        return {**value, "gpus": 0} if isinstance(value, dict) and value.get("engine") == "external" else value

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{value!r}: expected http:// or https:// with a host, such as http://HOST:PORT/v1")
            if parts.query or parts.fragment:
                raise ValueError(f"{value!r}: expected an address without a query")
        return value

    @field_validator("media_domains")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not re.fullmatch(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", host):
                raise ValueError(f"{host!r} is not the name of a host, such as images.site.edu")
        return tuple(host.lower() for host in value)

    @model_validator(mode="after")
    def _complete(self) -> ModelConfig:
        field = "pool" if self.pool else {"scripted": "script", "external": "base_url"}.get(self.engine, "path")
        if getattr(self, field) is None:
            raise ValueError(f"engine {self.engine} needs {field!r}")
        if self.nodes > 1 and self.engine not in ("vllm", "scripted"):
            raise ValueError(f"nodes: engine {self.engine} is started on one node; vllm runs over several")
        if self.name and "external" not in (self.engine, *(other.get("engine") for other in self.also)):
            raise ValueError("name: is for engine external; others serve a model by the name of its policy")
        if self.image and self.engine in ("external", "replay"):
            raise ValueError(f"image: engine {self.engine} starts nothing that could run in one")
        for name in sorted({name for other in self.also for name in other} - set(ALSO)):
            raise ValueError(f"also: {name!r} belongs to the whole policy; further servers may have {', '.join(ALSO)}")
        self.kinds()
        return self

    def kinds(self) -> list[ModelConfig]:
        """The kinds of servers of this policy; none for ``replay``, which needs none."""
        if self.engine == "replay":
            return []
        common = {"also": (), "agent": None}
        return [
            self.model_copy(update=common),
            *(ModelConfig.model_validate({**self.model_dump(), **common, **other}) for other in self.also),
        ]


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
    cpu_s: float | None = Field(None, gt=0)
    """CPU time in seconds, for agent and verifier each. Default: no limit."""
    wall_s: float | None = Field(None, gt=0)
    """Wall-clock time in seconds, for agent and verifier each. Default: no limit."""


class EnvironmentConfig(Section):
    """The sandboxes."""

    mode: SandboxMode = "ephemeral"
    """``ephemeral``: each rollout gets a fresh sandbox; ``persistent``: a sandbox is reset between rollouts."""
    network: Network = "gateway"
    """Network access: ``none``, ``gateway`` (only the model is reachable) or ``host``."""
    images: dict[str, str] = {}
    """SIF file, definition file, directory or ``docker://`` reference of each image name in the tasks."""
    image_store: str | None = None
    """Directories in which images are kept, separated by colons; the first is written to. ``MEGAFLOW_IMAGE_STORE``
    comes before it. Default: a place of the site with room, else the home directory."""
    mirrors: dict[str, str] = {}
    """Mirror of each registry, as ``docker.io: registry.site.edu/hub``; ``MEGAFLOW_IMAGE_MIRRORS`` comes before it."""
    air_gapped: bool = False
    """Whether to fetch nothing: an image that is not in the store is an error; also ``MEGAFLOW_AIR_GAPPED``. Default:
    false."""
    build: Literal["here", "slurm"] = "here"
    """Where images are built that are not in the store: ``here``, where the campaign is planned; or by ``slurm`` jobs
    (``slurm.builds``), for which planning waits. Default: here."""
    build_network: Literal["none", "host"] | None = None
    """Network of the steps of Dockerfiles: ``none``, or the ``host``'s, by which they fetch packages and reach whatever
    the planning node reaches. Default: ``host`` where ``network`` is, else ``none``."""
    limits: SandboxLimits = SandboxLimits()
    """Limits of one sandbox where its task states none."""
    nested: bool = False
    """Whether commands may make user namespaces of their own (bubblewrap, containers); limits do not see all of what
    runs there. Default: false."""
    verification: Literal["shared", "fresh"] = "shared"
    """``shared``: tests run in the agent's sandbox; ``fresh``: in a new one, with the agent's work directory copied
    into it."""

    @property
    def network_of_builds(self) -> Literal["none", "host"]:
        """What the steps of Dockerfiles get."""
        return self.build_network or ("host" if self.network == "host" else "none")

    def network_of(self, task: Task) -> Network:
        """The narrower of what the campaign gives and the task allows."""
        widths = get_args(Network)
        return min(self.network, task.network or self.network, key=widths.index)

    def mode_of(self, task: Task) -> SandboxMode:
        """Returns the sandbox mode that a task asks for, or else the campaign's."""
        return task.mode or self.mode


class SchedulingConfig(Section):
    """The order of rollouts, and where each runs."""

    order: Literal["fifo", "longest", "fair"] = "fifo"
    """``fifo``: as planned; ``longest``: longest expected first; ``fair``: the share that has used the least time
    first."""
    learn_from: tuple[str, ...] = ()
    """Run directories or trajectories.h5 of earlier campaigns, from which durations are expected."""
    share: Literal["policy", "dataset"] = "policy"
    """Unit of ``fair`` sharing: the policy, or the dataset (the directory or file that a task comes from)."""
    weights: dict[str, float] = {}
    """Weight of each share under ``fair``. Default: 1."""
    pack: tuple[Literal["cpus", "memory"], ...] = ()
    """Task limits that a worker rank must have free, beside a slot, before a rollout starts there."""
    groups: Literal["spread", "together"] = "spread"
    """``spread``: samples of a group go to any rank; ``together``: to the rank of the group's latest sample, while it
    has a slot."""
    spare: int = Field(0, ge=0)
    """Extra samples of each group; a group with ``samples`` rewards is closed and its other samples are cancelled.
    Default: 0."""
    signal_after: int | None = Field(None, ge=2)
    """Number of equal rewards in a group after which its waiting samples are dropped. Default: never."""
    retry_every: int | None = Field(None, ge=1)
    """Every n-th sample of a group dropped by ``signal_after`` runs nevertheless; if its reward differs, all do.
    Default: none."""
    cuts: int = Field(16, ge=0)
    """Maximum number of times that the end of an allocation may interrupt a rollout before it fails with kind
    ``walltime``. Default: 16."""
    partial_mb: int = Field(256, ge=0)
    """Maximum size in MB of an interrupted rollout that is kept, so that it resumes elsewhere. 0: it starts anew.
    Default: 256."""
    partial_total_gb: float | None = Field(200, ge=0)
    """Maximum size in GB (10^9 bytes) of all interrupted rollouts that are kept, shared out over the worker ranks.
    null: no limit. Default: 200."""
    copies: bool = False
    """Whether to start stragglers a second time when no other rollout is left; the first result counts, which favours
    short rollouts. Default: false."""


class EvaluationConfig(Section):
    """How rewards are summarised."""

    ks: tuple[int, ...] = ()
    """Values of k for pass@k. Default: 1 and the number of samples."""
    threshold: float = 1.0
    """Reward from which a rollout counts as passed. Default: 1."""


class LimitsConfig(Section):
    """Limits at which pods start no more rollouts."""

    core_hours: float | None = Field(None, gt=0)
    """Core-hours of all pods' allocations, idle or not. Default: no limit."""
    gpu_hours: float | None = Field(None, gt=0)
    """GPU-hours of all engine servers, idle or not. Default: no limit."""
    failures: int | None = Field(None, ge=1)
    """Number of failed rollouts of one pod. Default: no limit."""
    systematic: int | None = Field(32, ge=4)
    """Number of latest results of one pod of which nine in ten have failed for the same cause. null: no limit. Default:
    32."""
    wall: float | None = Field(None, gt=0)
    """Hours since the first pod started. Default: no limit."""
