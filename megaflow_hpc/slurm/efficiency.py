"""What jobs held and used, by one sacct query for all of a run's jobs (one for each cluster that has any of them).

::

    RUN/ledger/accounting.json     what was said of jobs that are final, by job or array

A job is final some minutes after its last element has ended: nothing is asked of it again, so a report every minute
asks for what still runs. Whoever cannot write the file asks for all.
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

SETTLED_S = 300.0
"""Seconds after a job's end in which slurmdbd may still hear of it, or somebody may requeue it."""
FIELDS = "JobID,State,Start,End,AllocCPUS,TotalCPU,AllocTRES,TRESUsageInTot"


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


Known = dict[str, list[Efficiency]]
"""By job or array."""


def efficiencies(job_ids: Iterable[str], kept: Path | None = None) -> list[Efficiency]:
    """Returns what ``seff`` would say of every start of every element.

    Args:
        kept: file in which what is final is kept; without one all jobs are asked for.

    Raises:
        SiteError: There is no accounting, or it does not answer.
    """
    job_ids, known = list(job_ids), _read(kept)
    found: Known = {}
    final: Known = {}
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


def _asked(cluster: str, numbers: Iterable[str]) -> tuple[Known, set[str]]:
    """What accounting says of jobs of one cluster, and those of them of which it may say more."""
    output = ask("sacct", *on(cluster), "-n", "-P", "-D", "-j", ",".join(numbers), "-o", FIELDS, epoch=True)
    found: Known = {}
    open_: set[str] = set()
    settled = time.time() - SETTLED_S
    for job_id, state, start, end, cores, cpu, held, used in (line.split("|", 7) for line in output.splitlines()):
        array = array_of(named(job_id.partition(".")[0].partition("+")[0], cluster))
        starts = found.setdefault(array, [])
        if "." in job_id:  # a step, which comes behind its job
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
            use = Use(named(job_id, cluster), float(start), ended_at, int(cores or 0), count)
            starts.append(Efficiency(use, state.split(" ")[0], _duration_s(cpu), _megabytes(held), None))
    return found, open_


def _read(kept: Path | None) -> Known:
    """What is kept; nothing of a file that is missing or damaged."""
    if kept is None:
        return {}
    try:
        return msgspec.json.decode(kept.read_bytes(), type=Known)
    except (OSError, ValueError):
        return {}


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
