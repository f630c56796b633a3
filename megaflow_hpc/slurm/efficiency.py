"""Read what jobs requested and used, with one sacct query per cluster for all jobs of a run.

::

    RUN/ledger/accounting.json     cached accounting of final jobs, by job or array

A job is final some minutes after its last element has ended. Final jobs are not queried again, so a report that runs
every minute only queries live jobs. A process that cannot write the cache queries all jobs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from megaflow_hpc.host.atomic import without_links, write_json
from megaflow_hpc.slurm.accounting import LIVE
from megaflow_hpc.slurm.ids import array_of, by_cluster, named, on
from megaflow_hpc.slurm.site import ask

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
    job_ids, known = list(job_ids), _read(kept)
    found: StartsByJob = {}
    final: StartsByJob = {}
    for cluster, numbers in by_cluster(job for job in job_ids if job not in known).items():
        said, open_ = _asked(cluster, numbers)
        found |= said
        final |= {job: starts for job, starts in said.items() if job not in open_}
    if kept is not None and final:
        with suppress(OSError):  # another user's run, or a full disk
            with without_links(kept.parent) as folder:
                write_json(folder / kept.name, msgspec.to_builtins(_read(kept) | final))
    every = known | found
    return [start for job in job_ids for start in every.get(job, ())]


def _asked(cluster: str, numbers: Iterable[str]) -> tuple[StartsByJob, set[str]]:
    """Query one cluster. Returns the starts by job, and the jobs that are not final yet."""
    output = ask("sacct", *on(cluster), "-n", "-P", "-D", "-j", ",".join(numbers), "-o", FIELDS, epoch=True)
    found: StartsByJob = {}
    open_: set[str] = set()
    settled = time.time() - ACCOUNTING_DELAY_S
    for job_id, state, start, end, cores, cpu, held, used in (line.split("|", 7) for line in output.splitlines()):
        array = array_of(named(job_id.partition(".")[0].partition("+")[0], cluster))
        starts = found.setdefault(array, [])
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
    return found, open_


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
    return float(match[1]) * 1024.0 ** ("KMGTP".find(match[2]) - 1 if match[2] else -2) if match else None
