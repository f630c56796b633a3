"""States of jobs, by one squeue query for all of a campaign's jobs (one for each cluster that has any of them), and
sacct for those it has forgotten."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm.ids import by_cluster, named, on
from megaflow_hpc.slurm.site import ask

LIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
    | {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"}
)

_FIELDS = "%i|%T|%S|%N|%r"
"""The reason is last: it may be an administrator's own words."""


@dataclass(frozen=True)
class JobState:
    """One array element (``<job>_<element>``) or plain job."""

    id: str
    state: str
    reason: str = ""
    """Slurm's code for why it waits (:mod:`.reasons`)."""
    node: str = ""
    starts_at: float | None = None
    """When Slurm expects one that waits to start, in seconds UTC; ``None``: it does not say."""

    @property
    def live(self) -> bool:
        """Whether the job waits, runs, or is being requeued."""
        return self.state in LIVE

    @property
    def held(self) -> bool:
        """Whether it waits for a release, from the beginning or after a requeue."""
        return self.state == "REQUEUE_HOLD" or (self.state == "PENDING" and "held" in self.reason.lower())


def expand(job_id: str) -> list[str]:
    """Returns the elements of an id as squeue prints it.

    ``7_[0-2,5%3]`` → ``7_0 7_1 7_2 7_5``; ``7+1`` (a part of a heterogeneous job) → ``7``; others stay as they are.
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
    """Returns what squeue still knows of these jobs, by element.

    Raises:
        SiteError: A controller does not answer; the caller must not conclude that the jobs are gone.
    """
    found: dict[str, JobState] = {}
    for cluster, numbers in by_cluster(job_ids).items():
        try:
            output = ask("squeue", *on(cluster), "-h", "-j", ",".join(numbers), "-t", "all", "-o", _FIELDS, epoch=True)
        except SiteError as error:
            if "Invalid job id" in str(error):  # every one of them is forgotten
                continue
            raise
        for line in output.splitlines():
            job_id, state, start, node, reason = line.split("|", 4)
            starts_at = float(start) if state == "PENDING" and start.isdecimal() else None
            for number in expand(job_id):
                element = named(number, cluster)
                if not (element in found and found[element].live):  # a heterogeneous job lives while a part of it does
                    found[element] = JobState(element, state, reason, node, starts_at)
    return found


def finished_jobs(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Returns what accounting says of these jobs, by element; empty on a site without accounting."""
    found = {}
    for cluster, numbers in by_cluster(job_ids).items():
        try:
            output = ask("sacct", *on(cluster), "-n", "-X", "-P", "-j", ",".join(numbers), "-o", "JobID,State,NodeList")
        except SiteError:
            continue
        for line in output.splitlines():
            job_id, state, node = line.split("|", 2)
            for number in expand(job_id):
                element = named(number, cluster)
                found[element] = JobState(element, state.split(" ")[0], "", node)
    return found


@dataclass(frozen=True)
class Use:
    """One start of one element, and what it held; seconds UTC."""

    id: str
    started_at: float
    ended_at: float | None
    """``None`` while it runs."""
    cores: int
    gpus: int


@dataclass(frozen=True)
class Efficiency:
    """One start of one element: what it held, and how much of that it used."""

    use: Use
    state: str
    cpu_s: float
    """CPU time of all its processes; 0 until its first step has ended."""
    memory_asked_mb: float | None
    memory_peak_mb: float | None
    """The most that one of its steps used, over all its tasks; ``None`` where Slurm does not gather it."""


def efficiencies(job_ids: Iterable[str]) -> list[Efficiency]:
    """Returns what ``seff`` would say of every start of every element; one sacct query for each cluster.

    Raises:
        SiteError: There is no accounting, or it does not answer.
    """
    fields = "JobID,State,Start,End,AllocCPUS,TotalCPU,AllocTRES,TRESUsageInTot"
    found: list[Efficiency] = []
    for cluster, numbers in by_cluster(job_ids).items():
        command = ("sacct", *on(cluster), "-n", "-P", "-D", "-j", ",".join(numbers), "-o", fields)
        rows = [line.split("|", 7) for line in ask(*command, epoch=True).splitlines()]
        for job_id, state, start, end, cores, cpu, held, used in rows:
            if "." in job_id:  # a step, which comes behind its job
                peak = _megabytes(used)
                if peak is not None and found and found[-1].use.id == named(job_id.partition(".")[0], cluster):
                    known = found[-1].memory_peak_mb
                    found[-1] = replace(found[-1], memory_peak_mb=max(peak, known or 0.0))
            elif start.isdigit():
                gpus = re.search(r"\bgres/gpu=(\d+)", held)
                ended_at = float(end) if end.isdigit() else None
                count = int(gpus[1]) if gpus else 0
                use = Use(named(job_id, cluster), float(start), ended_at, int(cores or 0), count)
                found.append(Efficiency(use, state.split(" ")[0], _duration_s(cpu), _megabytes(held), None))
    return found


def _duration_s(text: str) -> float:
    """Seconds of ``[days-][hours:]minutes:seconds[.fraction]``; 0 of anything else."""
    days, _, rest = text.rpartition("-")
    try:
        seconds = float(days or 0) * 86400
        for number, unit in zip(reversed(rest.split(":")), (1, 60, 3600), strict=False):
            seconds += float(number) * unit
    except ValueError:
        return 0.0
    return seconds


def _megabytes(resources: str) -> float | None:
    """The memory among trackable resources, ``…,mem=4000M,…``, in MiB; bytes have no unit."""
    match = re.search(r"\bmem=([\d.]+)([KMGTP]?)", resources)
    return float(match[1]) * 1024.0 ** ("KMGTP".find(match[2]) - 1 if match[2] else -2) if match else None
