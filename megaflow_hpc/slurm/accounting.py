"""Reads job states and explains why jobs are pending. One squeue query per cluster covers all jobs of a campaign.

The query selects jobs by user, never by a list of ids. Given several ids, squeue would fetch the cluster's whole job
table (REQUEST_JOB_INFO) and filter it on the client. Jobs that squeue no longer lists are looked up with sacct.

Slurm's reason codes are documented at https://slurm.schedmd.com/job_reason_codes.html. Unknown codes are shown
unchanged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm.ids import array_of, by_cluster, named
from megaflow_hpc.slurm.site import ask, here_or_on, on

LIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
    | {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING", "POWER_UP_NODE"}
)
"""States of jobs that have not ended: they are pending, running, or held until released.

squeue and sacct may print a flag in place of the base state. LAUNCH_FAILED, UPDATE_DB and RECONFIG_FAIL are flags of
jobs that have ended. A REVOKED job runs on another cluster of a federation, which lists it.
"""
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States of jobs that start only after ``scontrol release``."""
WAITING = HELD | {"PENDING", "REQUEUED", "REQUEUE_FED", "EXPEDITING"}
"""States of jobs without an allocation."""

UNLAUNCHED = "launch failed requeued held"
"""Slurm's reason for a job that a node could not start, for example because the prolog failed."""

_FIELDS = "%i|%T|%S|%e|%N|%r"
"""Output format for squeue. The reason comes last because it may contain free text from an administrator."""


@dataclass(frozen=True)
class JobState:
    """State of an array element (``<job>_<element>``) or of a plain job."""

    id: str
    state: str
    reason: str = ""
    """Slurm's reason code for a pending job (:func:`explain`)."""
    node: str = ""
    starts_at: float | None = None
    """Start of a running job, or expected start of a pending one, in Unix seconds. ``None`` if unknown."""
    ends_at: float | None = None
    """Time when a running job reaches its walltime, in Unix seconds. ``None`` if it has no time limit."""

    @property
    def live(self) -> bool:
        """True if the job is pending, running or being requeued."""
        return self.state in LIVE

    @property
    def held(self) -> bool:
        """True if the job is held until a user or administrator releases it, before its first start or after a
        requeue."""
        return self.state in HELD or (self.state == "PENDING" and "held" in self.reason.lower())

    @property
    def waits(self) -> bool:
        """True if the job is queued and has no allocation."""
        return self.state in WAITING

    @property
    def unlaunched(self) -> bool:
        """True if Slurm holds the job because its node could not launch it."""
        return self.held and self.reason.lower().replace("_", " ") == UNLAUNCHED


def expand(job_id: str) -> list[str]:
    """Expands an id printed by squeue into its array elements.

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


def live_jobs(job_ids: Iterable[str], user: int | None = None) -> dict[str, JobState]:
    """Returns the jobs that squeue still lists, by element id. The list includes jobs that ended within the last few
    minutes.

    Args:
        user: Numeric id of the jobs' owner. Default: this user.

    Raises:
        SiteError: A controller does not respond. The caller must not conclude that the jobs have ended.
    """
    states: dict[str, JobState] = {}
    whose = ("--me",) if user in (None, os.getuid()) else ("-u", str(user))
    for cluster, numbers in by_cluster(job_ids).items():
        output = ask("squeue", *here_or_on(cluster), "-h", *whose, "-t", "all", "-o", _FIELDS, epoch=True)
        wanted = {array_of(number) for number in numbers}
        for line in output.splitlines():
            job_id, state, start, end, node, reason = line.split("|", 5)
            if array_of(job_id.partition("+")[0]) not in wanted:
                continue
            starts_at = float(start) if state in ("PENDING", "RUNNING") and start.isdecimal() else None
            ends_at = float(end) if state == "RUNNING" and end.isdecimal() else None
            for number in expand(job_id):
                element = named(number, cluster)
                before = states.get(element)
                if before is None or not before.live:  # a heterogeneous job is live while any of its components is
                    states[element] = JobState(element, state, reason, node, starts_at, ends_at)
    return states


def finished_jobs(job_ids: Iterable[str]) -> dict[str, JobState]:
    """Returns job states from accounting, by element id. Empty on a site without accounting."""
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


FIELDS = "JobID,State,Start,End,AllocCPUS,TotalCPU,AllocTRES,TRESUsageInTot"


@dataclass(frozen=True)
class Efficiency:
    """Allocated and used resources of one start of an array element. Times are in Unix seconds."""

    id: str
    state: str
    started_at: float
    ended_at: float | None
    """Time when this start ended. ``None`` while it is running."""
    cores: int
    gpus: int
    cpu_s: float
    """CPU seconds of all processes. 0 until the first step has finished."""
    memory_asked_mb: float | None
    memory_peak_mb: float | None = None
    """Peak memory in MiB of the largest step, summed over its tasks. ``None`` if Slurm does not record it."""


def efficiencies(job_ids: Iterable[str]) -> list[Efficiency]:
    """Returns the resource usage that ``seff`` would report, for every start of every element.

    Raises:
        SiteError: The site has no accounting, or it does not respond.
    """
    starts: list[Efficiency] = []
    for cluster, numbers in by_cluster(job_ids).items():
        output = ask("sacct", *on(cluster), "-n", "-P", "-D", "-j", ",".join(numbers), "-o", FIELDS, epoch=True)
        for line in output.splitlines():
            job_id, state, start, end, cores, cpu, held, used = line.split("|", 7)
            if "." in job_id:  # a step; steps follow their job in the output
                peak = _megabytes(used)
                if peak is not None and starts and starts[-1].id == named(job_id.partition(".")[0], cluster):
                    starts[-1] = replace(starts[-1], memory_peak_mb=max(peak, starts[-1].memory_peak_mb or 0.0))
            elif start.isdigit():
                gpus = re.search(r"\bgres/gpu=(\d+)", held)
                starts.append(
                    Efficiency(
                        id=named(job_id, cluster),
                        state=state.split(" ")[0],
                        started_at=float(start),
                        ended_at=float(end) if end.isdigit() else None,
                        cores=int(cores or 0),
                        gpus=int(gpus[1]) if gpus else 0,
                        cpu_s=_duration_s(cpu),
                        memory_asked_mb=_megabytes(held),
                    )
                )
    return starts


def _duration_s(text: str) -> float:
    """Parses ``[days-][hours:]minutes:seconds[.fraction]``. Returns 0 for any other text."""
    days, _, rest = text.rpartition("-")
    try:
        seconds = float(days or 0) * 86400
        for number, unit in zip(reversed(rest.split(":")), (1, 60, 3600), strict=False):
            seconds += float(number) * unit
    except ValueError:
        return 0.0
    return seconds


def _megabytes(resources: str) -> float | None:
    """Returns the memory of a TRES list such as ``…,mem=4000M,…``, in MiB, or ``None`` if it is missing. A number
    without a unit is in bytes."""
    match = re.search(r"\bmem=([\d.]+)([KMGTP]?)", resources)
    if match is None:
        return None
    exponents = {"": -2, "K": -1, "M": 0, "G": 1, "T": 2, "P": 3}
    return float(match[1]) * 1024.0 ** exponents[match[2]]


_TIME = "ask for less (resume RUN --time), or name a partition that allows it (--partition)"
REASONS: tuple[tuple[str, str, str], ...] = (
    ("None", "Slurm has not considered it yet", ""),
    ("Resources", "it is next in the queue and waits for free nodes", ""),
    ("Priority", "jobs of higher priority are ahead", ""),
    ("Dependency", "it waits for other jobs of the campaign", ""),
    ("DependencyNeverSatisfied", "a job that it waits for failed", "cancel RUN, then resume RUN"),
    ("PartitionTimeLimit", "it requests more time than the partition allows", _TIME),
    ("PartitionNodeLimit", "it requests more nodes than the partition allows for one job", "ask for fewer nodes"),
    ("PartitionDown|PartitionInactive", "its partition accepts no jobs now", "wait, or resume RUN --partition NAME"),
    ("PartitionConfig", "its partition does not allow such a job", "see: scontrol show partition"),
    (
        "BadConstraints|NodeConfig",
        "no node has the resources that it requests",
        "request less memory, or fewer CPUs or GPUs per node; see: sinfo -Nl",
    ),
    (
        "ReqNodeNotAvail.*|Nodes.required.for.job.are.DOWN.*",
        "nodes that it needs are down, drained or reserved, perhaps for maintenance",
        "a shorter --time may fit before it; see: scontrol show reservation, sinfo -R",
    ),
    ("Reservation", "it waits for its reservation", ""),
    ("BeginTime", "it was requeued or delayed, and starts in a moment", ""),
    ("JobArrayTaskLimit", "the array's limit of running elements is reached (of running jobs at this site)", ""),
    ("JobHeldUser", "it is held", "scontrol release JOB"),
    ("JobHeldAdmin", "an administrator holds it", "ask the site's administrators why"),
    (
        UNLAUNCHED.replace(" ", "[ _]"),
        "its node could not launch it, and Slurm holds it",
        "see sinfo -R for that node's state, then: resume RUN, which releases it",
    ),
    ("job.requeued.in.held.state", "it was requeued and is held", "scontrol release JOB"),
    (
        "RESV_DEL_HOLD",
        "its reservation was deleted, so Slurm holds it",
        "name another reservation or none (slurm.reservation), then: cancel RUN, resume RUN; or scontrol release JOB",
    ),
    (
        "SPECIAL_EXIT",
        "the site requeued it with SPECIAL_EXIT, and holds it",
        "ask the site's administrators why; then: scontrol release JOB",
    ),
    ("REQUEUE_HOLD", "it was requeued and is held", "scontrol release JOB"),
    (
        "REQUEUED|REQUEUE_FED|EXPEDITING",
        "it was requeued, and waits until its previous start has ended on all nodes",
        "",
    ),
    ("Licenses", "it waits for licenses that other jobs use", ""),
    ("InvalidAccount|AccountNotAllowed", "its account may not run there", "correct slurm.account"),
    ("InvalidQOS|QOSNotAllowed", "its QOS is not allowed there", "correct slurm.qos"),
    (
        "(QOS|Assoc)(Max|Grp).*Minutes.*|QOSUsageThreshold",
        "the account's time allocation is used up",
        "ask the site for more time, or name another account",
    ),
    (
        "(QOS|Assoc)Max.*Wall.*|(QOS|Assoc)GrpWall.*",
        "it requests more time than the account or QOS allows",
        _TIME,
    ),
    (
        "(QOS|Assoc)(Max|Grp)(Submit)?Jobs?.*",
        "the account's or QOS' limit of jobs is reached",
        "it starts when one of them ends",
    ),
    (
        "(QOS|Assoc)(Max|Grp).*PerJob.*|MaxMemPerLimit",
        "it requests more than the account or QOS allows for one job",
        "ask for less, or name another account or QOS",
    ),
    (
        "(QOS|Assoc)(Max|Grp).*",
        "the account's or QOS' limit of resources is reached",
        "it starts when some of them end; scale RUN --pods N asks for fewer",
    ),
    ("QOSMin.*", "it requests less than the QOS requires", "see: sacctmgr show qos"),
)
"""Rows of pattern, meaning and remedy. The pattern must match a complete reason code, and the first match wins."""


def explain(reason: str) -> tuple[str, str]:
    """Returns the meaning of a reason code and the remedy. Each is an empty string if unknown."""
    for pattern, means, remedy in REASONS:
        if re.fullmatch(pattern, reason, re.IGNORECASE | re.DOTALL):
            return means, remedy
    return "", ""


def waiting(jobs: Iterable[tuple[str, JobState]]) -> list[dict[str, Any]]:
    """Groups the pending jobs by role and reason, largest group first.

    Args:
        jobs: Role and state of each job.

    Returns:
        One dict per group, with ``role``, ``reason``, ``jobs`` (number of jobs), ``first`` (id of the first job),
        ``means``, ``remedy`` and ``starts_at``. ``starts_at`` is the earliest start that Slurm expects, in Unix
        seconds, or ``None`` if unknown.
    """
    groups: dict[tuple[str, str], list[JobState]] = {}
    for role, state in jobs:
        if state.waits:
            # A state such as RESV_DEL_HOLD explains more than the reason.
            groups.setdefault((role, state.reason if state.state == "PENDING" else state.state), []).append(state)
    rows = []
    for (role, reason), states in sorted(groups.items(), key=lambda group: -len(group[1])):
        means, remedy = explain(reason)
        starts = [state.starts_at for state in states if state.starts_at is not None]
        shown = {"role": role, "reason": reason, "jobs": len(states), "first": states[0].id}
        rows.append({**shown, "means": means, "remedy": remedy, "starts_at": min(starts, default=None)})
    return rows
