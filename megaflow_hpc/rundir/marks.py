"""Reads and writes marks: small files whose existence is a signal. Batch scripts also run this module.

::

    RUN/ledger/finished         all blocks are done; contains their number; written by the pod that ends the last one
    RUN/ledger/open/<consumer>  lease of a consumer, which may still add blocks, so the campaign is not finished
    RUN/ledger/cancelled        the campaign was cancelled; lists its consumers; removed by ``resume``
    RUN/ledger/leaving/<pod>    this element of a pod array is draining and will not be requeued
    RUN/ledger/unstarted/<pod>  the last start ended before rank 0 took a lease: node, exit status, log path, log tail
    RUN/ledger/refused/<job>    Slurm refused to requeue this job: Unix time, role, node, log path, Slurm's message
    RUN/ledger/mpi[@<cluster>]  the ``srun --mpi`` type that connected the ranks after another type had failed

The batch shell of a pod and its rank 0 exchange files in a private directory (``MEGAFLOW_POD_DIR``)::

    drain                       the pod must drain; contains a key of :data:`WHY_DRAIN`, or is empty
    state                       the pod's final state, one of :data:`LAST_WORDS`
    preempted                   Slurm preempted the pod, so this start is not counted as one without progress
    progress                    this start has stored results
    world                       all ranks are connected, so later failures are not caused by the ``srun --mpi`` type
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megaflow_hpc.host.atomic import make_directory
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.layout import RunDir, read_json, write_record
from megaflow_hpc.texts import in_one_line

FINISHED = "ledger/finished"
"""Path of the finished mark, relative to RUN. The ledger writes it."""
OPEN = "ledger/open"
"""Directory of consumers' leases, relative to RUN."""
_JOB = re.compile(r"[0-9]+(_[0-9]+)?(@[A-Za-z0-9_-]+)?\Z")
_BLOCK = re.compile(r"\d{6,}\.json\Z")
DRAIN = "drain"
PREEMPTED = "preempted"
WHY_DRAIN = {
    "walltime": "the walltime is near",
    "now": "Slurm takes the allocation back (preempted, or cancelled by scancel)",
    "cancelled": "the campaign was cancelled",
    "stopped": "the run was interrupted",
    "leaving": "asked to leave, by scale",
    PREEMPTED: "Slurm preempts the allocation, and its grace time runs",
}
"""Meaning of each word in the drain file. After ``now`` and ``cancelled``, Slurm soon kills the step.

The file never contains ``preempted``, because rank 0 detects preemption on its own.
"""
STATE = "state"
PROGRESS = "progress"
WORLD = "world"
LAST_WORDS = ("done", "drained", "paused", "lost")
"""Final states of a pod: it stored all rollouts, released its blocks, stopped at a limit, or lost its blocks."""
ORDERLY = LAST_WORDS[:3]
"""Final states of a pod that ended normally."""

CERTAIN = (
    "MEGAFLOW_PYTHON=",
    "oom_kill",
    "DUE TO ",
    "pod: ",
    "trainer: ",
    "giving up: ",
    "Error: ",
    "srun: error: ",
    "slurmstepd: error: ",
    "slurmstepd-",
)
CAUSES = (*CERTAIN, "error")
"""Substrings of log lines that explain a failure better than the log's last line. The most informative comes first."""


@dataclass(frozen=True)
class Unstarted:
    """A pod whose last start ended before rank 0 took a lease."""

    pod: str
    node: str
    exit_status: int
    """Exit status of srun."""
    log: str
    cause: str
    """The log line that best explains the failure."""


@dataclass(frozen=True)
class Refused:
    """A job that Slurm refused to requeue, as recorded by its batch script."""

    job: str
    """Job id of the array element or of the trainer."""
    at: float
    """Unix timestamp of the last requeue request, in seconds."""
    role: str
    """Role of the job: ``pod``, ``server``, ``trainer`` or ``gather``."""
    log: str
    words: str
    """Slurm's error message, on one line."""


class CancelledMark(msgspec.Struct):
    """Content of the ``cancelled`` mark."""

    consumers: list[str] = []
    """Consumers that could still add blocks when the campaign was cancelled."""


class Marks:
    """Reads and writes the marks of one run."""

    def __init__(self, run: RunDir) -> None:
        self._finished, self._cancelled = run.path / FINISHED, run.ledger / "cancelled"
        self._open, self._tasks = run.path / OPEN, run.tasks
        self._leaving: Path = run.ledger / "leaving"
        self._unstarted: Path = run.ledger / "unstarted"
        self._refused: Path = run.ledger / "refused"
        self._logs: Path = run.logs
        self._leases: Path = run.ledger / "leases"

    @property
    def finished(self) -> bool:
        """True if every block is done and no consumer may add more. Needs one read, and two listings if the mark
        exists."""
        try:
            mark = json.loads(read_regular(self._finished) or b"{}")
        except FileNotFoundError:
            return False
        except ValueError:
            mark = {}
        return not self.open and counts(mark, blocks_listed(os.listdir(self._tasks) if self._tasks.is_dir() else ()))

    @property
    def open(self) -> list[str]:
        """Names of the consumers that may still add blocks."""
        return sorted(path.name for path in self._open.glob("[!.]*"))

    @property
    def cancelled(self) -> bool:
        """True if the campaign was cancelled."""
        return self._cancelled.exists()

    @property
    def over(self) -> bool:
        """True if the campaign is finished or cancelled. Engines and autoscalers then exit."""
        return self.finished or self.cancelled

    def cancel(self) -> None:
        """Marks the campaign as cancelled and closes its consumers' leases. The mark records their names."""
        consumers = sorted({*self.closed, *self.open})
        write_record(self._cancelled, CancelledMark(consumers))
        for consumer in consumers:
            (self._open / consumer).unlink(missing_ok=True)

    @property
    def closed(self) -> list[str]:
        """Names of the consumers that could still add blocks when the campaign was cancelled."""
        try:
            return read_json(self._cancelled, CancelledMark).consumers
        except (FileNotFoundError, ValueError):
            return []

    def uncancel(self) -> None:
        """Removes the cancelled mark, if any."""
        self._cancelled.unlink(missing_ok=True)

    def leave(self, pod: str) -> None:
        """Marks an element of a pod array (such as ``123_4``) as leaving. It drains and is not requeued."""
        make_directory(self._leaving)
        (self._leaving / pod).touch()

    def leaving(self) -> set[str]:
        """Returns the elements marked as leaving."""
        return {path.name for path in self._leaving.glob("*")}

    def unstarted(self) -> list[Unstarted]:
        """Returns the pods that failed to start and hold no lease."""
        pods = []
        paths = sorted(self._unstarted.glob("[!.]*"))
        started = {lease.name.rpartition(".")[0] for lease in self._leases.glob("*")} if paths else set()
        for path in paths:
            if path.name in started:
                continue
            with contextlib.suppress(OSError, ValueError):
                first, _, end = read_regular(path).decode("utf-8", "replace").partition("\n")
                node, status, log = first.split(" ", 2)
                pods.append(Unstarted(path.name, node, int(status), log, cause(end.splitlines())))
        return pods

    def forget_unstarted(self) -> None:
        """Removes all ``unstarted`` marks. Call it before the pods start again."""
        for path in self._unstarted.glob("*"):
            path.unlink(missing_ok=True)

    def refused(self) -> list[Refused]:
        """Returns the jobs that Slurm refused to requeue and that have not started again since."""
        jobs = []
        for path in sorted(self._refused.glob("[0-9]*")):
            if not _JOB.match(path.name):
                continue
            with contextlib.suppress(OSError, ValueError):
                first, _, words = read_regular(path).decode("utf-8", "replace").partition("\n")
                at, role, _, log = first.split(" ", 3)
                jobs.append(Refused(path.name, float(at), role, in_one_line(log), in_one_line(words.strip())))
        return jobs

    def forget_refused(self, jobs: Iterable[str] | None = None) -> None:
        """Removes the ``refused`` marks of the given jobs.

        ``None`` means all jobs. In that case, also resets the counts of consecutive failures of engine servers and
        trainers.
        """
        if jobs is None:
            jobs = [path.name for path in self._refused.glob("*")]
            for count in self._logs.glob("[st]*.requeues"):
                count.unlink(missing_ok=True)
        for job in jobs:
            (self._refused / job).unlink(missing_ok=True)


def blocks_listed(names: Iterable[str]) -> int:
    """Returns the number of blocks among the file names in ``tasks/``."""
    return sum(_BLOCK.match(name) is not None for name in names)


def counts(mark: Mapping[str, object] | None, blocks: int) -> bool:
    """Returns whether a finished mark covers all ``blocks`` blocks. A mark without a number covers any number of
    blocks."""
    return mark is not None and mark.get("blocks", blocks) == blocks


def cause(lines: Sequence[str]) -> str:
    """Returns the line of a log's tail that best explains a failure."""
    texts = [line.strip() for line in lines if line.strip()]
    requeued = [n for n, text in enumerate(texts) if "DUE TO JOB REQUEUE" in text]
    if requeued:  # earlier lines belong to an earlier start
        texts = texts[requeued[-1] + 1 :]
    return explained(texts, CAUSES) or (texts[-1] if texts else "nothing was written")


def explained(lines: Sequence[str], marks: Sequence[str] = CERTAIN) -> str:
    """Returns the first line with the most informative of the given substrings. Returns an empty string if none
    matches."""
    for mark in marks:
        if matching := [line for line in lines if mark in line]:
            return matching[0]
    return ""


if __name__ == "__main__":  # for batch scripts
    raise SystemExit(0 if Marks(RunDir(sys.argv[1])).over else 1)
