"""The sections of a campaign file, each a pydantic model; unknown keys are errors."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megaflow_hpc.types import Network, SandboxMode, Task

CPUS_PER_RANK = 2
"""CPUs of each MPI rank of a pod where the campaign file does not say."""
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
    mode: SandboxMode | None = None
    """Of these tasks' sandboxes, whatever the tasks say; default: what each says, else ``environment.mode``."""


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
    """Upper bound; elements above ``min`` are submitted held, and let go by what waits."""
    queue: float = Field(4, gt=0)
    """Requests waiting in each engine's queue, on average, from which on another server is started…"""
    wait_s: float = Field(10, ge=0)
    """…where the last of them would wait this many seconds."""

    @model_validator(mode="after")
    def _ordered(self) -> ServerCount:
        if self.min > self.max:
            raise ValueError(f"servers.min {self.min} is larger than servers.max {self.max}")
        return self


class WeightsConfig(Section):
    """How servers come to weights that were published while they serve."""

    update: Literal["rolling", "together"] = "rolling"
    """``rolling``: a policy's servers one after the other; ``together``: all at once."""
    running: Literal["finish", "continue"] = "finish"
    """Requests being sampled finish on the old version, or are continued on the new one."""


ALSO = (
    *("engine", "path", "servers", "gpus", "nodes", "args", "python", "image", "binds"),
    *("base_url", "api_key_file", "script", "weight"),
)
"""What further servers of a policy may have of their own."""


class ModelConfig(Section):
    """What answers the agents of one policy."""

    engine: Literal["vllm", "sglang", "transformers", "scripted", "external", "replay"] = "vllm"
    """Which inference engine; ``external`` is an endpoint that exists already, ``replay`` a recorded campaign."""
    path: str | None = None
    """Model directory or name; for ``replay`` a run directory or trajectories file."""
    pool: str | None = None
    """Run directory of an engine pool that answers, instead of servers of the campaign's own."""
    servers: ServerCount = ServerCount()
    """Size of the engine array."""
    gpus: int = Field(1, ge=0)
    """GPUs a server on each of its nodes; tensor parallel over them."""
    nodes: int = Field(1, ge=1)
    """Nodes a server; pipeline parallel over them. ``vllm`` only."""
    weights: WeightsConfig = WeightsConfig()
    """How published weights are loaded."""
    args: dict[str, Any] = {}
    """Engine options as they stand on its command line, without the dashes."""
    python: str | None = None
    """Interpreter (or virtual environment) of the engine; default ``MEGAFLOW_ENGINE_VENV``. In an image: python3."""
    image: str | None = None
    """Apptainer image (SIF file or directory) that holds the engine."""
    binds: tuple[str, ...] = ()
    """What an engine in an image sees of the host beside the model and published weights: ``SRC[:DEST[:ro]]``."""
    base_url: str | None = None
    """``external`` only: address ending in /v1."""
    api_key_file: str | None = None
    """``external`` only: a 0600 file with the key."""
    script: str | None = None
    """``scripted`` only: the answers."""
    agent: AgentConfig | None = None
    """Instead of the campaign's agent, for this policy."""
    samples: int | None = Field(None, ge=0)
    """Instead of the campaign's samples, for this policy; 0: it only answers agents of other policies, by its name."""
    weight: float = Field(1.0, gt=0)
    """Requests that one of its servers gets for one of a server of weight 1."""
    also: tuple[dict[str, Any], ...] = ()
    """Further kinds of servers for this policy: what differs from this section (engine, gpus, servers, weight…)."""
    include: tuple[str, ...] = ()
    """Shell patterns on task ids: this policy runs only these."""

    @field_validator("agent", mode="before")
    @classmethod
    def _bare_agent(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> ModelConfig:
        field = "pool" if self.pool else {"scripted": "script", "external": "base_url"}.get(self.engine, "path")
        if getattr(self, field) is None:
            raise ValueError(f"engine {self.engine} needs {field!r}")
        if self.nodes > 1 and self.engine not in ("vllm", "scripted"):
            raise ValueError(f"nodes: engine {self.engine} is started on one node; vllm runs over several")
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

    def network_of(self, task: Task) -> Network:
        """The narrower of what the campaign gives and the task allows."""
        widths = get_args(Network)
        return min(self.network, task.network or self.network, key=widths.index)

    def mode_of(self, task: Task) -> SandboxMode:
        return task.mode or self.mode


def _walltime(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    if not isinstance(value, str) or not WALLTIME.match(value):
        raise ValueError(f"{value!r} is not a time; write minutes (30), HH:MM:SS or D-HH:MM:SS")
    return value


class PodPoolConfig(Section):
    """A further pod array: where it does not say otherwise, its pods are those of ``pods``."""

    cluster: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """Another Slurm cluster (``sbatch --clusters``) that sees the same run directory."""
    partition: str | None = None
    """Instead of ``pods.partition``; several, with commas, let Slurm choose."""
    account: str | None = None
    """Account to charge, instead of ``slurm.account``."""
    count: int = Field(1, ge=1)
    """Array elements."""
    nodes: int | None = Field(None, ge=1)
    """Nodes an element."""
    time: str | int | None = None
    """Walltime."""
    extra: dict[str, Any] = {}
    """Further sbatch options."""

    _time = field_validator("time", mode="before")(_walltime)


class PodsConfig(Section):
    """The pod array: elements are MPI worlds that run sandboxes."""

    partition: str | None = None
    """CPU partition; default: the site's."""
    count: int = Field(1, ge=1)
    """Array elements."""
    nodes: int = Field(1, ge=1)
    """Nodes an element."""
    ranks_per_node: int = Field(2, ge=1)
    """MPI ranks on each node. Rank 0 of the pod schedules; the others run rollouts."""
    slots_per_rank: int | None = Field(None, ge=1)
    """Rollouts at once per worker rank. Default: ``cpus_per_rank``."""
    cpus_per_rank: int | None = Field(None, ge=1)
    """CPUs of each rank. Default: 2."""
    mem_gb: float | None = Field(None, gt=0)
    """Memory a node in GB (10^9 bytes); default: the partition's."""
    time: str | int | None = None
    """Walltime."""
    throttle: int | None = Field(None, ge=1)
    """Elements of one array that run at once; default: as many as Slurm lets."""
    pools: tuple[PodPoolConfig, ...] = ()
    """Further pod arrays, on other partitions or accounts."""
    extra: dict[str, Any] = {}
    """Further sbatch options."""

    _time = field_validator("time", mode="before")(_walltime)

    @field_validator("ranks_per_node", mode="before")
    @classmethod
    def _default_ranks(cls, value: Any) -> Any:
        return cls.model_fields["ranks_per_node"].default if value is None else value  # null: runs planned earlier

    @property
    def total(self) -> int:
        """Pods of all pools."""
        return self.count + sum(pool.count for pool in self.pools)

    @property
    def total_nodes(self) -> int:
        """Nodes of the pods of all pools."""
        return self.count * self.nodes + sum(pool.count * (pool.nodes or self.nodes) for pool in self.pools)

    @property
    def here(self) -> int:
        """Pods at the cluster where the campaign is submitted."""
        return self.count + sum(pool.count for pool in self.pools if not pool.cluster)


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
    together: bool = False
    """Engines and one pod in one heterogeneous job, one allocation and one MPI world, instead of two arrays."""
    requeues: int = Field(3, ge=0)
    """How often one array element may be requeued after a crash or a drain."""
    pods: PodsConfig = PodsConfig()
    servers: ServersConfig = ServersConfig()

    @model_validator(mode="after")
    def _one_cluster(self) -> SlurmConfig:
        extras = [self.extra, self.pods.extra, self.servers.extra, *(pool.extra for pool in self.pods.pools)]
        for name in sorted({name for extra in extras for name in extra}):
            if name.strip("-") in ("M", "cluster", "clusters"):
                raise ValueError(f"extra: {name!r}: pods at another cluster are slurm.pods.pools: [{{cluster: NAME}}]")
        return self

    @field_validator("setup", mode="before")
    @classmethod
    def _lines(cls, value: Any) -> Any:
        return value.splitlines() if isinstance(value, str) else value


class SchedulingConfig(Section):
    """Which rollout starts next, and where."""

    order: Literal["fifo", "longest", "fair"] = "fifo"
    """As planned; longest expected first; or the share that was given the least."""
    learn_from: tuple[str, ...] = ()
    """Run directories or trajectories.h5 of earlier campaigns: pods expect what they tell, ``longest`` orders by it."""
    share: Literal["policy", "dataset"] = "policy"
    """What shares are of, for ``fair``; a dataset is the directory or file that a task comes from."""
    weights: dict[str, float] = {}
    """Of shares, for ``fair``; 1 where not named."""
    pack: tuple[Literal["cpus", "memory"], ...] = ()
    """What a task asks for that a rank must have free beside a slot."""
    groups: Literal["spread", "together"] = "spread"
    """``together``: samples of a group go to the rank where the last of them went, while it has a slot."""
    spare: int = Field(0, ge=0)
    """Samples planned beyond ``samples``; a group with ``samples`` rewards is closed and the rest of it cancelled."""
    signal_after: int | None = Field(None, ge=2)
    """Equal rewards after which what waits of a group is dropped; samples behind these let other groups go first."""
    retry_every: int | None = Field(None, ge=1)
    """Of a group dropped by ``signal_after`` every so many-th sample runs; the rest too, if its reward differs."""
    cuts: int = Field(16, ge=0)
    """How often the end of an allocation may cut a rollout short before it is stored as failed, kind ``walltime``."""
    partial_mb: int = Field(256, ge=0)
    """MB kept of a rollout that is cut short between two turns, so that it goes on elsewhere; 0: it starts anew."""
    copies: bool = False
    """Start stragglers once more when nothing else is left; the first result counts, which favours short ones."""


class EvaluationConfig(Section):
    """How rewards are summed up."""

    ks: tuple[int, ...] = ()
    """Of pass@k; without any 1 and the number of samples."""
    threshold: float = 1.0
    """Reward from which a rollout has passed."""


class LimitsConfig(Section):
    """When a campaign stops by itself."""

    core_hours: float | None = Field(None, gt=0)
    """CPU cores of all pods' allocations times hours, used or not, after which pods start no more."""
    gpu_hours: float | None = Field(None, gt=0)
    """GPUs of all engine servers times hours, used or not, after which pods start no more."""
    failures: int | None = Field(None, ge=1)
    """Failed rollouts after which a pod starts no more."""
    systematic: int | None = Field(32, ge=4)
    """Last results of a pod of which nine in ten failed for one cause: it starts no more. null: go on all the same."""
    wall: float | None = Field(None, gt=0)
    """Hours since the first pod started, after which pods start no more."""
