"""Read job states with one squeue query per cluster for all jobs of a campaign.

Jobs that squeue has forgotten are looked up with sacct.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm.ids import by_cluster, named, on
from megaflow_hpc.slurm.site import ask

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
    found: dict[str, JobState] = {}
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
                if not (
                    element in found and found[element].live
                ):  # a heterogeneous job is alive while any of its components is
                    found[element] = JobState(element, state, reason, node, starts_at)
    return found


def finished_jobs(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Returns the jobs' states from accounting, by element. The result is empty on a site without accounting."""
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
