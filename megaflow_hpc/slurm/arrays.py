"""Creates, submits, records and finds the Slurm jobs of a run, within the limits of the site.

::

    RUN/ledger/jobs/<array>.json     one submission: its role, id and elements
    RUN/ledger/leaving/<pod>         marks an element that must drain and not be requeued

A campaign may consist of several arrays (because of MaxArraySize, pools or ``scale``). They share a job name and a
comment, and pods do not depend on other arrays. Each submission is recorded immediately in a separate file, so
concurrent submitters cannot overwrite each other's records. If a process is killed between submitting and recording,
its jobs are found through their comment.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.atomic import make_directory, write_json
from megaflow_hpc.host.locks import locked_if_supported
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import JobRecord, ServerGroup, read_jobs
from megaflow_hpc.slurm import script, site
from megaflow_hpc.slurm.fits import charged, seconds, timed
from megaflow_hpc.slurm.ids import array_of, cluster_of, named, number, scancel
from megaflow_hpc.slurm.limits import Allowance, Amounts, at_once, chunks, impossible, resource_caps
from megaflow_hpc.slurm.script import GATHER_WARN_S, Job, pod_job, server_job, service_job, trainer_job

if TYPE_CHECKING:
    from megaflow_hpc.slurm.submission import ArrayJob


def server_jobs(
    config: CampaignConfig, run: RunDir, groups: Sequence[ServerGroup], allowed: Allowance
) -> Iterator[Job]:
    """Yields the engine arrays. Each array covers all or part of one server group."""
    for group in groups:
        first = group.first
        largest_index = allowed.array_size - 1
        if group.service_cpus:
            yield timed(service_job(config, run, first, group.service_cpus, group.service_mb, largest_index))
            continue
        cpus = cpus_per_gpu(config, run, group)
        for size in chunks(group.count, allowed.array_size):
            job = server_job(
                config, run, size, group.gpus, first, largest_index, group.held, group.nodes, cpus, group.gpu_type
            )
            yield timed(job)
            first += size


_CPU_OPTIONS = {"cpus-per-task", "cpus-per-gpu", "exclusive", "mincpus", "cores-per-socket", "threads-per-core"}
"""sbatch options that set the number of CPUs. If a campaign uses any of them, no default applies."""


def cpus_per_gpu(config: CampaignConfig, run: RunDir, group: ServerGroup) -> int | None:
    """Returns the default number of CPUs per GPU for engine servers. ``None`` if the campaign or Slurm sets it, or if
    limits forbid the default."""
    extra = {**config.slurm.extra, **config.slurm.servers.extra}

    def job(cpus: int | None) -> Job:
        return server_job(config, run, 1, group.gpus, nodes=group.nodes, cpus_per_gpu=cpus)

    return _default_cpus_per_gpu(group.gpus, extra, job)


def trainer_jobs(config: CampaignConfig, run: RunDir, policies: Collection[str] | None = None) -> Iterator[Job]:
    """Yields one trainer job for each trained policy, or only for those in ``policies`` if given."""
    if config.training is None:
        return
    trainer = config.slurm.trainer
    extra = {**config.slurm.extra, **trainer.extra}
    cpus = _default_cpus_per_gpu(trainer.gpus, extra, lambda cpus: trainer_job(config, run, "any", cpus))
    for policy in config.training.policies:
        if policies is None or policy in policies:
            yield timed(trainer_job(config, run, policy, cpus))


def _default_cpus_per_gpu(gpus: int, extra: Collection[str], job: Callable[[int | None], Job]) -> int | None:
    """Returns the default number of CPUs per GPU. ``None`` if the campaign or Slurm sets it, or if limits forbid the
    default."""
    if not gpus or _CPU_OPTIONS.intersection(extra) or not site.has_slurm():
        return None
    cpus = None
    with contextlib.suppress(SiteError):
        cpus = site.engine_cpus(job(None).options.get("partition"))
    if cpus is None:
        return None
    wanted = job(cpus).options
    refused = impossible(resource_caps(wanted), charged(wanted))
    return None if refused else cpus


GATHER_S = 3600.0
"""Default minimum walltime of the gather job, in seconds. A configured walltime or the site's limits override it."""
GATHER_BYTES_PER_S = 10e6
"""Assumed rate at which journals are gathered, in bytes per second. Two cores gather 45 MB/s, but shared file systems
may be slower."""
JOURNAL_BYTES = 5e5
"""Assumed journal size of one rollout, in bytes: 30,000 tokens with their messages."""


def gather_job(
    config: CampaignConfig, run: RunDir, dependency: str, servers: Sequence[str] = (), journal_bytes: float = 0.0
) -> Job:
    """Returns the gather job with its walltime and signal time filled in.

    Args:
        journal_bytes: Expected total size of all journals, in bytes. If no walltime is configured, it is derived from
            this size. It is at least an hour, unless the site allows less.
    """
    wanted_s = max(GATHER_S, journal_bytes / GATHER_BYTES_PER_S)
    job = timed(script.gather_job(config, run, dependency, servers), wanted_s)
    walltime_s = seconds(job.options.get("time")) or math.inf
    if job.options["signal"] == f"B:USR2@{GATHER_WARN_S}" and walltime_s < 4 * GATHER_WARN_S:
        return replace(job, options={**job.options, "signal": f"B:USR2@{int(walltime_s / 4)}"})
    return job


def pod_jobs(
    config: CampaignConfig,
    run: RunDir,
    allowed: Allowance,
    count: int | None = None,
    dependency: str | None = None,
    engines: int = 0,
    server_amounts: Sequence[Amounts] = (),
) -> Iterator[Job]:
    """Yields the pod arrays of all pools on this cluster.

    If limits allow only a few concurrent jobs, the arrays are throttled. Otherwise a pod could take the job slot of an
    engine that is being requeued.

    Args:
        allowed: Limits of this user's jobs.
        count: Total number of elements. Default: the number in the campaign file.
        dependency: Job dependency in sbatch's format.
        engines: Number of engine servers that must be able to run next to the pods.
        server_amounts: Resources requested by each of these servers.
    """
    pods = config.slurm.pods
    left = pods.here if count is None else count
    here = [(pool, pool.count) for pool in pods.pools if not pool.cluster]
    for pool, size in [(None, pods.count + max(0, left - pods.here)), *here]:
        sizes = chunks(min(size, left), allowed.array_size)
        left -= sum(sizes)
        most = [] if allowed.running is None else [allowed.running - engines]
        if fit := at_once(allowed.caps, charged(pod_job(config, run, 1, pool=pool).options), server_amounts):
            most.append(fit[0])
        throttle = max(1, min(most)) if most else None
        for elements in sizes:
            share = None if throttle is None or throttle >= pods.here else max(1, throttle // len(sizes))
            yield timed(pod_job(config, run, elements, dependency, pool, share))


def pod_jobs_elsewhere(config: CampaignConfig, run: RunDir) -> Iterator[Job]:
    """Yields the pod arrays of pools on other clusters, which enforce their own limits."""
    for pool in config.slurm.pods.pools:
        if pool.cluster:
            for elements in chunks(pool.count, site.max_array_size(pool.cluster)):
                yield pod_job(config, run, elements, pool=pool)


class Arrays:
    """The Slurm job submissions of one run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.handles: list[ArrayJob] = []
        """submitit handles of the jobs that this process submitted."""

    def queue(self, job: Job) -> list[str]:
        """Submits one array and returns the ids of its elements.

        Raises:
            SiteError: sbatch rejected the job.
        """
        from megaflow_hpc.slurm.submission import submit

        handles = submit(self.run, job)
        self.handles += handles
        self._record(array_of(handles[0].job_id), job.role, job.elements, job.base, job.policy)
        return [handle.job_id for handle in handles]

    def _record(self, array: str, role: str, elements: int | None, base: int = 0, policy: str = "") -> None:
        make_directory(self.run.jobs)
        record = JobRecord(role, array, elements, base, policy, time.time())
        write_json(self.run.jobs / f"{array}.json", msgspec.to_builtins(record))

    def records(self) -> list[JobRecord]:
        """Returns all recorded submissions, sorted by id."""
        return sorted(read_jobs(self.run).values(), key=lambda record: int(number(record.id)))

    def ids(self, role: str | None = None) -> list[str]:
        """Returns the ids of all submissions, or of those with the given role."""
        return [record.id for record in self.records() if role in (None, record.role)]

    def adopt(self, name: str, clusters: Sequence[str] = ("",)) -> None:
        """Finds jobs of this run whose submitting process was killed before it could record them, and records them.

        Args:
            name: Slurm job name of the campaign.
            clusters: Clusters to search. The empty string is this cluster.

        Raises:
            SiteError: A controller does not respond.
        """
        ids = set(self.ids())
        for cluster in clusters:
            output = site.ask("squeue", *site.here_or_on(cluster), "-h", "--me", f"--name={name}", "-o", "%i|%k")
            for line in output.splitlines():
                element, _, comment = line.partition("|")  # 12_[0-3], 12_4, or 12+1 for a heterogeneous job
                array = named(element.partition("_")[0].partition("+")[0], cluster)
                if comment != self.run.path.name or array in ids:
                    continue
                role = _role(self.run, array)
                if role:
                    ids.add(array)
                    self._record(array, role, None)

    def leave(self, pods: Sequence[str]) -> None:
        """Asks running elements to drain, and prevents them from being requeued.

        All elements are signalled with a single command, because scancel fetches the whole job table to send a signal.

        Args:
            pods: Ids of the elements.
        """
        for pod in pods:
            Marks(self.run).leave(pod)
        if pods:
            scancel(pods, "--batch", "--signal=USR2")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Holds the run's job lock, so that only one process changes the number of jobs. Holds no lock if the file
        system does not support locks."""
        with locked_if_supported(self.run.ledger / "jobs.lock"):
            yield


def _role(run: RunDir, array: str) -> str:
    """Derives a job's role from its log path. Empty if the job belongs to another run whose directory has the same
    name."""
    log = site.ask("scontrol", *site.here_or_on(cluster_of(array)), "-o", "show", "job", number(array))
    for role, prefix in (("servers", "server-"), ("trainer", "trainer-"), ("gather", "gather-")):
        if f"StdOut={run.logs}/{prefix}" in log:
            return role
    logs = {os.path.realpath(os.path.dirname(path)) for path in re.findall(r"\bStdOut=(.*?)(?= \w+=|\n|$)", log)}
    if any(os.path.isdir(path) for path in logs - {os.path.realpath(run.logs)}):  # false after this run was moved
        return ""
    return "pods"
