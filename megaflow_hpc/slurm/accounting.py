"""States of jobs, by one squeue query for all of a campaign's jobs (one for each cluster that has any of them), and
sacct for those it has forgotten."""

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
"""Slurm's code for a job that a node could not start: a failed prolog, a slurmd that did not answer."""

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

    @property
    def unlaunched(self) -> bool:
        """Whether Slurm holds it because it could not launch it on the node that it was given."""
        return self.held and self.reason.lower().replace("_", " ") == UNLAUNCHED


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
