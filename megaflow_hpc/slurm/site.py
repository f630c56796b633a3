"""Queries the site's partitions, MPI plug-ins and configuration. Caches the results, so each query runs a command
once."""

from __future__ import annotations

import functools
import getpass
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.mpi import mpi_library, mpi_order

if TYPE_CHECKING:
    from megaflow_hpc.config import CampaignConfig

COMMAND_TIMEOUT_S = 60.0
"""Timeout for a Slurm command, in seconds. It is generous because a busy slurmctld may respond slowly."""
ACCOUNTING_CACHE_S = 30.0
"""Lifetime of cached account and QOS data, in seconds."""


@dataclass(frozen=True)
class Partition:
    """A partition, as reported by sinfo.

    ``cpus``, ``memory_mb`` (MiB) and ``gpus`` are maxima over the partition's nodes, and ``least_cpus`` is the minimum.
    ``time`` is the time limit in Slurm's format. ``cpus_per_gpu`` is the minimum over nodes with GPUs, or 0 if there
    are none. ``gpu_types`` maps each GPU type that Slurm reports to its maximum number on a node.
    """

    name: str
    default: bool
    up: bool
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    time: str
    cpus_per_gpu: int = 0
    least_cpus: int = 0
    gpu_types: Mapping[str, int] = field(default_factory=dict)


SILENT = re.compile("Unable to contact slurm controller|configuration source|DNS SRV lookup failed")
"""Matches messages of Slurm's programs on machines without a controller."""


def ask(*command: str, epoch: bool = False) -> str:
    """Runs a Slurm command and returns its output.

    Args:
        epoch: True to make the command print times as Unix seconds.

    Raises:
        SiteError: The command is missing, fails or times out.
    """
    # 0: print all elements of an array. By default, Slurm cuts the list after 64 characters.
    environment = {**os.environ, "SLURM_BITSTR_LEN": "0"} | ({"SLURM_TIME_FORMAT": "%s"} if epoch else {})
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False, env=environment
        )
    except FileNotFoundError:
        raise SiteError(f"{command[0]}: not found; load the site's Slurm module, or use --launcher local") from None
    except subprocess.TimeoutExpired:
        raise SiteError(
            f"{command[0]}: no answer in {COMMAND_TIMEOUT_S:.0f} s; the Slurm controller is busy or down; try again"
        ) from None
    if done.returncode:
        message = joined((done.stderr.strip() or done.stdout.strip() or "no message").splitlines())
        if SILENT.search(message):
            message += (
                "; check that this is a node of the cluster (scontrol ping) and that SLURM_CONF is right; "
                "run --launcher local needs no Slurm"
            )
        shown = [word for word in command if word != "env" and not word.startswith("--unset=")][:3]
        raise SiteError(f"{' '.join(shown)}: {message}")
    return done.stdout


MAX_WORDS = 500
"""Maximum number of characters of a command's output that an error quotes."""


def joined(lines: Iterable[str]) -> str:
    """Joins the lines of an error message into one. A site's submit plug-in prints its explanation before Slurm's last
    line. Keeps at most the last :data:`MAX_WORDS` characters."""
    stripped = (re.sub(r"^(s[a-z]+: )?(error|fatal): ", "", line.strip()) for line in lines)
    words = "; ".join(dict.fromkeys(line for line in stripped if line))
    return words if len(words) <= MAX_WORDS else "…" + words[1 - MAX_WORDS :]


def sacctmgr(*show: str) -> str:
    """Returns the output of ``sacctmgr -nP show``. Cached for up to half a minute, because all kinds of jobs need the
    same data.

    Raises:
        SiteError: The site has no accounting, or it does not respond.
    """
    return _sacctmgr(show, int(time.monotonic() // ACCOUNTING_CACHE_S))


@functools.lru_cache(maxsize=64)
def _sacctmgr(show: tuple[str, ...], moment: int) -> str:
    return ask("sacctmgr", "-nP", "show", *show)


def on(cluster: str) -> tuple[str, ...]:
    """Returns the options that direct a Slurm command to another cluster. Empty for the local cluster."""
    return ("-M", cluster) if cluster else ()


def here_or_on(cluster: str) -> tuple[str, ...]:
    """Returns the options that select a cluster for ``squeue`` and ``scontrol show job``. For the local cluster, they
    skip the federation query, which saves a request."""
    return on(cluster) or ("--local",)


def has_slurm() -> bool:
    """Returns True if Slurm's commands are on PATH."""
    return all(shutil.which(tool) for tool in ("sbatch", "squeue", "srun"))


@functools.cache
def partitions(cluster: str = "", hidden: bool = True) -> dict[str, Partition]:
    """Returns the partitions of a cluster, by name.

    Args:
        cluster: Name of the cluster. Empty for this cluster.
        hidden: Include partitions that are hidden or closed to this user's groups. A job may name a hidden partition.

    Raises:
        SiteError: Slurm does not respond.
    """
    by_name: dict[str, Partition] = {}
    # Without -e, sinfo merges nodes of different sizes into one line with the smallest values.
    every = ("-a",) if hidden else ()
    output = ask("sinfo", *on(cluster), *every, "-h", "-e", "-o", "%R|%P|%a|%D|%c|%m|%G|%l")
    for line in output.splitlines():
        name, marked, available, nodes, cpus, memory, gres, limit = line.split("|")
        types = gpus_in(gres)
        gpus = sum(types.values())
        cpus_of_node = _leading_number(cpus)
        partition = Partition(
            name=name,
            default=marked.endswith("*"),
            up=available == "up",
            nodes=int(nodes),
            cpus=cpus_of_node,
            memory_mb=_leading_number(memory),
            gpus=gpus,
            time=limit,
            cpus_per_gpu=cpus_of_node // gpus if gpus else 0,
            least_cpus=cpus_of_node,
            gpu_types={kind: count for kind, count in types.items() if kind},
        )
        before = by_name.get(name)
        by_name[name] = _merged(before, partition) if before else partition
    return by_name


def gpus_in(gres: str) -> dict[str, int]:
    """Parses a node's ``Gres`` into a mapping of GPU type to number of GPUs. The type is empty if Slurm reports none.

    Formats: ``gpu:4``, ``gpu:a100:4(S:0-1)``, ``gpu:3090:8``, ``gpu:h100_1g.10gb:7,gpu:h100:1``. The last part is the
    number, so a type may consist of digits.
    """
    gpus: dict[str, int] = {}
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *parts = entry.strip().split(":")
        if name != "gpu":
            continue
        count = int(parts.pop()) if parts and parts[-1].isdigit() else 1
        kind = next((part for part in parts if part != "no_consume"), "")
        gpus[kind] = gpus.get(kind, 0) + count
    return gpus


def _leading_number(text: str) -> int:
    return int(re.sub(r"\D.*", "", text))


def _merged(first: Partition, second: Partition) -> Partition:
    """Merges two entries for the same partition into a single entry that covers the nodes of both."""
    shares = [partition.cpus_per_gpu for partition in (first, second) if partition.cpus_per_gpu]
    return replace(
        second,
        nodes=first.nodes + second.nodes,
        cpus=max(first.cpus, second.cpus),
        memory_mb=max(first.memory_mb, second.memory_mb),
        gpus=max(first.gpus, second.gpus),
        cpus_per_gpu=min(shares, default=0),
        least_cpus=min(first.least_cpus, second.least_cpus),
        gpu_types={
            kind: max(first.gpu_types.get(kind, 0), second.gpu_types.get(kind, 0))
            for kind in sorted({*first.gpu_types, *second.gpu_types})
        },
    )


@functools.cache
def mpi_plugins() -> tuple[str, ...]:
    """Returns the MPI plug-ins to try, most likely first. ``MEGAFLOW_MPI`` overrides them.

    Raises:
        SiteError: srun offers no supported plug-in.
    """
    if chosen := os.environ.get("MEGAFLOW_MPI", "").split():
        return tuple(chosen)
    command = ["srun", "--mpi=list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise SiteError(f"srun --mpi=list: no answer in {COMMAND_TIMEOUT_S:.0f} s; try again") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no answer"]
        raise SiteError(f"srun --mpi=list: {lines[-1]}")
    offered = set(re.split(r"[\s,:]+", done.stdout + done.stderr))
    if fitting := tuple(plugin for plugin in mpi_order(mpi_library()) if plugin in offered):
        return fitting
    raise SiteError(f"srun --mpi=list offers none of pmi2, pmix: {sorted(offered)}; name one with MEGAFLOW_MPI")


def mpi_attempts() -> str:
    """Returns the MPI plug-ins that a pod tries, separated by spaces. Includes only the first version of each kind,
    such as ``pmix_v4`` for pmix.

    Plug-ins in ``MEGAFLOW_MPI`` are returned unchanged.
    """
    if chosen := os.environ.get("MEGAFLOW_MPI", "").split():
        return " ".join(chosen)
    first = {plugin.partition("_")[0]: plugin for plugin in reversed(mpi_plugins())}
    return " ".join(plugin for plugin in mpi_plugins() if plugin in first.values())


@functools.cache
def configuration(cluster: str = "") -> dict[str, str]:
    """Returns the settings from ``scontrol show config``, by name. An empty ``cluster`` is this cluster."""
    output = ask("scontrol", *on(cluster), "show", "config")
    pairs = (line.partition("=") for line in output.splitlines())
    return {name.strip(): value.strip() for name, separator, value in pairs if separator}


def max_array_size(cluster: str = "") -> int:
    """Returns MaxArraySize of a cluster, which is the largest array index + 1. An empty ``cluster`` is this cluster."""
    size = configuration(cluster).get("MaxArraySize", "")
    return int(size) if size.isdigit() else 1001


def accounts() -> list[str]:
    """Returns the accounts that this user may charge, default accounts first. Empty if accounting is unavailable."""
    user = getpass.getuser()
    try:
        output = sacctmgr("user", user, "withassoc", "format=defaultaccount,account")
    except SiteError:
        return []
    rows = [line.split("|") for line in output.splitlines() if line.count("|") == 1]
    defaults = [default for default, _ in rows if default]
    own = sorted({account for _, account in rows if account})
    return list(dict.fromkeys([*defaults, *own]))


def enforces_limits() -> bool:
    """Returns True if Slurm enforces association and QOS limits (AccountingStorageEnforce)."""
    return bool({"limits", "safe"} & set(configuration().get("AccountingStorageEnforce", "").lower().split(",")))


def cluster_name() -> str:
    return configuration().get("ClusterName", "")


def partition_qos(names: str) -> set[str]:
    """Returns the QOS of the given partitions, whose limits apply in addition to the limits of the job's own QOS.
    ``names`` is in sbatch's format."""
    wanted = _named(names)
    return {qos for name, qos in _each_partition("QoS") if name in wanted and qos != "N/A"}


def _named(names: str | None) -> list[str]:
    """Splits partition names in sbatch's format. Without names, returns the default partitions."""
    return names.split(",") if names else [p.name for p in partitions().values() if p.default]


def whole_nodes() -> set[str]:
    """Returns the partitions that allocate whole nodes to each job: those with ``OverSubscribe=EXCLUSIVE``, or all
    partitions with ``select/linear``."""
    linear = configuration().get("SelectType", "") == "select/linear"
    return {name for name, shared in _each_partition("OverSubscribe") if linear or shared == "EXCLUSIVE"}


def one_user_nodes() -> set[str]:
    """Returns the partitions whose nodes run jobs of one user at a time (``ExclusiveUser=YES``)."""
    return {name for name, exclusive in _each_partition("ExclusiveUser") if exclusive == "YES"}


def cpu_limits() -> dict[str, int]:
    """Returns the maximum number of CPUs per node that jobs may use (``MaxCPUsPerNode``), for each partition with this
    limit."""
    return {name: int(most) for name, most in _each_partition("MaxCPUsPerNode") if most.isdigit()}


def default_times() -> dict[str, str]:
    """Returns the default walltime, in Slurm's format, of each partition that has one."""
    return {name: time for name, time in _each_partition("DefaultTime") if time != "NONE"}


def _each_partition(key: str) -> list[tuple[str, str]]:
    """Returns each partition's name with its value of ``key`` from ``scontrol show partition``."""
    return re.findall(rf"^PartitionName=(\S+).*?\b{key}=(\S+)", _shown_partitions(), re.MULTILINE)


@functools.cache
def _shown_partitions() -> str:
    return ask("scontrol", "-a", "-o", "show", "partition")


MAX_CPUS_PER_GPU = 8
"""Upper limit for an engine's default number of CPUs per GPU. More CPUs would gain little and keep other jobs from
running."""


def engine_cpus(names: str | None) -> int | None:
    """Returns the default number of CPUs per GPU for engine servers: a GPU's share of its node.

    Returns ``None`` if Slurm sets a default itself (DefCpuPerGPU), or if the share is unknown.

    Args:
        names: Partitions in sbatch's format. ``None`` for the default partition.

    Raises:
        SiteError: Slurm does not respond.
    """
    by_name = partitions()
    wanted = _named(names)
    shares = [by_name[name].cpus_per_gpu if name in by_name else 0 for name in wanted]
    if not shares or not min(shares):
        return None
    defaults = [configuration().get("JobDefaults", "")]
    defaults += [value for name, value in _each_partition("JobDefaults") if name in wanted]
    return None if any("DefCpuPerGPU" in value for value in defaults) else min(MAX_CPUS_PER_GPU, *shares)


def check_site(config: CampaignConfig, where: Any) -> None:
    """Checks that the campaign's partitions exist.

    Args:
        where: Function that returns ``file:line`` for a dotted key.

    Raises:
        ConfigError: A partition does not exist. The message names it and lists the existing partitions.
    """
    slurm = config.slurm
    wanted = [(f"slurm.pods.pools.{n}", pool.partition, pool.cluster) for n, pool in enumerate(slurm.pods.pools)]
    wanted.append(("slurm.pods", slurm.pods.partition, ""))
    if any(policy.model for policy in config.policies().values()):
        wanted.append(("slurm.servers", slurm.servers.partition, ""))
    if config.training:
        wanted.append(("slurm.trainer", slurm.trainer.partition, ""))
    for section, names, cluster in wanted:
        existing = partitions(cluster) if cluster else partitions()  # "" would be cached separately
        for name in names.split(",") if names else ():
            if name not in existing:
                key, at = f"{section}.partition", f"at {cluster}" if cluster else "here"
                raise ConfigError(
                    f"{where(key)}: {key}: no partition {name!r} {at}; there are: {', '.join(sorted(existing))}"
                )
