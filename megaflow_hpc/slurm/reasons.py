"""Explains why jobs are pending: Slurm's reason codes in plain words, with a remedy, grouped for the jobs of a run.

The codes are documented at https://slurm.schedmd.com/job_reason_codes.html. Unknown codes are shown unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from megaflow_hpc.slurm.accounting import UNLAUNCHED, JobState

_TIME = "ask for less (resume RUN --time), or name a partition that allows it (--partition)"
REASONS: tuple[tuple[str, str, str], ...] = (
    ("None", "Slurm has not considered it yet", ""),
    ("Resources", "it is next in the queue and waits for free nodes", ""),
    ("Priority", "jobs of higher priority are ahead", ""),
    ("Dependency", "it waits for other jobs of the campaign", ""),
    ("DependencyNeverSatisfied", "a job that it waits for failed", "cancel RUN, then resume RUN"),
    ("PartitionTimeLimit", "it asks for more time than the partition ever gives", _TIME),
    ("PartitionNodeLimit", "it asks for more nodes than the partition gives one job", "ask for fewer nodes"),
    ("PartitionDown|PartitionInactive", "its partition takes no jobs now", "wait, or resume RUN --partition NAME"),
    ("PartitionConfig", "its partition does not allow such a job", "see: scontrol show partition"),
    (
        "BadConstraints|NodeConfig",
        "no node has what it asks for",
        "ask for less of memory, CPUs or GPUs per node; see: sinfo -Nl",
    ),
    (
        "ReqNodeNotAvail.*|Nodes.required.for.job.are.DOWN.*",
        "nodes that it needs are down, drained or reserved, for a maintenance perhaps",
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
        "name another reservation or none in slurm.extra, then: cancel RUN, resume RUN; or scontrol release JOB",
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
    ("InvalidQOS|QOSNotAllowed", "its QOS may not be used there", "correct qos under slurm.extra"),
    (
        "(QOS|Assoc)(Max|Grp).*Minutes.*|QOSUsageThreshold",
        "the allocation of time is used up",
        "ask the site for more time, or name another account",
    ),
    (
        "(QOS|Assoc)Max.*Wall.*|(QOS|Assoc)GrpWall.*",
        "it asks for more time than the account or QOS gives",
        _TIME,
    ),
    (
        "(QOS|Assoc)(Max|Grp)(Submit)?Jobs?.*",
        "the account's or QOS' limit of jobs is reached",
        "it starts when one of them ends",
    ),
    (
        "(QOS|Assoc)(Max|Grp).*PerJob.*|MaxMemPerLimit",
        "it asks for more than one job of the account or QOS may have",
        "ask for less, or name another account or QOS",
    ),
    (
        "(QOS|Assoc)(Max|Grp).*",
        "the account's or QOS' limit of resources is reached",
        "it starts when some of them end; scale RUN --pods N asks for fewer",
    ),
    ("QOSMin.*", "it asks for less than the QOS takes", "see: sacctmgr show qos"),
)
"""Pattern for a whole code, meaning, remedy. The first match wins."""


def explain(reason: str) -> tuple[str, str]:
    """Returns the meaning of a reason code and the remedy. Each is an empty string if unknown."""
    for pattern, means, remedy in REASONS:
        if re.fullmatch(pattern, reason, re.IGNORECASE | re.DOTALL):
            return means, remedy
    return "", ""


def waiting(jobs: Iterable[tuple[str, JobState]]) -> list[dict[str, Any]]:
    """Returns the pending jobs, grouped by role and reason, largest group first.

    Args:
        jobs: Role and state of each job.

    Returns:
        Rows with ``role``, ``reason``, ``jobs`` (their number), ``first`` (an id), ``means``, ``remedy`` and
        ``starts_at``. ``starts_at`` is the earliest start that Slurm expects, in Unix seconds, or ``None`` without an
        estimate.
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
