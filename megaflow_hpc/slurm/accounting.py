"""Read job states with one squeue query per cluster for all jobs of a campaign.

Jobs that squeue has forgotten are looked up with sacct.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.atomic import without_links, write_json
from megaflow_hpc.slurm.ids import array_of, by_cluster, named
from megaflow_hpc.slurm.site import ask, on

LIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
    | {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"}
)

UNLAUNCHED = "launch failed requeued held"
"""Slurm's reason for a job that a node could not start, such as a failed prolog or a silent slurmd."""

_FIELDS = "%i|%T|%S|%N|%r"
"""The reason comes last because it may be an administrator's free text."""


@dataclass(frozen=True)
class JobState:
    """State of one array element (``<job>_<element>``) or of a plain job."""

    id: str
    state: str
    reason: str = ""
    """Slurm's code for why the job waits (:mod:`.reasons`)."""
    node: str = ""
    starts_at: float | None = None
    """Expected start of a waiting job, in seconds UTC. ``None`` if Slurm gives no estimate."""

    @property
    def live(self) -> bool:
        """Returns whether the job waits, runs, or is being requeued."""
        return self.state in LIVE

    @property
    def held(self) -> bool:
        """Returns whether the job is held and waits for a release, before its first start or after a requeue."""
        return self.state == "REQUEUE_HOLD" or (self.state == "PENDING" and "held" in self.reason.lower())

    @property
    def unlaunched(self) -> bool:
        """Returns whether Slurm holds the job because its node could not launch it."""
        return self.held and self.reason.lower().replace("_", " ") == UNLAUNCHED


def expand(job_id: str) -> list[str]:
    """Returns the array elements of an id as squeue prints it.

    ``7_[0-2,5%3]`` → ``7_0 7_1 7_2 7_5``. ``7+1`` (a component of a heterogeneous job) → ``7``. Other ids are returned
    unchanged.
    """
    job_id = job_id.partition("+")[0]
    match = re.fullmatch(r"(\d+)_\[([\d,\-:]+)(?:%\d+)?\]", job_id)
    if not match:
        return [job_id]
    elements: list[str] = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        last, _, step = last.partition(":")
        elements += [f"{match[1]}_{i}" for i in range(int(first), int(last or first) + 1, int(step or 1))]
    return elements


def live_jobs(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Returns the jobs that squeue still knows, by element.

    Raises:
        SiteError: A controller does not answer. The caller must not conclude that the jobs have ended.
    """
    states: dict[str, JobState] = {}
    for cluster, numbers in by_cluster(job_ids).items():
        try:
            output = ask("squeue", *on(cluster), "-h", "-j", ",".join(numbers), "-t", "all", "-o", _FIELDS, epoch=True)
        except SiteError as error:
            if "Invalid job id" in str(error):  # squeue has forgotten all of these jobs
                continue
            raise
        for line in output.splitlines():
            job_id, state, start, node, reason = line.split("|", 4)
            starts_at = float(start) if state == "PENDING" and start.isdecimal() else None
            for number in expand(job_id):
                element = named(number, cluster)
                before = states.get(element)
                if before is None or not before.live:  # a heterogeneous job lives while any of its components does
                    states[element] = JobState(element, state, reason, node, starts_at)
    return states


def finished_jobs(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Returns the jobs' states from accounting, by element. The result is empty on a site without accounting."""
    states = {}
    for cluster, numbers in by_cluster(job_ids).items():
        try:
            output = ask("sacct", *on(cluster), "-n", "-X", "-P", "-j", ",".join(numbers), "-o", "JobID,State,NodeList")
        except SiteError:
            continue
        for line in output.splitlines():
            job_id, state, node = line.split("|", 2)
            for number in expand(job_id):
                element = named(number, cluster)
                states[element] = JobState(element, state.split(" ")[0], "", node)
    return states


ACCOUNTING_DELAY_S = 300.0
"""Seconds after a job's end in which slurmdbd may still get updates or a user may requeue the job."""
FIELDS = "JobID,State,Start,End,AllocCPUS,TotalCPU,AllocTRES,TRESUsageInTot"


@dataclass(frozen=True)
class ElementUse:
    """One start of one element, with its allocation. Times are in seconds UTC."""

    id: str
    started_at: float
    ended_at: float | None
    """``None`` while the job runs."""
    cores: int
    gpus: int


@dataclass(frozen=True)
class Efficiency:
    """Allocation and actual use of one start of one element."""

    use: ElementUse
    state: str
    cpu_s: float
    """CPU time of all processes. 0 until the first step has ended."""
    memory_asked_mb: float | None
    memory_peak_mb: float | None
    """Highest use of any one step, summed over its tasks. ``None`` if Slurm does not record it."""


StartsByJob = dict[str, list[Efficiency]]
"""Starts by job or array."""


def efficiencies(job_ids: Iterable[str], kept: Path | None = None) -> list[Efficiency]:
    """Returns the same figures as ``seff`` for every start of every element.

    Args:
        kept: Cache file for final jobs. Without it all jobs are queried.

    Raises:
        SiteError: The site has no accounting, or it does not answer.
    """
    job_ids, cached = list(job_ids), _read(kept)
    starts_by_job: StartsByJob = {}
    final: StartsByJob = {}
    for cluster, numbers in by_cluster(job for job in job_ids if job not in cached).items():
        answered, open_ = _query(cluster, numbers)
        starts_by_job |= answered
        final |= {job: starts for job, starts in answered.items() if job not in open_}
    if kept is not None and final:
        with suppress(OSError):  # another user's run, or a full disk
            with without_links(kept.parent) as folder:
                write_json(folder / kept.name, msgspec.to_builtins(_read(kept) | final))
    every = cached | starts_by_job
    return [start for job in job_ids for start in every.get(job, ())]


def _query(cluster: str, numbers: Iterable[str]) -> tuple[StartsByJob, set[str]]:
    """Query one cluster. Returns the starts by job, and the jobs that are not final yet."""
    output = ask("sacct", *on(cluster), "-n", "-P", "-D", "-j", ",".join(numbers), "-o", FIELDS, epoch=True)
    starts_by_job: StartsByJob = {}
    open_: set[str] = set()
    settled = time.time() - ACCOUNTING_DELAY_S
    for job_id, state, start, end, cores, cpu, held, used in (line.split("|", 7) for line in output.splitlines()):
        array = array_of(named(job_id.partition(".")[0].partition("+")[0], cluster))
        starts = starts_by_job.setdefault(array, [])
        if "." in job_id:  # a step, which follows its job in the output
            peak = _megabytes(used)
            if peak is not None and starts and starts[-1].use.id == named(job_id.partition(".")[0], cluster):
                starts[-1] = replace(starts[-1], memory_peak_mb=max(peak, starts[-1].memory_peak_mb or 0.0))
            continue
        ended_at = float(end) if end.isdigit() else None
        if state.split(" ")[0] in LIVE - {"REQUEUED"} or ended_at is None or ended_at > settled:
            open_.add(array)
        if start.isdigit():
            gpus = re.search(r"\bgres/gpu=(\d+)", held)
            count = int(gpus[1]) if gpus else 0
            use = ElementUse(named(job_id, cluster), float(start), ended_at, int(cores or 0), count)
            starts.append(Efficiency(use, state.split(" ")[0], _duration_s(cpu), _megabytes(held), None))
    return starts_by_job, open_


def _read(kept: Path | None) -> StartsByJob:
    """Read the cache. A missing or damaged file counts as empty."""
    if kept is None:
        return {}
    try:
        return msgspec.json.decode(kept.read_bytes(), type=StartsByJob)
    except (OSError, ValueError):
        return {}


def _duration_s(text: str) -> float:
    """Parse ``[days-][hours:]minutes:seconds[.fraction]``. Any other text gives 0."""
    days, _, rest = text.rpartition("-")
    try:
        seconds = float(days or 0) * 86400
        for number, unit in zip(reversed(rest.split(":")), (1, 60, 3600), strict=False):
            seconds += float(number) * unit
    except ValueError:
        return 0.0
    return seconds


def _megabytes(resources: str) -> float | None:
    """Return the memory in a TRES list such as ``…,mem=4000M,…``, in MiB. A number without a unit is in bytes."""
    match = re.search(r"\bmem=([\d.]+)([KMGTP]?)", resources)
    if match is None:
        return None
    exponents = {"": -2, "K": -1, "M": 0, "G": 1, "T": 2, "P": 3}
    return float(match[1]) * 1024.0 ** exponents[match[2]]
