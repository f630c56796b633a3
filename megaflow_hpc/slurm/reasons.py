"""Why jobs wait: Slurm's reason codes in plain words, with what can be done, and the jobs of a run grouped by them.

The codes are those of https://slurm.schedmd.com/job_reason_codes.html; others are shown as Slurm says them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from megaflow_hpc.slurm.accounting import UNLAUNCHED, JobState

_TIME = "ask for less (resume RUN --time), or name a partition that allows it (--partition)"
REASONS: tuple[tuple[str, str, str], ...] = (
    ("None", "Slurm has not looked at it yet", ""),
    ("Resources", "it is next in line and waits until nodes are free", ""),
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
    ("JobArrayTaskLimit", "so many of the array may run at once (throttle, or the site's limits)", ""),
    ("JobHeldUser", "it is held", "scontrol release JOB"),
    ("JobHeldAdmin", "an administrator holds it", "ask the site's administrators why"),
    (
        UNLAUNCHED.replace(" ", "[ _]"),
        "its node could not launch it, and Slurm holds it",
        "see sinfo -R for that node's state, then: resume RUN, which releases it",
    ),
    ("job.requeued.in.held.state", "it went back into the queue, held", "scontrol release JOB"),
    ("Licenses", "it waits for licenses that others use", ""),
    ("InvalidAccount|AccountNotAllowed", "its account may not run there", "correct slurm.account"),
    ("InvalidQOS|QOSNotAllowed", "its QOS may not be used there", "correct qos under slurm.extra"),
    (
        "(QOS|Assoc)(Max|Grp).*Minutes.*|QOSUsageThreshold",
        "the allocation of time is used up",
        "ask for more time of the site, or name another account",
    ),
    (
        "(QOS|Assoc)Max.*Wall.*|(QOS|Assoc)GrpWall.*",
        "it asks for more time than the account or QOS gives",
        _TIME,
    ),
    (
        "(QOS|Assoc)(Max|Grp)(Submit)?Jobs?.*",
        "as many jobs of the account or QOS run as may",
        "it starts when one of them ends",
    ),
    (
        "(QOS|Assoc)(Max|Grp).*PerJob.*|MaxMemPerLimit",
        "it asks for more than one job of the account or QOS may have",
        "ask for less, or name another account or QOS",
    ),
    (
        "(QOS|Assoc)(Max|Grp).*",
        "jobs of the account or QOS hold as much as they may",
        "it starts when some of them end; scale RUN --pods N asks for fewer",
    ),
    ("QOSMin.*", "it asks for less than the QOS takes", "see: sacctmgr show qos"),
)
"""Pattern of a whole code, what it means, and what to do; the first that fits holds."""


def explain(reason: str) -> tuple[str, str]:
    """Returns what a reason code means and what to do about it; each is empty where nothing is known."""
    for pattern, means, remedy in REASONS:
        if re.fullmatch(pattern, reason, re.IGNORECASE | re.DOTALL):
            return means, remedy
    return "", ""


def waiting(jobs: Iterable[tuple[str, JobState]]) -> list[dict[str, Any]]:
    """Returns what waits in the queue, those of one role and reason together, the most first.

    Args:
        jobs: Each job's role and state.

    Returns:
        ``role``, ``reason``, ``jobs`` (their number), ``first`` (an id), ``means``, ``remedy``, and ``starts_at``: when
        Slurm expects the first of them to start, in seconds UTC, ``None`` while it does not say.
    """
    groups: dict[tuple[str, str], list[JobState]] = {}
    for role, state in jobs:
        if state.state == "PENDING":
            groups.setdefault((role, state.reason), []).append(state)
    found = []
    for (role, reason), states in sorted(groups.items(), key=lambda group: -len(group[1])):
        means, remedy = explain(reason)
        starts = [state.starts_at for state in states if state.starts_at is not None]
        shown = {"role": role, "reason": reason, "jobs": len(states), "first": states[0].id}
        found.append({**shown, "means": means, "remedy": remedy, "starts_at": min(starts, default=None)})
    return found
