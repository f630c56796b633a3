"""The ``slurm`` section: what the jobs of a campaign ask Slurm for."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megaflow_hpc.config.sections import RUN_DIRECTORY, Section

TRAINER_REQUEUES = 20
"""Requeues of a trainer in a row that committed no step, before it is given up."""
CPUS_PER_RANK = 2
"""CPUs of each MPI rank of a pod where the campaign file does not say."""
LEAST_GB = 0.001
"""Slurm counts in MB, and takes 0 for all of a node's memory."""
WALLTIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}\Z")
_REMEDY = "write minutes (30), HH:MM:SS or D-HH:MM:SS"


def _walltime(value: Any) -> Any:
    if value is None:
        return value
    text = str(value) if isinstance(value, int | str) else ""
    if not WALLTIME.match(text):
        raise ValueError(f"{value!r} is not a time; {_REMEDY}")
    if not text.strip("0:-"):  # Slurm takes 0 for no limit, and keeps such a job where partitions have one
        raise ValueError(f"{value!r} leaves no time to run; {_REMEDY}")
    return value


class PodPoolConfig(Section):
    """A further pod array; what it does not state is as in ``slurm.pods``."""

    cluster: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """Another Slurm cluster (``sbatch --clusters``) that mounts the same run directory. Default: this one."""
    partition: str | None = None
    """Partition, in place of ``pods.partition``; with several, comma-separated, Slurm chooses."""
    account: str | None = None
    """Account to charge, in place of ``slurm.account``."""
    count: int = Field(1, ge=1)
    """Number of pods (array elements). Default: 1."""
    nodes: int | None = Field(None, ge=1)
    """Nodes of each pod. Default: ``pods.nodes``."""
    time: str | int | None = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Default: ``pods.time``."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further sbatch options by name."""

    _time = field_validator("time", mode="before")(_walltime)


class PodsConfig(Section):
    """The pod array. Each element is one MPI world that runs sandboxes."""

    partition: str | None = None
    """CPU partition. Default: the site's."""
    count: int = Field(1, ge=1)
    """Number of pods (array elements). Default: 1."""
    nodes: int = Field(1, ge=1)
    """Nodes of each pod. Default: 1."""
    ranks_per_node: int = Field(2, ge=1)
    """MPI ranks on each node. Rank 0 of the pod schedules; the others run rollouts. Default: 2."""
    slots_per_rank: int | None = Field(None, ge=1)
    """Concurrent rollouts of each worker rank. Default: ``cpus_per_rank``."""
    cpus_per_rank: int | None = Field(None, ge=1)
    """CPUs of each rank. Default: 2."""
    mem_gb: float | None = Field(None, ge=LEAST_GB)
    """Memory of each node in GB (10^9 bytes), shared by its ranks. Default: the partition's."""
    time: str | int | None = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Default: the partition's, or as much as account and QOS allow."""
    pools: tuple[PodPoolConfig, ...] = ()
    """Further pod arrays, on other partitions, accounts or clusters."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further sbatch options by name."""

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
    def here(self) -> int:
        """Pods at the cluster where the campaign is submitted."""
        return self.count + sum(pool.count for pool in self.pools if not pool.cluster)


class ServersConfig(Section):
    """The engine array. Each element is one engine server."""

    partition: str | None = None
    """GPU partition. Default: the site's default partition."""
    cpus_per_gpu: int | None = Field(None, ge=1)
    """CPUs of each server for each of its GPUs; for all of it where it has none. Default: the partition's CPUs by its
    GPUs, 8 at most, unless the site gives some by itself (DefCpuPerGPU)."""
    mem_gb: float | None = Field(None, ge=LEAST_GB)
    """Memory of each server on each of its nodes in GB (10^9 bytes). Default: the partition's."""
    time: str | int | None = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Default: the partition's, or as much as account and QOS allow."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further sbatch options by name."""

    _time = field_validator("time", mode="before")(_walltime)


class TrainerConfig(Section):
    """The trainer job of each trained policy. It is requeued by itself and goes on from its last commit."""

    partition: str | None = None
    """GPU partition. Default: ``servers.partition``."""
    nodes: int = Field(1, ge=1)
    """Nodes. Default: 1."""
    gpus: int = Field(1, ge=0)
    """GPUs on each node, each with one process of the trainer. 0: one process on CPUs. Default: 1."""
    cpus_per_gpu: int | None = Field(None, ge=1)
    """CPUs for each GPU; for all of the job's part of a node where it has none. Default: as for ``servers``."""
    mem_gb: float | None = Field(None, ge=LEAST_GB)
    """Memory on each node in GB (10^9 bytes). Default: the partition's."""
    time: str | int | None = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Default: the partition's, or as much as account and QOS allow."""
    share: Literal["none", "sleep"] = "none"
    """GPUs of trainer and engines: ``none``: each has its own; ``sleep``: they share one allocation, and engines sleep
    while the trainer steps. Default: ``none``."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further sbatch options by name."""

    _time = field_validator("time", mode="before")(_walltime)


class SlurmConfig(Section):
    """What the jobs ask Slurm for."""

    account: str | None = None
    """Account to charge. Default: the user's."""
    setup: tuple[str, ...] = ()
    """Shell lines run first in every job (module load, proxies)."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further sbatch options of every job, by name."""
    together: bool = False
    """Whether engines and one pod run in one heterogeneous job (one allocation, one MPI world) in place of two arrays.
    Default: false."""
    requeues: int = Field(3, ge=0)
    """Maximum number of requeues of an array element after a crash or a drain. Default: 3."""
    pods: PodsConfig = PodsConfig()
    """The pod array."""
    servers: ServersConfig = ServersConfig()
    """The engine array."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer of each trained policy."""
    gather: dict[str, Any] = Field(default_factory=dict)
    """sbatch options, by name, of the job that writes trajectories.h5 when the pods have ended. Defaults: the partition
    of ``pods``; a ``time`` of one hour, or less if partition, account or QOS allow less; as ``cpus-per-task`` the CPUs
    of a pod on one node, at most 8. ``mail-user`` with ``mail-type: END,FAIL`` sends a mail when the campaign has
    ended."""

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
    def _gather(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        if info.context == RUN_DIRECTORY:  # ``extra`` of earlier versions
            value = {**{key: own for key, own in value.items() if key != "extra"}, **(value.get("extra") or {})}
        elif "extra" in value:
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
