"""Defines the ``slurm`` section: resources that the jobs of a campaign request."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError

from megaflow_hpc.config.sections import STORED, Section, describe

TRAINER_REQUEUES = 20
"""A trainer is not requeued again after this many consecutive requeues without a committed step."""
LEAD_S = 60
"""Default number of seconds before the end of the walltime at which Slurm signals a pod, which then drains."""
CPUS_PER_RANK = 2
"""Default number of CPUs of each rank (``cpus_per_rank``)."""
MIN_LEAD_S = 40
"""Minimum number of seconds before the end of the walltime at which Slurm signals a pod. Workers need most of them to
stop."""
SIGNAL = re.compile(r"B:USR2@(\d+)")
"""Matches the value of sbatch's option ``signal`` for pods."""
LIFTED = " (no error because of slurm.check: false)"
"""Suffix of a warning that is only a warning because of ``slurm.check: false``."""
DEFAULT_RANKS = 2
"""Default number of ranks on each node (``ranks_per_node``)."""
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
"""Options of sbatch that request memory. Slurm accepts only one of them."""
_MEMORY = re.compile(r"([\d.]+)([KMGT]?)B?")
_MB = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
WALLTIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}\Z")
_REMEDY = "write minutes (30), HH:MM:SS or D-HH:MM:SS"


def _lines(value: Any) -> Any:
    """Splits multi-line text into shell lines."""
    return value.splitlines() if isinstance(value, str) else value


def _digits_as_text(value: Any) -> Any:
    """Converts a name that YAML parsed as an integer back to text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _walltime(value: Any) -> Any:
    if value is None:
        return value
    text = str(value) if isinstance(value, int | str) else ""
    if not WALLTIME.match(text):
        raise ValueError(f"{value!r} is not a time; {_REMEDY}")
    if not text.strip("0:-"):  # Slurm treats 0 as no limit, and never starts such a job if the partition has a limit
        raise ValueError(f"{value!r} leaves no time to run; {_REMEDY}")
    return value


def of_gigabytes(mem_gb: float | None) -> str | None:
    """Converts ``mem_gb`` of an earlier version, in 10^9 bytes, to a value of ``mem``."""
    return None if mem_gb is None else f"{round(mem_gb * 1000)}M"


def megabytes(text: str) -> int:
    """Converts a size as Slurm writes it, ``16G`` or ``2000`` (MB), to MB.

    Raises:
        ValueError: The text has neither format.
    """
    match = _MEMORY.fullmatch(text.strip().upper())
    if not match:
        raise ValueError(f"{text!r}: expected a number of MB, or one with K, M, G or T")
    return round(float(match[1]) * _MB[match[2]])


GpuType = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]+$"), BeforeValidator(_digits_as_text)]
"""Name of a GPU type in Slurm's ``Gres``. Some names, such as ``3090``, consist only of digits."""
ShellLines = Annotated[tuple[str, ...], BeforeValidator(_lines)]
Walltime = Annotated[str | int | None, BeforeValidator(_walltime)]

MAX_PODS = 100_000
"""Maximum number of pods in a section. A larger number is assumed to be a typo."""

_OPTIONS = """
account acctg-freq array batch bb bbf begin chdir clusters cluster-constraint comment constraint container
container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
dependency distribution error exclude exclusive export export-file extra-node-info get-user-env gid gpu-bind
gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name
kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network
nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket open-mode output overcommit oversubscribe partition power prefer priority profile propagate qos
reboot requeue reservation segment signal sockets-per-node spread-job stepmgr switches thread-spec
threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes wait-all-nodes wckey
"""
SBATCH_OPTIONS = tuple(_OPTIONS.split())
"""Options of sbatch. A name with a dash that resembles none of them, and any name after ``--``, counts as an option
that a site's plugin adds."""
OWN_OPTIONS = {
    "array": "pods.count and model.servers set the number of jobs",
    "clusters": "only pods run at another cluster, as slurm.pods.pools: [{clusters: NAME}]",
    "comment": "the jobs of a run are found by it",
    "cpus-per-gpu": "only servers and trainer take it",
    "dependency": "gather waits for the pods; write it in pods, servers or trainer",
    "error": "logs are in RUN/logs",
    "job-name": "the campaign's name sets it",
    "nodes": "pods.nodes, model.nodes and trainer.nodes set it",
    "ntasks": "pods.nodes and pods.ranks_per_node set it",
    "ntasks-per-node": "pods.ranks_per_node sets it",
    "output": "logs are in RUN/logs",
    "signal": "only pods and gather take it",
    "test-only": "run --dry-run shows what would be submitted",
}
"""Options of sbatch that the jobs set themselves, each with the reason or the key to use."""


def _without(*names: str) -> dict[str, str]:
    """Returns :data:`OWN_OPTIONS` without the options that a section accepts."""
    return {name: why for name, why in OWN_OPTIONS.items() if name not in names}


EARLIER_KEYS = {"account": "account", "cpus_per_gpu": "cpus-per-gpu", "cluster": "clusters"}
"""Option of sbatch for each key that earlier versions of the package had."""


def _describe_job(schema: dict[str, Any], model: type[Section]) -> None:
    """Adds the options of sbatch to the JSON Schema of a section. Editors then accept them and find misspelt names."""
    describe(schema, model)
    schema["additionalProperties"] = {"type": ["string", "number", "boolean", "null"]}
    schema["x-options"] = list(SBATCH_OPTIONS)


def option_name(name: str) -> str:
    """Converts an option to sbatch's spelling: ``--qos`` → ``qos``, ``mem_per_cpu`` → ``mem-per-cpu``."""
    return name.strip("-").replace("_", "-")


class JobSection(Section):
    """A section of settings and sbatch options."""

    model_config = ConfigDict(json_schema_extra=_describe_job)
    refused: ClassVar[Mapping[str, str]] = OWN_OPTIONS
    """Options of sbatch that the section refuses, each with the reason."""

    extra: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict)
    """sbatch options. In the campaign file, they are keys of the section."""

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        earlier: dict[str, Any] = {}
        if info.context == STORED and "mem_gb" in value:
            value = dict(value)
            memory = of_gigabytes(value.pop("mem_gb"))
            if memory is not None:
                earlier["mem"] = memory
        if "extra" in value:
            if info.context != STORED:
                raise ValueError("extra: write its options directly into the section, such as qos: long")
            earlier |= {option: value[key] for key, option in EARLIER_KEYS.items() if value.get(key)}
            given = {**earlier, **value["extra"]}
        else:
            given = earlier | {
                name: v for name, v in value.items() if name not in cls.model_fields and cls._is_option(name)
            }
        options: dict[str, Any] = {}
        mistakes = []
        for name, option in given.items():
            known = option_name(name)
            try:
                if info.context != STORED:
                    cls.check_option(known, option, known in options)
            except ValueError as error:
                kind = PydanticCustomError("option", "{message}", {"message": str(error)})
                mistakes.append(InitErrorDetails(type=kind, loc=(name,), input=option))
            options[known if known in SBATCH_OPTIONS else name] = option
        if mistakes:
            raise ValidationError.from_exception_data(cls.__name__, mistakes)
        return {**{name: v for name, v in value.items() if name not in given}, "extra": options}

    @classmethod
    def _is_option(cls, name: Any) -> bool:
        if not isinstance(name, str) or not name.strip("-"):
            return False
        option = option_name(name)
        if option in (*SBATCH_OPTIONS, "mem-gb") or len(option) == 1 or name.startswith("--"):
            return True
        known = [*(field.replace("_", "-") for field in cls.model_fields), *SBATCH_OPTIONS]
        return "-" in name and "_" not in name and not difflib.get_close_matches(option, known, 1, 0.75)

    @classmethod
    def check_option(cls, name: str, value: Any, given_twice: bool) -> None:
        """Checks one option of the campaign file.

        Raises:
            ValueError: The section does not allow the option. The message names the remedy.
        """
        field = name.replace("-", "_")
        if len(name) == 1:  # sbatch would get --t=10
            raise ValueError("write the option's long name, such as time for t")
        if name == "mem-gb":
            raise ValueError("write mem with a unit, such as mem: 16G")
        if field in cls.model_fields:
            raise ValueError(f"write {field}")
        if given_twice:
            raise ValueError("is there twice, in two spellings; keep one")
        if name in cls.refused:
            raise ValueError(f"leave it out: {cls.refused[name]}")
        if isinstance(value, list | dict):
            raise ValueError("expected one value, written as for sbatch, such as END,FAIL")
        if name == "signal" and not SIGNAL.fullmatch(str(value)):
            raise ValueError("write B:USR2@SECONDS, such as B:USR2@300")
        if name == "clusters" and not re.fullmatch(r"[A-Za-z0-9_-]+", str(value)):
            raise ValueError("expected the name of one cluster")
        if name == "cpus-per-gpu" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError("expected a whole number above 0")
        if name in MEMORY_OPTIONS and value is not None and not re.fullmatch(r"0|[1-9]\d*[KMGTkmgt]", str(value)):
            raise ValueError("write a number and its unit, such as 16G, or 0 for all memory of a node")
        if name == "time":
            _walltime(value)

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        options = fields.pop("extra", {})
        return {**fields, **options}


class PodsConfig(JobSection):
    """The pods, a job array on CPU nodes. Each array element is a pod, an MPI world whose ranks run sandboxes. Other
    keys are options of sbatch, by their long names, such as ``constraint`` and ``mem: 16G``, the memory of each node,
    which its ranks share (default: the partition's). ``signal: B:USR2@300`` lets pods drain 300 s before the end of the
    walltime instead of 60, of which running rollouts get all but the last 35."""

    refused: ClassVar[Mapping[str, str]] = {
        **_without("clusters", "dependency", "signal"),
        "cpus-per-task": "pods.cpus_per_rank sets it",
    }

    partition: str | None = None
    """CPU partition, or a comma-separated list from which Slurm chooses. Default: the site's."""
    count: int = Field(1, ge=1, le=MAX_PODS)
    """Number of pods. All work on the same rollouts, so more pods finish sooner. Default: 1."""
    nodes: int = Field(1, ge=1)
    """Number of nodes of each pod. Default: 1."""
    ranks_per_node: Annotated[int, Field(ge=1)] | Literal["fill"] = DEFAULT_RANKS
    """MPI ranks on each node. Rank 0 of a pod schedules; the others run rollouts. ``fill``: as many as the node's CPUs
    allow, for partitions that allocate whole nodes. Default: 2."""
    slots_per_rank: int | None = Field(None, ge=1)
    """Concurrent rollouts of each worker rank. Raise it if rollouts mostly wait for the model. Default:
    ``cpus_per_rank``."""
    cpus_per_rank: int | None = Field(None, ge=1)
    """Number of CPUs of each rank. Default: 2."""
    time: Walltime = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Should be several times the duration of a rollout. Default: the
    partition's, or less if account or QOS allow less."""
    pools: tuple[PodsConfig, ...] = ()
    """More pod arrays, in other partitions, accounts or clusters. An entry has ``count``, ``partition``, ``time``
    and options of sbatch, and takes all else from ``slurm.pods``. ``clusters`` names another Slurm cluster, which must
    mount the run directory."""
    setup: ShellLines = ()
    """Shell lines that pods and the gather job run after ``slurm.setup``. ``export MEGAFLOW_PYTHON=…`` selects the
    interpreter for nodes of another architecture."""

    @field_validator("ranks_per_node", mode="before")
    @classmethod
    def _default_ranks(cls, value: Any) -> Any:
        return cls.model_fields["ranks_per_node"].default if value is None else value

    @field_validator("pools")
    @classmethod
    def _same_pods(cls, value: tuple[PodsConfig, ...]) -> tuple[PodsConfig, ...]:
        for pool in value:
            for name, field in cls.model_fields.items():
                own = name in ("count", "partition", "time", "extra")
                if not own and getattr(pool, name) != field.get_default(call_default_factory=True):
                    raise ValueError(f"{name}: all pools take it from slurm.pods; leave it out")
            if "signal" in pool.extra:
                raise ValueError("signal: all pools take it from slurm.pods; leave it out")
        return value

    @property
    def cluster(self) -> str:
        """Name of another cluster on which this pool runs (``clusters``). Empty for the login node's cluster."""
        return str(self.extra.get("clusters", ""))

    @property
    def ranks(self) -> int:
        """Number of ranks on each node. Returns the default until planning replaces ``fill``."""
        return DEFAULT_RANKS if self.ranks_per_node == "fill" else self.ranks_per_node

    @property
    def total(self) -> int:
        """Number of pods in all pools."""
        return self.count + sum(pool.count for pool in self.pools)

    @property
    def here(self) -> int:
        """Number of pods on the login node's cluster."""
        return self.count + sum(pool.count for pool in self.pools if not pool.cluster)


class ServersConfig(JobSection):
    """The engine servers, a job array on GPU nodes. Each array element is a server. Other keys are options of sbatch,
    by their long names, such as ``mem: 64G`` and ``cpus-per-gpu`` (default: the partition's CPUs divided by its GPUs,
    at most 8, unless the site sets ``DefCpuPerGPU``)."""

    refused: ClassVar[Mapping[str, str]] = _without("cpus-per-gpu", "dependency")

    partition: str | None = None
    """GPU partition. Default: the site's default partition."""
    time: Walltime = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Servers are requeued when it ends. Default: the partition's, or less
    if account or QOS allow less."""
    setup: ShellLines = ()
    """Shell lines that servers run after ``slurm.setup``. ``export MEGAFLOW_PYTHON=…`` selects the interpreter for
    nodes of another architecture."""


class TrainerConfig(JobSection):
    """The trainer's job. Slurm requeues it, and it continues from its last commit. Other keys are options of sbatch, by
    their long names, such as ``mem: 64G``."""

    refused: ClassVar[Mapping[str, str]] = _without("cpus-per-gpu", "dependency")

    partition: str | None = None
    """GPU partition. Default: ``servers.partition``."""
    nodes: int = Field(1, ge=1)
    """Number of nodes. Default: 1."""
    gpus: int = Field(1, ge=0)
    """Number of GPUs on each node. Each GPU gets a trainer process. 0: a single process on CPUs. Default: 1."""
    gpu_type: GpuType | None = None
    """Slurm's name for the type of these GPUs, such as ``a100``. Default: any type."""
    time: Walltime = None
    """Walltime: minutes, HH:MM:SS or D-HH:MM:SS. Default: the partition's, or less if account or QOS allow less."""
    share: Literal["none", "sleep"] = "none"
    """``none``: trainer and engine have their own GPUs. ``sleep``: they share the trainer's GPUs, and the engine
    sleeps during each step. Use ``sleep`` if GPUs are scarce. Default: ``none``."""
    setup: ShellLines = ()
    """Shell lines that trainers run after ``slurm.setup``. ``export MEGAFLOW_PYTHON=…`` and
    ``MEGAFLOW_TRAINER_PYTHON=…`` select interpreters for nodes of another architecture."""

    @model_validator(mode="after")
    def _type_of_gpus(self) -> TrainerConfig:
        if self.gpu_type and not self.gpus:
            raise ValueError(f"gpu_type: {self.gpu_type}: gpus is 0; raise it, or leave gpu_type out")
        return self


class GatherConfig(JobSection):
    """The job that writes trajectories.h5 after the pods have ended. All keys are options of sbatch."""

    refused: ClassVar[Mapping[str, str]] = _without("signal")


class SlurmConfig(JobSection):
    """Resources that jobs request from Slurm. Other keys are options of sbatch for every job, by their long names, such
    as ``account`` (default: the user's default account), ``qos`` and ``reservation``. Options in ``pods``, ``servers``,
    ``trainer`` and ``gather`` take precedence."""

    setup: ShellLines = ()
    """Shell lines that every job runs first, such as ``module load apptainer``. Exported variables override values
    of the planning machine, such as ``MEGAFLOW_SCRATCH``. Slurm's own variables, such as ``SLURM_NETWORK``, set
    options of every ``srun``."""
    check: bool = True
    """Refuse campaigns whose resources this site seems to lack. With false, print warnings and submit. Use false if
    QOS, constraints or a submit plugin select partitions, or if login nodes lack software of the compute nodes.
    Default: true."""
    together: bool = False
    """Run the engines and one pod in one heterogeneous job instead of two arrays, so that they start together. Default:
    false."""
    requeues: int = Field(3, ge=0)
    """Consecutive starts without progress after which an array element is not requeued. Raise it on unreliable nodes.
    Default: 3."""
    pods: PodsConfig = PodsConfig()
    """Resources of pods, which run agents and sandboxes."""
    servers: ServersConfig = ServersConfig()
    """Resources of engine servers, which run the model."""
    trainer: TrainerConfig = TrainerConfig()
    """Resources of the trainer jobs, one for each trained policy."""
    gather: GatherConfig = GatherConfig()
    """sbatch options, by their long names, for the job that writes trajectories.h5 after the pods have ended. For
    an email, set ``mail-user`` and ``mail-type: END,FAIL``. Defaults: ``partition``, that of ``pods``; ``time``,
    enough for the expected bytes and at least an hour, or less if partition, account or QOS allow less;
    ``cpus-per-task``, the CPUs of a pod on one node, at most 8."""

    @model_validator(mode="after")
    def _one_job(self) -> SlurmConfig:
        if self.pods.cluster:
            raise ValueError("pods.clusters: write pods: {pools: [{clusters: NAME}]}")
        if self.lead_s < MIN_LEAD_S:
            raise ValueError(f"pods.signal: write at least {MIN_LEAD_S} seconds, such as B:USR2@300")
        if self.together and self.servers.setup:
            raise ValueError(
                "servers.setup: with together: true, pods and engines are one job; move the lines to setup"
            )
        if self.trainer.share == "sleep" and self.servers.setup:
            raise ValueError(
                "servers.setup: with trainer.share: sleep, the engine is in the trainer's job; use trainer.setup"
            )
        return self

    def memory_mb(self, section: JobSection) -> int | None:
        """Returns the memory in MB on each node of a section's jobs, or ``None`` if ``mem`` is missing or 0."""
        value = {**self.extra, **section.extra}.get("mem")
        return (megabytes(str(value)) or None) if value is not None else None

    @property
    def lead_s(self) -> int:
        """Seconds before the end of the walltime at which Slurm signals a pod. 0 if ``signal`` is invalid."""
        signal = {**self.extra, **self.pods.extra}.get("signal", f"B:USR2@{LEAD_S}")
        found = SIGNAL.fullmatch(str(signal))
        return int(found[1]) if found else 0
