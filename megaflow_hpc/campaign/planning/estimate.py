"""What a campaign would take, before anything is queued: jobs, hours of cores and GPUs, time, and room on disk.

Time comes from the simulation of the whole campaign (:mod:`megaflow_hpc.pod.scheduling.simulation`), which needs to
know how long rollouts take. That is told (``--rollout-seconds``), read from an earlier run (``--like``, or the
campaign's ``scheduling.learn_from``), or taken for what time-outs allow, which is the most. Engines are held to keep
up, and jobs to start at once: the queue is Slurm's to tell.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.campaign.planning.draft import Draft
from megaflow_hpc.campaign.planning.foresight import longest_s
from megaflow_hpc.config.quotas import gateways, slots_of_rank
from megaflow_hpc.config.slurm import CPUS_PER_RANK
from megaflow_hpc.environments.images.disk_quota import disk_quota
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.pod.scheduling.simulation import Shape, simulate
from megaflow_hpc.slurm import fits, resources
from megaflow_hpc.slurm.script import Job, option_name

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.reading.durations import Durations

MOST_SIMULATED = 200_000
"""Rollouts up to which a campaign is simulated, in some seconds; beyond, work is divided by slots."""
ROLLOUT_BYTES = 1e6
"""Taken for a rollout's part of journal, shard and trajectories.h5 where no earlier run tells."""
FILES, FILES_OF_POD = 40, 15
"""Files of a run directory, and of each start of a pod in it, about."""


@dataclass(frozen=True)
class JobEstimate:
    """One array, or a job that is none."""

    role: str
    elements: int
    at_once: int
    """Elements that may run at once, by what throttles them."""
    nodes: int
    """Of one element, as are cores and GPUs."""
    cores: int
    gpus: int
    walltime_s: float | None
    """``None`` where nobody knows, or there is no end."""
    held: bool = False
    """Whether it starts only on demand."""


@dataclass(frozen=True)
class Hours:
    """Of cores or GPUs."""

    expected: float
    """As long as the campaign is expected to take, of what runs from the start."""
    by_walltime: float | None
    """Every job to the end of its walltime, once; ``None`` where one has no known end."""


@dataclass(frozen=True)
class Storage:
    """What goes to one place, and what is free there."""

    what: str
    path: str
    bytes: float
    inodes: int
    free_bytes: float
    free_inodes: float | None
    by: str
    """What bounds it: the file system, or a quota."""

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.bytes <= self.free_bytes and (self.free_inodes is None or self.inodes <= self.free_inodes)


@dataclass(frozen=True)
class Estimate:
    """What a campaign would take."""

    rollouts: int
    tasks: int
    slots: int
    """Rollouts at once."""
    rollout_s: float
    """Mean duration of a rollout."""
    basis: str
    """Where the durations come from."""
    time_s: float
    ideal_s: float
    """The shortest that any order could reach."""
    nodes: int
    """At once, where the site lets all jobs run that the campaign queues."""
    core_hours: Hours
    gpu_hours: Hours
    requeues: int
    """How often an element may be requeued, and take its walltime again."""
    jobs: list[JobEstimate] = field(default_factory=list)
    site: list[str] = field(default_factory=list)
    """What the site's limits will do to it."""
    storage: list[Storage] = field(default_factory=list)
    images: dict[str, int] = field(default_factory=dict)
    """How many there are, and how many of them the store lacks."""

    def as_json(self) -> dict[str, Any]:
        """The fields; what has no bound is null."""
        return asdict(self)


def durations_of(
    draft: Draft, rollout_seconds: float | None = None, like: Path | None = None
) -> tuple[list[float], str]:
    """Returns seconds of every rollout of a draft, and where they come from.

    Raises:
        ConfigError: ``like`` is no gathered run, or nothing was carried out there.
    """
    from megaflow_hpc.trajectories.reading.durations import Durations

    if rollout_seconds is not None:
        return [rollout_seconds] * len(draft.rollouts), f"every rollout takes {rollout_seconds:g} s, as told"
    if like is not None:
        try:
            return _drawn(draft, Durations([like])), f"as rollouts took in {like}"
        except ConfigError as error:
            raise ConfigError(f"--like {error}") from None
    if draft.durations is not None:
        return _drawn(draft, draft.durations), "as in the runs of scheduling.learn_from"
    longest = {
        (task.id, name): longest_s(task, [policy]) for task in draft.tasks for name, policy in draft.policies.items()
    }
    said = "every rollout takes as long as time-outs of agent and tests allow, the most it can; --like RUN or "
    return [longest[r.task_id, r.policy] for r in draft.rollouts], f"{said}--rollout-seconds N tell better"


def _drawn(draft: Draft, durations: Durations) -> list[float]:
    draw = random.Random(0)
    return [durations.drawn(rollout, draw) for rollout in draft.rollouts]


def estimate(
    draft: Draft,
    run: Path,
    jobs: Sequence[Job],
    durations: tuple[list[float], str],
    site: Sequence[str] = (),
    local_ranks: int = 0,
    like: Path | None = None,
) -> Estimate:
    """Returns what a draft would take.

    Args:
        run: where its run directory would be.
        jobs: what would be queued.
        durations: of :func:`durations_of`.
        site: what limits will do to it.
        local_ranks: MPI ranks of the pod on this machine, where nothing is queued.
        like: an earlier run, by whose size that of this one is reckoned.
    """
    config, (seconds, basis) = draft.config, durations
    if config.training and seconds:
        batch = config.training.batch.tasks * config.training.steps
        asked = batch * sum(draft.policies[name].samples for name in config.training.policies)
        seconds = [seconds[n % len(seconds)] for n in range(min(asked, MOST_SIMULATED + 1))] if asked else seconds
        site = [
            *site,
            f"training asks for {asked} rollouts in {config.training.steps} steps; its own time is not counted",
        ]
    listed = [part for job in jobs for part in _listed(job)]
    pods = sum(job.at_once for job in listed if job.role == "pods") or 1
    total = gateways(config.slurm.pods) if not local_ranks else max(1, local_ranks - 1)
    each = config.slurm.pods.slots_per_rank or config.slurm.pods.cpus_per_rank or CPUS_PER_RANK
    share = 1.0 if local_ranks else pods / max(1, config.slurm.pods.total)
    slots = max(1, round(total * slots_of_rank(each, config.quotas, config.slurm.pods) * share))
    time_s, ideal_s = _time(draft, seconds, min(pods, slots), slots)
    if local_ranks:
        gpus = sum(server.model["gpus"] * server.model["nodes"] for server in draft.servers)
        listed = [JobEstimate("local", 1, 1, 1, len(os.sched_getaffinity(0)), gpus, None)]
    lacking, known = _images(draft)
    return Estimate(
        rollouts=len(seconds),
        tasks=len(draft.tasks),
        slots=slots,
        rollout_s=sum(seconds) / len(seconds) if seconds else 0.0,
        basis=basis,
        time_s=time_s,
        ideal_s=ideal_s,
        nodes=sum(job.nodes * job.at_once for job in listed if job.role != "gather"),
        core_hours=_hours(listed, time_s, "cores"),
        gpu_hours=_hours(listed, time_s, "gpus"),
        requeues=0 if local_ranks else config.slurm.requeues,
        jobs=listed,
        site=[*site, *_passed_limits(draft, listed, time_s)],
        storage=_storage(draft, run, like, sum(job.elements for job in listed if job.role == "pods"), len(seconds)),
        images={"images": lacking + known, "to_make": lacking},
    )


def _listed(job: Job) -> list[JobEstimate]:
    """One job; a heterogeneous one as its pod and its engines."""
    found = []
    for role, options in [(str(job.role), job.options), *(("servers", {**job.options, **e}) for e in job.engines)]:
        known = {option_name(name): value for name, value in options.items()}
        asks, elements = resources.asked(known), job.elements or 1
        try:
            walltime_s = fits.walltime_s(known) if not job.cluster else fits.seconds(known.get("time"))
        except SiteError:
            walltime_s = None
        walltime_s = None if walltime_s is None or math.isinf(walltime_s) else walltime_s
        at_once = min(elements, job.throttle or elements)
        held = bool(known.get("hold"))
        gpus = asks.get("gres/gpu", 0)
        found.append(JobEstimate(role, elements, at_once, asks["node"], asks["cpu"], gpus, walltime_s, held))
    return found


def _hours(jobs: Sequence[JobEstimate], time_s: float, what: str) -> Hours:
    """Gathering is left out of what is expected: it takes minutes."""
    going = [job for job in jobs if not job.held and job.role != "gather"]
    expected = sum(getattr(job, what) * job.at_once for job in going) * time_s
    bounded = [job for job in jobs if getattr(job, what)]
    ends = [job.walltime_s for job in bounded]
    most = None if None in ends else sum(getattr(j, what) * j.elements * (j.walltime_s or 0) for j in bounded) / 3600
    return Hours(expected / 3600, most)


def _time(draft: Draft, seconds: Sequence[float], pods: int, slots: int) -> tuple[float, float]:
    """Returns seconds from the first start to the last end, and the least that it could be."""
    if not seconds:
        return 0.0, 0.0
    ideal_s = max(sum(seconds) / slots, max(seconds))
    if len(seconds) > MOST_SIMULATED:
        return ideal_s, ideal_s
    if len(seconds) != len(draft.rollouts):  # a trainer asks for them, round by round
        found = simulate(Shape(seconds, [0.0] * len(seconds), pods, slots))
        return found.makespan_s, found.ideal_s
    sizes = {len(list(group)) for _, group in groupby(draft.rollouts, key=lambda rollout: rollout.group_id)}
    samples = sizes.pop() if len(sizes) == 1 else 1
    if len(seconds) // samples < pods:  # groups are shared out then
        samples = 1
    known = draft.durations
    expected_s = [known.expected_s(rollout) for rollout in draft.rollouts] if known else [0.0] * len(seconds)
    order = draft.config.scheduling.order
    order = "fifo" if order == "fair" else order
    found = simulate(Shape(seconds, expected_s, pods, slots, order=order, samples=samples))
    return found.makespan_s, found.ideal_s


def _passed_limits(draft: Draft, jobs: Sequence[JobEstimate], time_s: float) -> list[str]:
    """What limits of the campaign and walltimes do to a campaign of this length."""
    limits, found = draft.config.limits, []
    for name, hours in (
        ("core_hours", sum(j.cores * j.at_once for j in jobs if j.role == "pods") * time_s / 3600),
        ("gpu_hours", sum(j.gpus * j.at_once for j in jobs if j.role == "servers" and not j.held) * time_s / 3600),
        ("wall", time_s / 3600),
    ):
        limit = getattr(limits, name)
        if limit is not None and hours > limit:
            found.append(f"limits.{name}: {limit:g} ends it before the {hours:.1f} that are expected; raise it")
    for job in jobs:
        if job.role in ("pods", "servers") and job.walltime_s and time_s > job.walltime_s:
            starts = math.ceil(time_s / job.walltime_s)
            found.append(
                f"slurm.{job.role}.time: takes {starts} walltimes one after the other; elements are requeued for that "
                "as long as they store rollouts (slurm.requeues)"
            )
    return list(dict.fromkeys(found))


def _images(draft: Draft) -> tuple[int, int]:
    """How many images the store lacks, and has."""
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
    found = []
    for what, path, size, count in wanted:
        try:
            there = disk_quota(path)
        except OSError:
            continue
        free_inodes = None if math.isinf(there.free_inodes) else there.free_inodes
        found.append(Storage(what, str(path), size, count, there.free_bytes, free_inodes, there.bytes_by))
    return found


def _bytes_of_rollout(like: Path | None) -> float | None:
    """Bytes that each rollout of an earlier run has taken, of journals, shards and results."""
    if like is None or not like.is_dir():
        return None
    from megaflow_hpc.trajectories.reading.durations import durations

    files = [like / "trajectories.h5", *(like / "journal").glob("*"), *(like / "shards").glob("*")]
    count = len(durations(like))
    return sum(path.stat().st_size for path in files if path.is_file()) / count if count else None
