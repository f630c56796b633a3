"""The ``slurm`` section: resources that the jobs of a campaign request."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megaflow_hpc.config.sections import Section

TRAINER_REQUEUES = 20
"""Number of consecutive requeues without a committed step after which a trainer is abandoned."""
CPUS_PER_RANK = 2
"""Default of ``cpus_per_rank``."""
LEAST_GB = 0.001
"""Minimum memory: Slurm counts in MB, and treats 0 as all memory of a node."""
WALLTIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}\Z")
_REMEDY = "write minutes (30), HH:MM:SS or D-HH:MM:SS"


def _walltime(value: Any) -> Any:
    if value is None:
        return value
    text = str(value) if isinstance(value, int | str) else ""
    if not WALLTIME.match(text):
        raise ValueError(f"{value!r} is not a time; {_REMEDY}")
    if not text.strip("0:-"):  # Slurm treats 0 as no limit, and never starts such a job if the partition has a limit
        raise ValueError(f"{value!r} leaves no time to run; {_REMEDY}")
    return value


MAX_PODS = 100_000
"""Maximum number of pods in a section. More are a typing error."""


class PodPoolConfig(Section):
    """An additional pod array. Omitted keys default to those of ``slurm.pods``."""

    cluster: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """Another Slurm cluster (``sbatch --clusters``) that mounts the run directory. Default: the cluster of the login
    node."""
    partition: str | None = None
    """Partition, or a comma-separated list from which Slurm chooses. Default: ``pods.partition``."""
    account: str | None = None
    """Account to charge. Default: ``slurm.account``."""
    count: int = Field(1, ge=1, le=MAX_PODS)
    """Number of pods. Default: 1."""
    nodes: int | None = Field(None, ge=1)
    """Nodes of each pod. Default: ``pods.nodes``."""
    time: str | int | None = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Default: ``pods.time``."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional sbatch options by name."""

    _time = field_validator("time", mode="before")(_walltime)


class PodsConfig(Section):
    """The pods, a job array on CPU nodes. Each element is one pod: an MPI world whose ranks run sandboxes."""

    partition: str | None = None
    """CPU partition, or a comma-separated list from which Slurm chooses. Default: the site's."""
    count: int = Field(1, ge=1, le=MAX_PODS)
    """Number of pods. More pods finish sooner; all work on the same rollouts. Default: 1."""
    nodes: int = Field(1, ge=1)
    """Nodes of each pod. Default: 1."""
    ranks_per_node: int = Field(2, ge=1)
    """MPI ranks on each node. Rank 0 of a pod schedules; the others run rollouts. Default: 2."""
    slots_per_rank: int | None = Field(None, ge=1)
    """Concurrent rollouts of each worker rank. Raise it if rollouts mostly wait for the model. Default:
    ``cpus_per_rank``."""
    cpus_per_rank: int | None = Field(None, ge=1)
    """CPUs of each rank. Default: 2."""
    mem_gb: float | None = Field(None, ge=LEAST_GB)
    """Memory in GB (10^9 bytes) of each node, shared by its ranks. Default: the partition's."""
    time: str | int | None = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. It should be several times as long as a rollout. Default: the
    partition's, or less if account or QOS allow less."""
    pools: tuple[PodPoolConfig, ...] = ()
    """Additional pod arrays in other partitions, accounts or clusters."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional sbatch options by name."""

    _time = field_validator("time", mode="before")(_walltime)

    @field_validator("ranks_per_node", mode="before")
    @classmethod
    def _default_ranks(cls, value: Any) -> Any:
        return cls.model_fields["ranks_per_node"].default if value is None else value

    @property
    def total(self) -> int:
        """Number of pods in all pools."""
        return self.count + sum(pool.count for pool in self.pools)

    @property
    def here(self) -> int:
        """Number of pods on this cluster."""
        return self.count + sum(pool.count for pool in self.pools if not pool.cluster)


class ServersConfig(Section):
    """The engine servers, a job array on GPU nodes. Each element is one server."""

    partition: str | None = None
    """GPU partition. Default: the site's default partition."""
    cpus_per_gpu: int | None = Field(None, ge=1)
    """CPUs per GPU of a server, or for the whole server if it has no GPU. Default: the partition's CPUs divided by
    its GPUs, at most 8, unless the site sets a default itself (``DefCpuPerGPU``)."""
    mem_gb: float | None = Field(None, ge=LEAST_GB)
    """Memory in GB (10^9 bytes) of each server on each of its nodes. Default: the partition's."""
    time: str | int | None = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Servers are requeued when it ends. Default: the partition's, or less
    if account or QOS allow less."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional sbatch options by name."""

    _time = field_validator("time", mode="before")(_walltime)


class TrainerConfig(Section):
    """The trainer's job, one for each trained policy. It is requeued automatically and continues from its last
    commit."""

    partition: str | None = None
    """GPU partition. Default: ``servers.partition``."""
    nodes: int = Field(1, ge=1)
    """Number of nodes. Default: 1."""
    gpus: int = Field(1, ge=0)
    """GPUs on each node. One trainer process runs on each GPU. 0: one process on CPUs. Default: 1."""
    mem_gb: float | None = Field(None, ge=LEAST_GB)
    """Memory in GB (10^9 bytes) of each node. Default: the partition's."""
    time: str | int | None = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Default: the partition's, or less if account or QOS allow less."""
    share: Literal["none", "sleep"] = "none"
    """``none``: trainer and engine have their own GPUs. ``sleep``: they share the trainer's GPUs, and the engine sleeps
    during each step. Use it if GPUs are scarce. Default: ``none``."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional sbatch options by name."""

    _time = field_validator("time", mode="before")(_walltime)


class SlurmConfig(Section):
    """Resources that jobs request from Slurm."""

    account: str | None = None
    """Account to charge. Default: the user's."""
    setup: tuple[str, ...] = ()
    """Shell lines that every job runs first, such as ``module load apptainer``."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional sbatch options for every job, by name."""
    together: bool = False
    """Run the engines and one pod in a single heterogeneous job, so that they start at the same time, instead of in
    two arrays. Default: false."""
    requeues: int = Field(3, ge=0)
    """Consecutive starts without progress after which an array element is no longer requeued. Raise it on unreliable
    nodes. Default: 3."""
    pods: PodsConfig = PodsConfig()
    """Pods, which run agents and sandboxes."""
    servers: ServersConfig = ServersConfig()
    """Engine servers, which run the model."""
    trainer: TrainerConfig = TrainerConfig()
    """Trainers of trained policies."""
    gather: dict[str, Any] = Field(default_factory=dict)
    """sbatch options, by name, for the job that writes trajectories.h5 after the pods have ended. ``mail-user`` with
    ``mail-type: END,FAIL`` sends an email then. Defaults: ``partition``, that of ``pods``; ``time``, an hour, or
    less if partition, account or QOS allow less; ``cpus-per-task``, the CPUs of a pod on one node, at most 8."""

    @model_validator(mode="after")
    def _one_cluster(self) -> SlurmConfig:
        extras = [self.extra, self.pods.extra, self.servers.extra, self.trainer.extra, self.gather]
        extras += [pool.extra for pool in self.pods.pools]
        for name in sorted({name for extra in extras for name in extra}):
            if name.strip("-") in ("M", "cluster", "clusters"):
                raise ValueError(f"extra: {name!r}: pods at another cluster are slurm.pods.pools: [{{cluster: NAME}}]")
        return self

    @field_validator("gather", mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "extra" in value:
            raise ValueError("extra: write its options directly into slurm.gather")
        try:
            _walltime(value.get("time"))
        except ValueError as error:
            raise ValueError(f"time {error}") from None
        return value

    @field_validator("setup", mode="before")
    @classmethod
    def _lines(cls, value: Any) -> Any:
        return value.splitlines() if isinstance(value, str) else value
