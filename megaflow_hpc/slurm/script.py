"""Renders all batch scripts with one pure function.

``--dry-run`` prints exactly the text that would be submitted. The scripts in ``sbatch/`` are rendered by the same
function without a campaign, so manual and automatic submission run the same lines. The bodies are ``pods.sh``,
``servers.sh``, ``trainer.sh`` and ``gather.sh`` in this directory. Each body starts with ``own.sh`` and includes
``requeue.sh``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.slurm import (
    CPUS_PER_RANK,
    LEAD_S,
    MEMORY_OPTIONS,
    PodsConfig,
    ServersConfig,
    TrainerConfig,
    option_name,
)
from megaflow_hpc.rundir.layout import RunDir

Role = Literal["pods", "servers", "trainer", "gather"]

WARN_S = 60
"""Seconds before the end of the walltime at which an engine server receives SIGUSR2 and drains."""
GATHER_WARN_S = 120
"""Seconds before the end of the walltime at which the gather job receives SIGUSR2, closes its file and is requeued. For
short walltimes, a quarter of the walltime."""
TRAINER_WARN_S = 300
"""Seconds before the end of the walltime at which a trainer receives SIGUSR2, finishes its step and writes a
checkpoint. ``trainer.sh`` kills a step that is still running 30 s before the end."""


REQUEUES_BY_HAND = """\
case $(cat "/proc/$PPID/comm" 2>/dev/null) in slurmstepd*) requeues=yes ;; *) requeues=no ;; esac
[ "${SLURM_TASK_PID:-}" != $$ ] || requeues=yes"""
"""Shell code in ``sbatch/`` scripts that detects whether the script runs as its job's batch script. Scripts submitted
by this package skip the test, because they always do. The test would fail at sites with ParaStation, which uses psslurm
instead of slurmstepd."""


@dataclass(frozen=True)
class Job:
    """A submission to Slurm: its role, sbatch options and number of array elements (``None`` for a plain job)."""

    role: Role
    options: Mapping[str, Any]
    elements: int | None = None
    first: int = 0
    """Array index of the first element."""
    base: int = 0
    """Offset from array index to server index in ``run.json``. Needed for server indices beyond MaxArraySize."""
    throttle: int | None = None
    """Maximum number of elements that run concurrently. ``None`` for no limit."""
    arguments: Sequence[str] = ()
    """Additional arguments for the command in the gather script."""
    run: str | None = None
    """Run directory written into the script. If ``None``, the script takes it from its command line."""
    header: Sequence[str] = field(default_factory=tuple)
    engines: Sequence[Mapping[str, Any]] = ()
    """Options of engine servers that share a pod's allocation and MPI world (a heterogeneous job)."""
    cluster: str = ""
    """Name of the other Slurm cluster to submit to. Empty for the local cluster."""
    policy: str = ""
    """Policy that a trainer trains. If empty, the script takes it from its command line."""
    section: str = "servers"
    """Section of ``slurm`` whose ``setup`` an element of the engine array runs."""

    @property
    def indices(self) -> str:
        """Index range in the format of ``--array``."""
        throttle = "" if self.throttle is None else f"%{self.throttle}"
        return f"{self.first}-{self.first + (self.elements or 1) - 1}{throttle}"


def script(job: Job) -> str:
    """Renders the complete batch script."""
    lines = ["#!/bin/bash", *(f"# {line}".rstrip() for line in job.header)]
    options = dict(job.options)
    if job.elements is not None:
        options.setdefault("array", job.indices)
    lines += [f"#SBATCH {word}" for word in _words(options)]
    for engine in job.engines:
        lines += ["#SBATCH hetjob", *(f"#SBATCH {word}" for word in _words(engine))]
    if job.run:
        run, cluster, requeues = shlex.quote(job.run), "", "requeues=yes"
    else:  # The script takes these from its command line and environment.
        run = '${1:?the run directory that "megaflow-hpc plan" printed}'
        cluster, requeues = "${MEGAFLOW_CLUSTER:+@$MEGAFLOW_CLUSTER}", REQUEUES_BY_HAND
    body = _text(job.role)
    if job.engines:  # The step has one part for each component of the job.
        body = body.replace("srun --export=ALL", "srun --het-group=0 --export=ALL")
        body = body.replace("SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK_HET_GROUP_0")
    replacements = {
        "@OWN@\n": _text("own"),
        "@REQUEUE@\n": _text("requeue"),
        "@REQUEUES@": requeues,
        "@CLUSTER@": f"@{job.cluster}" if job.cluster else cluster,
        "@RUN@": run,
        "@POLICY@": shlex.quote(job.policy) if job.policy else "${2:-default}",
        " @INDEX@": f' --index "$(({job.base} + SLURM_ARRAY_TASK_ID))"' if job.base else "",
        "@BASE@": str(job.base),
        " @ENGINES@": "".join(_engine_part(n) for n in range(len(job.engines))),
        "@ARGUMENTS@": shlex.join(job.arguments),
        "@SECTION@": job.section,
    }
    for placeholder, text in replacements.items():
        body = body.replace(placeholder, text)
    return "\n".join(lines) + "\n\n" + body


def _text(name: str) -> str:
    return resources.files("megaflow_hpc.slurm").joinpath(f"{name}.sh").read_text(encoding="utf-8")


def _engine_part(server: int) -> str:
    """Returns the part of the srun command that starts an engine server as a rank of the same MPI world."""
    return (
        f' \\\n    : --het-group={server + 1} --export=ALL --mpi="$MEGAFLOW_MPI" --kill-on-bad-exit=0 --no-kill '
        f'--wait=0 --label --cpus-per-task="${{SLURM_CPUS_PER_TASK_HET_GROUP_{server + 1}:-1}}" '
        f'env MEGAFLOW_SERVER={server} "$MEGAFLOW_PYTHON" -m megaflow_hpc.pod "$RUN"'
    )


def option(name: str, value: Any) -> str:
    """Formats an sbatch option for ``#SBATCH`` lines and command lines."""
    name = option_name(name)
    return f"--{name}" if value is True or value == "" else f"--{name}={shlex.quote(str(value))}"


def _words(options: Mapping[str, Any]) -> list[str]:
    return [option(name, value) for name, value in options.items() if value is not None and value is not False]


def command(job: Job, path: str) -> str:
    """Returns the sbatch command for submitting ``path`` by hand with this job's options."""
    array = {} if job.elements is None else {"array": job.indices}
    words = ["sbatch", *_words({**array, **job.options}), path, shlex.quote(job.run or "$RUN")]
    if job.policy:
        words.append(shlex.quote(job.policy))
    return " ".join(words)


def _walltime(value: str | int | None) -> str | None:
    return None if value is None else str(value)


def _gpus(count: int, gpu_type: str | None) -> str | None:
    """Returns a request for GPUs per node in the format of ``--gres``."""
    if not count:
        return None
    return f"gpu:{gpu_type}:{count}" if gpu_type else f"gpu:{count}"


def _common(config: CampaignConfig, run: RunDir, role: str) -> dict[str, Any]:
    return {
        "job-name": config.name,
        "comment": run.path.name,
        "output": run.log(role),
        "open-mode": "append",
    }


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _requests(
    config: CampaignConfig,
    section: PodsConfig | ServersConfig | TrainerConfig,
    partition: str | None,
) -> dict[str, Any]:
    """Returns what a section requests. It takes precedence over the options of all jobs."""
    own = {"partition": partition, "time": _walltime(section.time)}
    return {**own, **config.slurm.extra, **_given(own), **section.extra}


def _with_cpus(options: dict[str, Any], gpus: int, default: int | None) -> dict[str, Any]:
    """Replaces ``cpus-per-gpu`` by CPUs per task, which the scripts pass on to ``srun``."""
    each = options.pop("cpus-per-gpu", default)
    return {**options, "cpus-per-task": options.get("cpus-per-task") or (each and each * max(1, gpus))}


def pod_job(
    config: CampaignConfig,
    run: RunDir,
    count: int | None = None,
    dependency: str | None = None,
    pool: PodsConfig | None = None,
    throttle: int | None = None,
) -> Job:
    """Returns a pod array. Each element is one MPI world on ``pods.nodes`` nodes.

    Args:
        count: Number of elements. Default: the count of the pool or the campaign.
        dependency: Job dependency in sbatch's format.
        pool: Additional pool of pods. Default: ``slurm.pods`` itself.
        throttle: Maximum number of elements that run concurrently.
    """
    pods = config.slurm.pods
    own: dict[str, Any] = {}
    if pool:
        own = _given({"partition": pool.partition, "time": _walltime(pool.time)}) | pool.extra
    options = {
        **_common(config, run, "pod"),
        "nodes": pods.nodes,
        "ntasks-per-node": pods.ranks,
        "cpus-per-task": pods.cpus_per_rank or CPUS_PER_RANK,
        "signal": f"B:USR2@{config.slurm.lead_s}",
        "requeue": True,
        "dependency": dependency,
        **_requests(config, pods, pods.partition),
        **own,
    }
    cluster = pool.cluster if pool else ""
    if cluster:
        options |= {"clusters": cluster, "dependency": None}  # a job cannot depend on jobs of another cluster
    elements = count or (pool or pods).count
    return Job("pods", options, elements, run=str(run), throttle=throttle, cluster=cluster)


def server_job(
    config: CampaignConfig,
    run: RunDir,
    elements: int,
    gpus: int,
    first: int = 0,
    largest: int | None = None,
    held: bool = False,
    nodes: int = 1,
    cpus_per_gpu: int | None = None,
    gpu_type: str = "",
) -> Job:
    """Returns an engine array. Each element is one engine server, identified by its index in ``run.json``.

    Args:
        elements: Number of servers.
        gpus: GPUs per node of each server.
        first: Index of the first server.
        largest: Largest array index that the site allows. If the server indices exceed it, array indices start at 0 and
            ``base`` is the offset.
        held: Submit the jobs held. They start after ``scontrol release``.
        nodes: Nodes per server.
        cpus_per_gpu: CPUs per GPU if the campaign does not set them. Default: Slurm's default.
        gpu_type: Slurm's name for the GPU type. Default: any type.
    """
    servers = config.slurm.servers
    options = {
        **_common(config, run, "server"),
        "nodes": nodes,
        "ntasks": nodes,
        "ntasks-per-node": 1 if nodes > 1 else None,
        "gres": _gpus(gpus, gpu_type),
        "signal": f"B:USR2@{WARN_S}",
        "requeue": True,
        "hold": held,
        **_requests(config, servers, servers.partition),
    }
    options = _with_cpus(options, gpus, cpus_per_gpu)
    base = first if largest is not None and first + elements - 1 > largest else 0
    return Job("servers", options, elements, first - base, base, run=str(run))


SERVICE_SERVER_MB = 512
"""Memory of the process that starts a service, monitors it and forwards its connections."""


def service_job(
    config: CampaignConfig, run: RunDir, index: int, cpus: int, memory_mb: int | None, largest: int | None = None
) -> Job:
    """Returns the job of a campaign service: an element of the engine array that runs in the pods' partition.

    Args:
        index: Index of the service in ``servers`` of ``run.json``.
        cpus, memory_mb: Resources of the service. The job requests :data:`SERVICE_SERVER_MB` more memory.
        largest: As in :func:`server_job`.
    """
    pods = config.slurm.pods
    options = {
        **_common(config, run, "server"),
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": cpus,
        "signal": f"B:USR2@{WARN_S}",
        "requeue": True,
        **_requests(config, pods, pods.partition),
    }
    memory = {"mem": None} | {name: value for name, value in config.slurm.extra.items() if name in MEMORY_OPTIONS}
    if memory_mb is not None:
        memory = {"mem": f"{memory_mb + SERVICE_SERVER_MB}M"}
    options = {name: value for name, value in options.items() if name not in MEMORY_OPTIONS} | memory  # not the pods'
    base = index if largest is not None and index > largest else 0
    return Job("servers", options, 1, index - base, base, run=str(run), section="pods")


def together_job(
    config: CampaignConfig,
    run: RunDir,
    gpus: Sequence[int],
    cpus_per_gpu: int | None = None,
    gpu_types: Sequence[str] = (),
) -> Job:
    """Returns a pod and its engine servers as one heterogeneous job, with one allocation and one MPI world.

    Args:
        gpus: Number of GPUs of each server.
        cpus_per_gpu: CPUs per GPU if the campaign does not set them. Default: Slurm's default.
        gpu_types: GPU type of each server. Default: any type for all servers.
    """
    pod = pod_job(config, run, 1)
    kept = {"partition", "nodes", "ntasks", "gres", "cpus-per-task"}
    kept |= {*config.slurm.extra, *config.slurm.servers.extra}
    engines = []
    for count, kind in zip(gpus, gpu_types or [""] * len(gpus), strict=True):
        server = server_job(config, run, 1, count, cpus_per_gpu=cpus_per_gpu, gpu_type=kind)
        engines.append({name: value for name, value in server.options.items() if name in kept})
    return replace(pod, options={**pod.options, "output": str(run.logs / "pod-%j.log")}, elements=None, engines=engines)


def trainer_job(config: CampaignConfig, run: RunDir, policy: str, cpus_per_gpu: int | None = None) -> Job:
    """Returns the trainer job of a policy. It has one task per node, which gets all of the job's resources on that
    node.

    Args:
        cpus_per_gpu: CPUs per GPU if the campaign does not set them. Default: Slurm's default.
    """
    trainer, servers = config.slurm.trainer, config.slurm.servers
    options = {
        **_common(config, run, "trainer"),
        "output": str(run.logs / "trainer-%j.log"),
        "nodes": trainer.nodes,
        "ntasks-per-node": 1,
        "gres": _gpus(trainer.gpus, trainer.gpu_type),
        "signal": f"B:USR2@{TRAINER_WARN_S}",
        "requeue": True,
        **_requests(config, trainer, trainer.partition or servers.partition),
    }
    options = _with_cpus(options, trainer.gpus, servers.extra.get("cpus-per-gpu", cpus_per_gpu))
    return Job("trainer", options, run=str(run), policy=policy)


def gather_job(config: CampaignConfig, run: RunDir, dependency: str, servers: Sequence[str] = ()) -> Job:
    """Returns the gather job, which writes trajectories.h5 and then ends the engine arrays.

    Args:
        dependency: Job dependency in sbatch's format.
        servers: Ids of the engine arrays to end.
    """
    gather, pods = config.slurm.gather, config.slurm.pods
    options = {
        **_common(config, run, "gather"),
        "output": str(run.logs / "gather-%j.log"),
        "partition": pods.partition,
        "ntasks": 1,
        "cpus-per-task": min(8, pods.ranks * (pods.cpus_per_rank or CPUS_PER_RANK)),
        "signal": f"B:USR2@{GATHER_WARN_S}",
        "requeue": True,
        "dependency": dependency,
        **config.slurm.extra,
        **gather.extra,
    }
    elsewhere = ["--wait"] if any(pool.cluster for pool in config.slurm.pods.pools) else []
    ending = ["--end-servers", *servers] if servers else []
    return Job("gather", options, arguments=[*elsewhere, *ending], run=str(run))


def by_hand(role: Role) -> str:
    """Renders a role's script for ``sbatch/``. The script does not depend on a campaign and takes the run directory as
    an argument."""
    common = {"job-name": "megaflow", "open-mode": "append", "signal": f"B:USR2@{WARN_S}", "requeue": True}
    if role == "pods":
        common["signal"] = f"B:USR2@{LEAD_S}"
        header = [
            "A pod array: each element is one MPI world whose rank 0 schedules rollouts and whose other ranks run them",
            "in Apptainer sandboxes. Elements may start late, be preempted, requeued or added while the campaign runs.",
            "",
            "  RUN=$(megaflow-hpc plan campaign.yaml)",
            '  sbatch --array=0-7 sbatch/sandbox_pods.sbatch "$RUN"',
        ]
        shape = {"nodes": 1, "ntasks-per-node": PodsConfig().ranks, "cpus-per-task": CPUS_PER_RANK}
    elif role == "trainer":
        header = [
            'The trainer of one policy ("default", unless another is named): one process per GPU on each node. Every',
            "start continues from the last commit. The job ends when the training has ended.",
            "",
            "  RUN=$(megaflow-hpc plan campaign.yaml)",
            '  sbatch --gres=gpu:4 --cpus-per-task=32 sbatch/trainer.sbatch "$RUN" default',
        ]
        shape = {"nodes": 1, "ntasks-per-node": 1}
        common["signal"] = f"B:USR2@{TRAINER_WARN_S}"
    else:
        header = [
            "An engine array: each element starts one model server, registers it under RUN/endpoints and serves until",
            "the campaign is finished.",
            "",
            "  RUN=$(megaflow-hpc plan campaign.yaml)",
            '  sbatch --array=0-3 --gres=gpu:1 sbatch/model_servers.sbatch "$RUN"',
        ]
        shape = {"nodes": 1, "ntasks": 1}
    return script(Job(role, {**common, **shape}, header=header))
