"""Builds the jobs that a campaign submits to Slurm, and checks that the site's limits allow them to start."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.slurm import CPUS_PER_RANK, LIFTED
from megaflow_hpc.errors import ConfigError, Mistakes, SiteError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import ServerGroup
from megaflow_hpc.slurm import limits, script, site
from megaflow_hpc.slurm.arrays import (
    JOURNAL_BYTES,
    cpus_per_gpu,
    gather_job,
    pod_jobs,
    pod_jobs_elsewhere,
    server_jobs,
    trainer_jobs,
)
from megaflow_hpc.slurm.fits import (
    charged,
    doubts,
    not_requeued,
    ranks_that_fill,
    refusals,
    takes_whole_nodes,
    timed,
    walltime_s,
)


def preview(config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup], rollouts: int = 0) -> list[script.Job]:
    """Returns the jobs that :meth:`Jobs.start` would submit to an idle cluster. The gather job comes last.

    Args:
        rollouts: Number of planned rollouts, which determines the gather job's walltime.
    """
    expected = rollouts * JOURNAL_BYTES
    allowed = limits.allowance(pod_options(config))
    engines = sum(group.count for group in groups) + len(config.training.policies if config.training else ())
    if config.slurm.together:
        trainers = list(trainer_jobs(config, run))
        return [
            *trainers,
            together(config, run, groups),
            gather_job(config, run, "afterany:ID_OF_THE_POD", (), expected),
        ]
    if config.is_pool:
        return list(server_jobs(config, run, groups, allowed))
    pods = pod_jobs(config, run, allowed, engines=engines, server_amounts=beside(config, run, groups, allowed))
    trainers = list(trainer_jobs(config, run))
    dependency = "afterany:ID_OF_THE_POD_ARRAY" + ":ID_OF_THE_TRAINER" * len(trainers)
    gather = gather_job(config, run, dependency, (), expected)
    return [*server_jobs(config, run, groups, allowed), *trainers, *pods, *pod_jobs_elsewhere(config, run), gather]


SCRIPTS = {"servers": "model_servers", "trainer": "trainer", "pods": "sandbox_pods"}
"""Name in ``RUN/sbatch`` of the script for each role."""


def by_hand(config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup]) -> list[str]:
    """Returns commands for the user to submit a planned run by hand and gather its results.

    Writes a script for a heterogeneous job, because the packaged scripts support only arrays.
    """
    lines = []
    for job in preview(config, run, groups):
        if job.engines:
            path = run.sbatch / "together.sbatch"
            write_atomic(path, script.script(job))
            lines.append(f"sbatch {shlex.quote(str(path))}")
        elif job.role in SCRIPTS:
            lines.append(script.command(job, shlex.quote(str(run.sbatch / f"{SCRIPTS[job.role]}.sbatch"))))
    return lines if config.is_pool else [*lines, f"megaflow-hpc gather {shlex.quote(str(run))} --wait  # when they ran"]


def beside(
    config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup], allowed: limits.Allowance
) -> list[limits.Amounts]:
    """Returns the resources of each engine server and trainer that count towards the same limits as the pods."""
    amounts = []
    others = [*server_jobs(config, run, groups, allowed), *trainer_jobs(config, run)] if allowed.caps else []
    for job in others:
        both = set(allowed.caps) & set(limits.resource_caps(job.options))
        amounts += [limits.shared(charged(job.options), both)] * (job.elements or 1)
    return amounts


def each_job(config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup]) -> Iterator[tuple[str, script.Job]]:
    """Yields one job of each kind on this cluster, preceded by its section of the campaign file."""
    pods = config.slurm.pods
    jobs = [] if config.is_pool else [("slurm.pods", script.pod_job(config, run, 1))]
    jobs += [(f"slurm.pods.pools.{n}", script.pod_job(config, run, 1, pool=p)) for n, p in enumerate(pods.pools)]
    jobs += [("slurm.servers", job) for job in server_jobs(config, run, groups, limits.Allowance())]
    jobs += [("slurm.trainer", job) for job in trainer_jobs(config, run)]
    jobs += [] if config.is_pool else [("slurm.gather", gather_job(config, run, ""))]
    yield from ((key, job) for key, job in jobs if not job.cluster)  # limits of other clusters cannot be queried here


def with_ranks(config: CampaignConfig, where: Any) -> CampaignConfig:
    """Replaces ``ranks_per_node: fill`` with the number of ranks that use all CPUs of a node.

    Raises:
        ConfigError: The size of a node is unknown.
        SiteError: The controller does not respond.
    """
    pods = config.slurm.pods
    if pods.ranks_per_node != "fill":
        return config
    key = "slurm.pods.ranks_per_node"
    try:
        jobs = [script.pod_job(config, RunDir("/RUN"), 1, pool=pool) for pool in (None, *pods.pools)]
        ranks = ranks_that_fill(jobs, pods.cpus_per_rank or CPUS_PER_RANK)
    except ConfigError as error:
        raise ConfigError(f"{where(key)}: slurm.pods.{error}") from None
    return config.with_ranks(ranks)


def check(config: CampaignConfig, groups: Sequence[ServerGroup], where: Any) -> list[str]:
    """Checks that the site has the requested resources and would start the jobs. Returns warnings.

    With ``slurm.check: false``, all problems become warnings.

    Args:
        where: Returns ``file:line`` of a dotted key.

    Raises:
        ConfigError: A partition is missing or lacks requested resources, or a walltime is shorter than the time
            reserved for draining. Each message names key and limit.
        SiteError: A job would never start. The message names the limit.
    """
    jobs = list(each_job(config, RunDir("/RUN"), groups))
    short = [f"{where(f'{key}.time')}: {line}" for key, job in jobs for line in _too_short(config, key, job)]
    if short:
        raise Mistakes(short)
    findings = []
    for run_check in (lambda: site.check_site(config, where), lambda: check_resources(config, groups, where)):
        try:
            run_check()
        except (ConfigError, SiteError) as error:
            if config.slurm.check:
                raise
            lines = error.found if isinstance(error, Mistakes) else [str(error)]
            findings += [line + LIFTED for line in lines]
    findings += [_with_location(line, where) for key, job in jobs for line in doubts(key, job.options)]
    return findings + _idle_resources(config, groups, where)


def check_resources(config: CampaignConfig, groups: Sequence[ServerGroup], where: Any) -> None:
    """Checks that partitions and limits allow each kind of job to start.

    Raises:
        Mistakes: A partition lacks requested resources. Each message names key and limit.
        SiteError: A job would never start. The message names the limit.
    """
    caps: dict[tuple[str, ...], tuple[limits.Cap, ...]] = {}
    jobs = [(key, job.role, job.options) for key, job in each_job(config, RunDir("/RUN"), groups)]
    refused = [_with_location(line, where) for key, _, options in jobs for line in refusals(key, options)]
    refused += _gpu_contradictions(config, groups, where)
    if refused:
        raise Mistakes(refused)
    for key, role, options in jobs:
        names = tuple(str(options.get(name)) for name in ("account", "qos", "partition"))
        caps[names] = caps[names] if names in caps else limits.resource_caps(options)
        # The QOS of the default partition is irrelevant if the site chooses another partition.
        of_default = () if options.get("partition") else {f"QOS {name}" for name in site.partition_qos("")}
        firm = [cap for cap in caps[names] if cap.of not in of_default]
        wanted = charged(options)
        if cap := limits.impossible(firm, wanted):
            what = {"servers": "engine server", "trainer": "trainer", "gather": "gather job"}.get(role, "pod")
            raise SiteError(
                f"{where(key)}: one {what} asks for {cap.resource}={wanted[cap.resource]}, and {cap}: it would never "
                "start; ask for less, or name another account or QOS"
            )


def _gpu_contradictions(config: CampaignConfig, groups: Sequence[ServerGroup], where: Any) -> list[str]:
    """Describes sbatch options that request a different number of GPUs than the campaign or each other."""
    run, slurm = RunDir("/RUN"), config.slurm
    jobs = [
        ("servers", "gpus of the model", group.gpus, script.server_job(config, run, 1, group.gpus, nodes=group.nodes))
        for group in groups
    ]
    jobs += [("trainer", "slurm.trainer.gpus", slurm.trainer.gpus, job) for job in trainer_jobs(config, run)]
    jobs += [] if config.is_pool else [("pods", "", 0, script.pod_job(config, run, 1))]
    lines = {}
    for role, wanted_by, wanted, job in jobs:
        gpus_by_option = limits.gpu_requests(job.options)
        own: dict[str, Any] = getattr(slurm, role).extra
        others = {
            name: count for name, count in gpus_by_option.items() if not (wanted_by and wanted and count == wanted)
        }
        if wanted_by and wanted and others:
            gpus_by_option = {wanted_by: wanted, **others}
        elif len(set(gpus_by_option.values())) < 2:
            continue
        first = next((name for name in gpus_by_option if name in own), "")
        key = f"slurm.{role}" if first else "slurm"
        asked = " and ".join(f"{name} ({count:g})" for name, count in gpus_by_option.items())
        lines[role] = f"{where(key)}: {key}: {asked} request different numbers of GPUs per node; keep one of them"
    return list(lines.values())


def _too_short(config: CampaignConfig, key: str, job: script.Job) -> Iterator[str]:
    leads = {"pods": config.slurm.lead_s, "servers": script.WARN_S, "trainer": script.TRAINER_WARN_S}
    time_s, lead = walltime_s(job.options), leads.get(job.role, 0)
    if time_s is not None and time_s <= lead:
        what = "its signal before the end" if job.role == "pods" else "the time reserved for its end"
        yield f"{key}.time: {time_s:.0f} s, and {what} is {lead} s: the job would end as it starts; request more time"


def drain_window_s(config: CampaignConfig) -> int:
    """Returns the seconds over which pods spread their drains. Returns 0 if Slurm does not respond.

    See :func:`~megaflow_hpc.slurm.limits.requeue_window_s`.
    """
    pods = config.slurm.pods
    jobs = [script.pod_job(config, RunDir("/RUN"), 1, pool=pool) for pool in (None, *pods.pools)]
    try:
        times = [walltime_s(job.options) for job in jobs if not job.cluster]
        walltimes_s = [time_s for time_s in times if time_s]
        return limits.requeue_window_s(pods.total, min(walltimes_s, default=None))
    except SiteError:
        return 0


def requeue_warnings(config: CampaignConfig, groups: Sequence[ServerGroup], where: Any) -> list[str]:
    """Returns a warning for each kind of job that Slurm does not requeue.

    Raises:
        SiteError: The controller does not respond.
    """
    lines = {}
    for key, job in each_job(config, RunDir("/RUN"), groups):
        why = not_requeued(job.options) if job.role != "gather" else ""
        if why:
            lines[job.role] = (
                f"{where(key)}: {key}: {why}: a job that reaches its walltime or loses its node is not restarted; to "
                "continue then: megaflow-hpc resume RUN"
            )
    return list(lines.values())


def _with_location(line: str, where: Any) -> str:
    """Prefixes a message with ``file:line`` of the key with which it starts."""
    return f"{where(line.split()[0].rstrip(':'))}: {line}"


def _idle_resources(config: CampaignConfig, groups: Sequence[ServerGroup], where: Any) -> list[str]:
    """Warns about jobs that leave CPUs or GPUs of their nodes idle and unavailable to other jobs."""
    lines = []
    remedies = {
        "pods": ("a pod", "cpu", "CPUs", "write slurm.pods.ranks_per_node: fill"),
        "servers": ("a server", "gres/gpu", "GPUs", "raise the model's gpus"),
        "trainer": ("a trainer", "gres/gpu", "GPUs", "raise slurm.trainer.gpus"),
    }
    for key, job in each_job(config, RunDir("/RUN"), groups):
        if job.role not in remedies:
            continue
        who, resource, unit, remedy = remedies[job.role]
        options = job.options
        used, paid = limits.asked(options).get(resource, 0), charged(options).get(resource, 0)
        names = str(options.get("partition") or "the default partition")
        if used < paid and takes_whole_nodes(options):
            lines.append(
                f"{where(f'{key}.partition')}: {key}: {who} uses {used} of the {paid} {unit} charged for it, "
                f"because {names} allocates whole nodes; {remedy}"
            )
        elif job.role == "pods" and set(names.split(",")) & site.one_user_nodes():
            lines.append(
                f"{where(f'{key}.partition')}: {key}: a node of {names} runs jobs of one user at a time; if your "
                f"pods do not fill it, its other CPUs stay idle; {remedy}"
            )
    return list(dict.fromkeys(lines))


def limit_effects(config: CampaignConfig, jobs: Sequence[script.Job]) -> list[str]:
    """Describes how the site's limits affect the jobs of :func:`preview`.

    Raises:
        SiteError: The controller does not respond.
    """
    allowed, pods, effects = limits.allowance(pod_options(config)), config.slurm.pods, list[str]()
    arrays = [job for job in jobs if job.role == "pods" and not job.cluster and job.elements]
    if len(arrays) > 1 + sum(not pool.cluster for pool in pods.pools):
        effects.append(f"MaxArraySize: pods are {len(arrays)} arrays of at most {allowed.array_size} elements")
    for job in arrays:
        if job.throttle is not None and job.throttle < (job.elements or 1):
            running = f"at most {allowed.running} jobs" if allowed.running is not None else ""
            why = ", ".join(filter(None, [running, *map(str, allowed.caps)]))
            effects.append(f"{job.throttle} of {job.elements} pods run at the same time as the engines ({why})")
    few_requests = limits.request_rate()[1] < limits.REFILL_PER_S
    window_s = drain_window_s(config) if few_requests else 0
    if window_s:
        effects.append(
            f"rl_enable: pods drain one after another, up to {window_s} s before their walltime ends, because Slurm "
            f"takes {limits.request_rate()[1]:g} requests a second from one user"
        )
    wanted = sum(job.elements or 1 for job in jobs if not job.cluster)
    others = wanted - sum(job.elements or 1 for job in arrays)
    if allowed.room is not None and wanted > allowed.room:
        fitting = allowed.room - others
        now = f"{fitting} of {wanted - others} pods are queued at first, and the rest when others end"
        none = "submit would be refused: no pod fits"
        effects.append(f"{now if fitting > 0 else none} ({allowed.why} jobs at once, {allowed.queued} are queued)")
    return effects


def together(config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup]) -> script.Job:
    per_gpu = [cpus for cpus in (cpus_per_gpu(config, run, group) for group in groups) if cpus]
    cpus = min(per_gpu, default=None)
    servers = [group for group in groups for _ in range(group.count)]
    gpus, types = [server.gpus for server in servers], [server.gpu_type for server in servers]
    return timed(script.together_job(config, run, gpus, cpus, types))


def pod_options(config: CampaignConfig) -> dict[str, Any]:
    """Returns the sbatch options that determine which limits apply to pods."""
    slurm = config.slurm
    own = {} if slurm.pods.partition is None else {"partition": slurm.pods.partition}
    return {**slurm.extra, **own, **slurm.pods.extra}
