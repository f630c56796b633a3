"""Flag files: files whose existence is the message. Batch scripts of a run call this module by its name.

::

    RUN/ledger/finished         all blocks are done, and this is their number; the pod that ends the last one writes it
    RUN/ledger/open/<consumer>  the lease of a consumer, who may add blocks: the campaign is not finished
    RUN/ledger/cancelled        the campaign was cancelled, and these were its consumers; ``resume`` removes the file
    RUN/ledger/leaving/<pod>    this element of a pod array drains and is not requeued
    RUN/ledger/unstarted/<pod>  its last start ended before rank 0 had its lease: node, exit status, log and its end
    RUN/ledger/mpi[@<cluster>]  the type of srun --mpi by which ranks found each other after another type had failed

The batch shell of a pod and its rank 0 exchange files in a private directory (``MEGAFLOW_POD_DIR``)::

    drain                       the pod must drain; holds one of :data:`WHY_DRAIN`, or nothing
    state                       the pod's last word, one of :data:`LAST_WORDS`
    progress                    this start has stored something, so it was not in vain
    world                       the ranks have found each other, so later failures are not due to the type of srun --mpi
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
from megaflow_hpc.rundir.json_files import read_json, write_record
from megaflow_hpc.rundir.layout import RunDir

FINISHED = "ledger/finished"
"""Path of the finished mark in the run directory. The ledger's rules publish it."""
OPEN = "ledger/open"
"""Path of the directory of open leases in the run directory."""
_PLANNED = re.compile(r"\d{6}\.json\Z")
DRAIN = "drain"
WHY_DRAIN = {
    "walltime": "the walltime is near",
    "now": "Slurm takes the allocation back (preempted, or cancelled by scancel)",
    "cancelled": "the campaign was cancelled",
    "stopped": "the run was interrupted",
    "leaving": "asked to leave, by scale",
}
"""Words of the drain file and their meaning. After ``now`` and ``cancelled`` Slurm kills the step soon."""
STATE = "state"
PROGRESS = "progress"
WORLD = "world"
LAST_WORDS = ("done", "drained", "paused", "lost")
"""All rollouts are stored; blocks were given back; a limit stopped the pod; another pod took the blocks."""
ORDERLY = LAST_WORDS[:3]
"""Last words of a pod that ended as it should."""

CAUSES = ("pod: ", "trainer: ", "giving up: ", "Error: ", "srun: error: ", "slurmstepd: error: ", "error")
"""Parts of log lines that explain the end better than the last line does. The first one explains most."""


@dataclass(frozen=True)
class Unstarted:
    """A pod whose last start ended before rank 0 had its lease."""

    pod: str
    node: str
    exit_status: int
    """Exit status of srun."""
    log: str
    cause: str
    """The line of the log that tells most about the cause."""


class CancelledMark(msgspec.Struct):
    """The mark of a cancelled campaign."""

    consumers: list[str] = []
    """The consumers that could add blocks."""


class Marks:
    """The flag files of one run."""

    def __init__(self, run: RunDir) -> None:
        self._finished, self._cancelled = run.path / FINISHED, run.ledger / "cancelled"
        self._open, self._tasks = run.path / OPEN, run.tasks
        self._leaving: Path = run.ledger / "leaving"
        self._unstarted: Path = run.ledger / "unstarted"
        self._leases: Path = run.ledger / "leases"

    @property
    def finished(self) -> bool:
        """Every block is done and no consumer may add some. Costs a read, and two listings if there is a mark."""
        try:
            mark = json.loads(read_regular(self._finished) or b"{}")
        except FileNotFoundError:
            return False
        except ValueError:
            mark = {}
        return not self.open and counts(mark, planned(os.listdir(self._tasks) if self._tasks.is_dir() else ()))

    @property
    def open(self) -> list[str]:
        """The consumers that may add blocks."""
        return sorted(path.name for path in self._open.glob("[!.]*"))

    @property
    def cancelled(self) -> bool:
        """Whether the campaign was cancelled."""
        return self._cancelled.exists()

    @property
    def over(self) -> bool:
        """Whether the campaign is finished or cancelled: engines and autoscalers leave."""
        return self.finished or self.cancelled

    def cancel(self) -> None:
        """Marks the campaign as cancelled, and closes it to consumers. The mark remembers them."""
        consumers = sorted({*self.closed, *self.open})
        write_record(self._cancelled, CancelledMark(consumers))
        for consumer in consumers:
            (self._open / consumer).unlink(missing_ok=True)

    @property
    def closed(self) -> list[str]:
        """The consumers that a cancelled campaign had."""
        try:
            return read_json(self._cancelled, CancelledMark).consumers
        except (FileNotFoundError, ValueError):
            return []

    def uncancel(self) -> None:
        """Removes the mark of a cancelled campaign, if there is one."""
        self._cancelled.unlink(missing_ok=True)

    def leave(self, pod: str) -> None:
        """Marks an element of a pod array (``123_4``) as leaving. It is not requeued when it has drained."""
        make_directory(self._leaving)
        (self._leaving / pod).touch()

    def leaving(self) -> set[str]:
        """Returns the elements that are leaving."""
        return {path.name for path in self._leaving.glob("*")}

    def unstarted(self) -> list[Unstarted]:
        """Returns the pods of which no start ever wrote a lease."""
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
        """Removes these flags before the pods are started again."""
        for path in self._unstarted.glob("*"):
            path.unlink(missing_ok=True)


def planned(names: Iterable[str]) -> int:
    """Returns how many of the names in ``tasks/`` are planned blocks. Handed-off blocks have one digit more."""
    return sum(_PLANNED.match(name) is not None for name in names)


def counts(mark: Mapping[str, object] | None, blocks: int) -> bool:
    """Tells whether a finished mark is about all blocks. An old mark without a number is.

    Args:
        blocks: number of blocks, without handed-off ones.
    """
    return mark is not None and mark.get("blocks", blocks) == blocks


def cause(lines: Sequence[str]) -> str:
    """Returns the line of a log's end that tells most about the cause."""
    texts = [line.strip() for line in lines if line.strip()]
    for mark in CAUSES:
        if matching := [line for line in texts if mark in line]:
            return matching[0]
    return texts[-1] if texts else "nothing was written"


if __name__ == "__main__":  # for batch scripts
    raise SystemExit(0 if Marks(RunDir(sys.argv[1])).over else 1)
