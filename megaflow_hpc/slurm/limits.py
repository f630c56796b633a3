"""How much Slurm lets this user queue at once: array size, association and QOS limits.

Asked with one ``sacctmgr`` query each for associations and QOS; a site without accounting, or whose slurmdbd is away,
limits nothing but the size of an array. Slurm enforces all of it: reading it beforehand is what makes one campaign fit
instead of being refused half-way.
"""

from __future__ import annotations

import getpass
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm import site


@dataclass(frozen=True)
class Allowance:
    """What one more campaign of this user may have. ``None``: no limit."""

    array_size: int = 1001
    """Elements one array may have (MaxArraySize)."""
    submit: int | None = None
    """Jobs, an array element counting as one, that may be queued or running at once, by the narrowest limit."""
    queued: int = 0
    """How many of those there are already."""
    running: int | None = None
    """Jobs that may run at once."""
    why: str = ""
    """Which limit ``submit`` is, for messages."""

    @property
    def room(self) -> int | None:
        """Jobs that can still be queued."""
        return None if self.submit is None else max(0, self.submit - self.queued)


def chunks(count: int, size: int) -> list[int]:
    """``count`` elements as arrays of at most ``size``, about equal."""
    arrays = -(-count // max(1, size))
    return [count * (n + 1) // arrays - count * n // arrays for n in range(arrays)]


def allowance(options: Mapping[str, Any]) -> Allowance:
    """The limits that hold for jobs with these sbatch options (``account``, ``qos`` and ``partition`` count).

    Raises:
        SiteError: the controller does not answer.
    """
    array_size = site.max_array_size()
    user = getpass.getuser()
    try:
        account, limits = _association(user, options)
        names = {str(options.get("qos") or account["qos"]), *site.partition_qos(str(options.get("partition") or ""))}
        limits += [limit for name in sorted(names - {""}) for limit in _qos(name)]
    except SiteError:  # no accounting, or slurmdbd is away: Slurm itself will say what it refuses
        return Allowance(array_size)
    submits = [limit for limit in limits if limit.kind == "submit"]
    running = min((limit.value for limit in limits if limit.kind == "jobs"), default=None)
    if not submits:
        return Allowance(array_size, running=running)
    jobs = Counter[str]()
    for line in site.ask("squeue", "-h", "-r", "-u", user, "-o", "QOS %q|account %a").splitlines():
        jobs.update(line.split("|"))
    narrow = min(submits, key=lambda limit: limit.value - jobs[limit.of])
    return Allowance(array_size, narrow.value, jobs[narrow.of], running, f"{narrow.of} allows {narrow.value}")


class Limit(NamedTuple):
    kind: str
    """``submit`` or ``jobs``."""
    value: int
    of: str
    """``QOS …`` or ``account …``: whose jobs are counted."""


def _association(user: str, options: Mapping[str, Any]) -> tuple[dict[str, str], list[Limit]]:
    """The default QOS of the user's association and the limits on it."""
    fields = ("cluster", "account", "user", "partition", "maxjobs", "maxsubmitjobs", "grpjobs", "grpsubmitjobs")
    output = site.ask("sacctmgr", "-nP", "show", "assoc", f"user={user}", f"format={','.join(fields)},defaultqos")
    cluster = site.cluster_name()
    rows = [dict(zip((*fields, "qos"), line.split("|"), strict=True)) for line in output.splitlines()]
    rows = [row for row in rows if row["cluster"] == cluster]
    if not rows:
        return {"qos": "normal"}, []
    wanted = str(options.get("account") or os.environ.get("SBATCH_ACCOUNT") or "")
    ours = [row for row in rows if row["account"] == wanted] or rows
    partitions = str(options.get("partition") or "").split(",")
    ours = [row for row in ours if row["partition"] in ("", *partitions)] or ours
    row = ours[0]
    kinds = (("jobs", "maxjobs"), ("submit", "maxsubmitjobs"), ("jobs", "grpjobs"), ("submit", "grpsubmitjobs"))
    return row, _read(row, kinds, f"account {row['account']}")


def _qos(name: str) -> list[Limit]:
    fields = ("maxjobspu", "maxsubmitpu", "maxjobspa", "maxsubmitpa", "grpjobs", "grpsubmit")
    output = site.ask("sacctmgr", "-nP", "show", "qos", name, f"format={','.join(fields)}")
    if not output.strip():
        return []
    row = dict(zip(fields, output.splitlines()[0].split("|"), strict=True))
    kinds = [("submit" if "submit" in field else "jobs", field) for field in fields]
    return _read(row, kinds, f"QOS {name}")


def _read(row: Mapping[str, str], fields: Sequence[tuple[str, str]], name: str) -> list[Limit]:
    return [Limit(kind, int(row[field]), name) for kind, field in fields if row[field].isdigit()]
