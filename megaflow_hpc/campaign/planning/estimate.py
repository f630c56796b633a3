"""Estimates a campaign's jobs, hours, duration and disk space before anything is queued.

Slots run rollouts in waves, so the duration is the number of waves times the mean rollout duration, or the longest
rollout if that is longer. Durations come from the user (``--rollout-seconds``), from an earlier run (``--like``), or
from the timeouts, which are upper bounds. The estimate assumes that engines keep up and that jobs start immediately,
because only Slurm knows its queue.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.campaign.planning.draft import Draft, whole_groups
from megaflow_hpc.campaign.planning.preflight import longest_s
from megaflow_hpc.config.quotas import gateways
from megaflow_hpc.config.slurm import CPUS_PER_RANK
from megaflow_hpc.environments.images.disk_quota import disk_quota
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.ledger.blocks import count_blocks
from megaflow_hpc.slurm import fits, limits
from megaflow_hpc.slurm.script import Job

ROLLOUT_BYTES = 1e6
"""Assumed bytes per rollout in journals and trajectories.h5 together, if no earlier run provides a better value."""
FILES, FILES_OF_POD = 40, 15
"""Approximate number of files in a run directory, and number of files that each pod adds."""


@dataclass(frozen=True)
class JobEstimate:
    """Estimated resources of a job array or a single job."""

    role: str
    elements: int
    at_once: int
    """Maximum number of elements that run concurrently under the array's throttle."""
    nodes: int
    """Number of nodes for each element. ``cores`` and ``gpus`` are also for each element."""
    cores: int
    gpus: int
    walltime_s: float | None
    """Walltime in seconds. ``None`` if unknown or unlimited."""
    held: bool = False
    """True if the job starts only on demand."""


@dataclass(frozen=True)
class Hours:
    """An amount of core-hours or GPU-hours."""

    expected: float
    """Hours used if all jobs that start with the campaign run for its estimated duration."""
    by_walltime: float | None
    """Hours used if every job runs until its walltime, and starts again until the estimated duration has passed.

    Never less than ``expected``. ``None`` if a walltime is unknown.
    """


@dataclass(frozen=True)
class Storage:
    """Required and available space on a file system."""

    what: str
    path: str
    bytes: float
    inodes: int
    free_bytes: float
    free_inodes: float | None
    by: str
    """Source of the available space: the file system or a quota."""

    @property
    def fits(self) -> bool:
        """True if the available space is large enough."""
        return self.bytes <= self.free_bytes and (self.free_inodes is None or self.inodes <= self.free_inodes)


@dataclass(frozen=True)
class Estimate:
    """Estimated jobs, hours, duration and disk space of a campaign."""

    rollouts: int
    tasks: int
    blocks: int
    """Number of blocks. 0 if a trainer requests the rollouts."""
    pods: int
    """Maximum number of concurrent pods."""
    slots: int
    """Maximum number of concurrent rollouts."""
    rollout_s: float
    """Mean rollout duration in seconds."""
    basis: str
    """Source of the rollout durations."""
    time_s: float
    nodes: int
    """Maximum number of nodes in use at the same time."""
    core_hours: Hours
    gpu_hours: Hours
    requeues: int
    """Maximum number of requeues of an element. Each requeue adds another walltime."""
    jobs: list[JobEstimate] = field(default_factory=list)
    site: list[str] = field(default_factory=list)
    """Effects of the site's limits on the campaign, one per line."""
    storage: list[Storage] = field(default_factory=list)
    images: dict[str, int] = field(default_factory=dict)
    """Number of images, and number of images missing from the store."""


@dataclass(frozen=True)
class DurationEstimates:
    """Assumed durations of rollouts, in seconds."""

    mean_s: float
    longest_s: float
    basis: str


def durations_of(draft: Draft, rollout_seconds: float | None = None, like: Path | None = None) -> DurationEstimates:
    """Returns the rollout durations on which to base the estimate.

    Raises:
        ConfigError: ``like`` is not a gathered run, or none of its rollouts ran.
    """
    from megaflow_hpc.trajectories.reading.durations import Durations as Earlier

    if rollout_seconds is not None:
        return DurationEstimates(
            rollout_seconds, rollout_seconds, f"every rollout takes {rollout_seconds:g} s, as given"
        )
    if like is not None:
        basis = f"as rollouts took in {like}"
        try:
            earlier = Earlier(like)
        except ConfigError as error:
            raise ConfigError(f"--like {error}") from None
        each = [earlier.expected_s(first) for first in draft.rollouts.firsts()]
    else:
        basis = (
            "every rollout takes as long as the time-outs of agent and tests allow; --like RUN or "
            "--rollout-seconds N give a better estimate"
        )
        limits = {
            (task.id, name): longest_s(task, [policy])
            for task in draft.tasks
            for name, policy in draft.policies.items()
        }
        each = [limits[first.task_id, first.policy] for first in draft.rollouts.firsts()]
    if not each:
        return DurationEstimates(0.0, 0.0, basis)
    total_s = sum(seconds * len(places) for seconds, places in zip(each, draft.rollouts.spans(), strict=True))
    return DurationEstimates(total_s / len(draft.rollouts), max(each), basis)


def estimate(
    draft: Draft,
    run: Path,
    jobs: Sequence[Job],
    durations: DurationEstimates,
    site: Sequence[str] = (),
    local_ranks: int = 0,
    like: Path | None = None,
) -> Estimate:
    """Estimates the cost of a draft.

    Args:
        run: Path of the future run directory.
        jobs: Jobs that would be queued.
        durations: Result of :func:`durations_of`.
        site: Descriptions of how the site's limits affect the campaign.
        local_ranks: MPI ranks of a pod on this machine, if nothing is queued.
        like: Earlier run from which to take the size per rollout.
    """
    config = draft.config
    notes = list(site)
    rollouts = len(draft.rollouts)
    blocks = count_blocks(draft.rollouts, config.slurm.pods.total, whole=whole_groups(config)) if rollouts else 0
    if config.training and rollouts:
        training = config.training
        samples = sum(draft.policies[name].samples for name in config.requested)
        rollouts = training.batch * training.steps * samples
        blocks = 0
        notes.append(
            f"training requests {rollouts} rollouts in {training.steps} steps; the time of the trainer is not counted"
        )
    listed = [part for job in jobs for part in _components(job)]
    if local_ranks:
        gpus = sum(server.model["gpus"] * server.model["nodes"] for server in draft.servers)
        listed = [JobEstimate("local", 1, 1, 1, len(os.sched_getaffinity(0)), gpus, None)]
    pods = sum(job.at_once for job in listed if job.role == "pods") or 1
    slots = _slots(draft, pods, local_ranks)
    busy_slots = slots if not blocks else max(1, slots * min(pods, blocks) // pods)
    time_s = max(math.ceil(rollouts / busy_slots) * durations.mean_s, durations.longest_s) if rollouts else 0.0
    missing, stored = _images(draft)
    pod_starts = sum(job.elements for job in listed if job.role == "pods")
    return Estimate(
        rollouts=rollouts,
        tasks=len(draft.tasks),
        blocks=blocks,
        pods=pods,
        slots=slots,
        rollout_s=durations.mean_s,
        basis=durations.basis,
        time_s=time_s,
        nodes=sum(job.nodes * job.at_once for job in listed if job.role != "gather"),
        core_hours=_hours([(job, job.cores) for job in listed], time_s),
        gpu_hours=_hours([(job, job.gpus) for job in listed], time_s),
        requeues=0 if local_ranks else config.slurm.requeues,
        jobs=listed,
        site=[*notes, *_passed_limits(draft, listed, time_s)],
        storage=_storage(draft, run, like, pod_starts, rollouts),
        images={"images": missing + stored, "to_make": missing},
    )


def _slots(draft: Draft, pods: int, local_ranks: int) -> int:
    """Returns the number of concurrent rollouts while ``pods`` of the campaign's pods are running."""
    section = draft.config.slurm.pods
    slots_per_rank = section.slots_per_rank or section.cpus_per_rank or CPUS_PER_RANK
    if local_ranks:
        return max(1, round(max(1, local_ranks - 1) * slots_per_rank))
    running_share = pods / max(1, section.total)
    return max(1, round(gateways(section) * slots_per_rank * running_share))


def _components(job: Job) -> list[JobEstimate]:
    """Returns the components of a job: the pod and the engines of a heterogeneous job, otherwise the job itself."""
    parts = []
    components = [(str(job.role), job.options)]
    components += [("servers", {**job.options, **engine}) for engine in job.engines]
    for role, options in components:
        asks = limits.asked(options) if job.cluster else fits.charged(options)
        elements = job.elements or 1
        try:
            walltime_s = fits.walltime_s(options) if not job.cluster else fits.seconds(options.get("time"))
        except SiteError:
            walltime_s = None
        walltime_s = None if walltime_s is None or math.isinf(walltime_s) else walltime_s
        at_once = min(elements, job.throttle or elements)
        held = bool(options.get("hold"))
        gpus = asks.get("gres/gpu", 0)
        parts.append(JobEstimate(role, elements, at_once, asks["node"], asks["cpu"], gpus, walltime_s, held))
    return parts


def _hours(amounts: Sequence[tuple[JobEstimate, int]], time_s: float) -> Hours:
    """Returns the core-hours or GPU-hours, given each job's number of cores or GPUs.

    Expected hours exclude jobs that start on demand, and the gather job, which takes only minutes.
    """
    expected = by_walltime = 0.0
    bounded = True
    for job, amount in amounts:
        if amount and not job.held and job.role != "gather":
            expected += amount * job.at_once * time_s / 3600
        if amount and job.walltime_s is None:
            bounded = False
        elif amount and job.walltime_s is not None:
            runs = not job.held and job.role != "gather"
            starts = math.ceil(job.at_once * time_s / (job.elements * job.walltime_s)) if runs else 1
            by_walltime += amount * job.elements * job.walltime_s * max(1, starts) / 3600
    return Hours(expected, by_walltime if bounded else None)


def _passed_limits(draft: Draft, jobs: Sequence[JobEstimate], time_s: float) -> list[str]:
    """Returns a warning for each campaign limit or walltime that is reached before the campaign ends."""
    limits, effects = draft.config.limits, []
    for name, hours in (
        ("core_hours", sum(j.cores * j.at_once for j in jobs if j.role == "pods") * time_s / 3600),
        ("gpu_hours", sum(j.gpus * j.at_once for j in jobs if j.role == "servers" and not j.held) * time_s / 3600),
        ("wall", time_s / 3600),
    ):
        limit = getattr(limits, name)
        if limit is not None and hours > limit:
            effects.append(f"limits.{name}: {limit:g} ends the campaign before the expected {hours:.1f}; raise it")
    effects += spending(draft)
    for job in jobs:
        if job.role in ("pods", "servers") and job.walltime_s and time_s > job.walltime_s:
            starts = math.ceil(time_s / job.walltime_s)
            effects.append(
                f"slurm.{job.role}.time: takes {starts} consecutive walltimes; elements are requeued as long as they "
                "store rollouts (slurm.requeues)"
            )
    return list(dict.fromkeys(effects))


def spending(draft: Draft) -> list[str]:
    """Describes the budget per rollout that follows from ``limits.usd``. Returns an empty list if the limit is not
    set."""
    usd, rollouts = draft.config.limits.usd, len(draft.rollouts)
    if usd is None or not rollouts:
        return []
    return [
        f"limits.usd: {usd:g} is {usd / rollouts:.2g} US dollars for each of {rollouts} rollouts; once it is spent, "
        "pods start no more rollouts, and resume --limit usd=USD continues"
    ]


def _images(draft: Draft) -> tuple[int, int]:
    """Returns the number of images missing from the store, and the number of images in it."""
    from megaflow_hpc.environments.images.resolve import is_built

    if draft.images is None or draft.mapping is None:
        return 0, 0
    files = draft.images.resolve_all(draft.requests, draft.mapping, build=False, failures={})
    lacking = sum(not is_built(Path(path)) for path in files.values())
    return lacking, len(files) - lacking


def _storage(draft: Draft, run: Path, like: Path | None, pods: int, rollouts: int) -> list[Storage]:
    each = _bytes_of_rollout(like) or ROLLOUT_BYTES
    inodes = FILES + FILES_OF_POD * max(1, pods) + rollouts // 64
    wanted: list[tuple[str, Path, float, int]] = [("run directory", run, each * rollouts, inodes)]
    if draft.images is not None:
        wanted.append(("image store", draft.images.store.root, 0.0, 0))
    storage = []
    for what, path, size, count in wanted:
        try:
            there = disk_quota(path)
        except OSError:
            continue
        free_inodes = None if math.isinf(there.free_inodes) else there.free_inodes
        storage.append(Storage(what, str(path), size, count, there.free_bytes, free_inodes, there.bytes_by))
    return storage


def _bytes_of_rollout(like: Path | None) -> float | None:
    """Returns the bytes per rollout in the journals and results of an earlier run."""
    if like is None or not like.is_dir():
        return None
    from megaflow_hpc.trajectories.reading.durations import durations

    files = [like / "trajectories.h5", *(like / "journal").glob("*.journal"), *(like / "journal").glob("*.pack")]
    count = len(durations(like))
    return sum(path.stat().st_size for path in files if path.is_file()) / count if count else None
