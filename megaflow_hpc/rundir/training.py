"""Reads and writes the files in which a trainer reports its state: its commits, its starts, and how the last start
ended.

::

    RUN/training/<policy>/
      commits/000012.json     :class:`Commit`: step 12 is complete
      amendments/000003.json  :class:`~megaflow_hpc.rundir.amendments.Amendment`: a change to an open step
      trainers/000002.json    :class:`Trainer`: the trainer's second start; earlier starts can no longer commit
      last                    how the latest start ended, and the end of its log; written by the batch shell
      gpu-<job>-<node>.*      GPUs that the trainer and the engine use in turn: :class:`SharedGpu`

All other files in this directory are private to the trainer (:mod:`megaflow_hpc.training`).
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.host.process import Identity, boot_id, node_name
from megaflow_hpc.rundir.layout import RunDir, read_json, try_read_json
from megaflow_hpc.rundir.marks import cause

LAST_WORD_LOG_BYTES = 4000
"""Number of bytes from the end of the log that are stored when a start ends."""

R = TypeVar("R", bound=msgspec.Struct)

_NUMBERED = re.compile(r"(\d{6,})\.json")
"""Matches the file name of a numbered record."""
FOR_GOOD = ("failed", "lost")
"""Outcomes after which a trainer is not restarted: an error, or too many starts without a commit."""


def numbered(folder: Path) -> list[int]:
    """Returns the sorted numbers of the records in a directory. Returns an empty list if it does not exist. Raises
    OSError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = map(_NUMBERED.fullmatch, names)
    return sorted(int(match[1]) for match in matches if match)


class Commit(msgspec.Struct, kw_only=True):
    """Record of a completed training step."""

    step: int
    plan: str = ""
    """Digest of the step's plan."""
    columns: str = ""
    """Digest of the file with the step's columns, which are extra values for each token. Empty if there is none."""
    checkpoint: str | None = None
    """Checkpoint directory saved after the step, relative to RUN if inside it. ``None`` if none was saved."""
    weights: int = 0
    """The policy's newest weight version after the step. 0 is the campaign's initial model."""
    trainer: int = 0
    metrics: dict[str, float] = {}
    amendments: int = 0
    """Number of amendments that existed when the step was trained (:mod:`~megaflow_hpc.rundir.amendments`)."""
    at: float = 0.0
    """Commit time, as a Unix timestamp in seconds."""


class Trainer(msgspec.Struct, kw_only=True):
    """Record of a start of a policy's trainer."""

    consumer: str = ""
    node: str = ""
    pid: int = 0
    job_id: str = ""
    at: float = 0.0

    @classmethod
    def here(cls, consumer: str) -> Trainer:
        """Creates a record of the current process."""
        job = os.environ.get("SLURM_JOB_ID", "")
        return cls(consumer=consumer, node=node_name(), pid=os.getpid(), job_id=job, at=time.time())


@dataclass(frozen=True)
class LastWord:
    """How a start of the trainer ended."""

    word: str
    """``done``, ``requeued``, ``left`` (ended by Slurm or the job's owner), or one of :data:`FOR_GOOD`."""
    node: str
    exit_status: int
    log: str
    cause: str
    """The log line that best explains the end."""


def say_last(run: RunDir, policy: str, word: str, exit_status: int, log: Path, written: int = 0) -> None:
    """Records how a start of the trainer ended, with the end of its log. ``trainer.sh`` uses the same format.

    Args:
        written: Number of bytes that earlier starts wrote to the log.
    """
    with open(log, "rb") as file:
        file.seek(max(written, file.seek(0, os.SEEK_END) - LAST_WORD_LOG_BYTES))
        end = file.read()
    line = f"{word} {os.uname().nodename} {exit_status} {log}\n".encode()
    write_atomic(run.training / policy / "last", line + end)


class GpuRequest(msgspec.Struct, frozen=True):
    """The trainer's request for the GPUs. Its file exists while the trainer wants or uses them."""

    turn: str
    """Unique id of this use of the GPUs."""
    process: str
    """Process that outlives all other processes using the GPUs (:class:`~megaflow_hpc.host.process.Identity`)."""
    boot: str


class GpuGrant(msgspec.Struct, frozen=True):
    """The server's permission to use the GPUs. Its engine does not use them while the request exists and the trainer
    lives."""

    turn: str
    wake_s: float = 0.0
    """Seconds that the engine needed to wake up after the previous turn, including loading weights."""


class SharedGpu:
    """GPUs that a policy's trainer and engine use in turn. Two single-writer files serve as the lock.

    Both sides run on the same node in the same job, so each can check whether the other's process is alive. The trainer
    uses the GPUs only while the server's file grants its turn. The server starts or wakes its engine only while no live
    trainer wants the GPUs. Neither side needs to be notified if the other is killed.
    """

    def __init__(self, run: RunDir, policy: str) -> None:
        name = f"gpu-{os.environ.get('SLURM_JOB_ID') or 'local'}-{node_name()}"
        folder = run.training / policy
        self._wish_file, self._given_file = folder / f"{name}.wanted", folder / f"{name}.given"
        self._wish: GpuRequest | None = None

    # --- used by the trainer ---

    def want(self, turn: str, process: Identity) -> None:
        """Requests the GPUs. The request lasts until :meth:`release` is called or the process ends."""
        write_atomic(self._wish_file, msgspec.json.encode(GpuRequest(turn, str(process), boot_id())))

    def given(self, turn: str) -> GpuGrant | None:
        """Returns the server's grant for this turn. Returns ``None`` while the server still uses the GPUs."""
        given = try_read_json(self._given_file, GpuGrant)
        return given if given and given.turn == turn else None

    def release(self) -> None:
        """Withdraws the request. Call it once the trainer no longer uses the GPUs."""
        self._wish_file.unlink(missing_ok=True)

    # --- used by the server ---

    def wanted(self) -> str:
        """Returns the turn that a live trainer requests. Returns an empty string if no live trainer wants or uses the
        GPUs."""
        try:
            self._wish = read_json(self._wish_file, GpuRequest)
        except FileNotFoundError:
            self._wish = None
        except (OSError, ValueError):  # the file system is temporarily unavailable: keep the last value
            pass
        wish = self._wish
        process = Identity.parse(wish.process) if wish and wish.boot == boot_id() else None
        return wish.turn if wish and process and process.alive() else ""

    def give(self, given: GpuGrant) -> None:
        """Grants the GPUs to the trainer for one turn. Raises OSError."""
        write_atomic(self._given_file, msgspec.json.encode(given))


class TrainingView:
    """Read-only view of a policy's training. Caches commits."""

    def __init__(self, run: RunDir, policy: str) -> None:
        self.policy, self._path, self._lease = policy, run.training / policy, run.ledger / "open" / policy
        self._commits: dict[int, Commit] = {}

    @property
    def open(self) -> bool:
        """True while the trainer may still request rollouts."""
        return self._lease.exists()

    def commits(self, count: int) -> list[Commit]:
        """Returns the ``count`` most recent commits, oldest first. Skips unreadable ones."""
        numbers = self._numbers("commits")[-count:]
        commits = {}
        for number in numbers:
            commit = self._commits.get(number)
            if commit is None or number == numbers[-1]:  # the last commit may be rewritten to add a checkpoint
                commit = self._read(Commit, "commits", number)
            if commit is not None:
                commits[number] = commit
        self._commits = commits
        return list(commits.values())

    def trainers(self) -> list[Trainer]:
        """Returns all starts of the trainer, oldest first."""
        starts = (self._read(Trainer, "trainers", number) for number in self._numbers("trainers"))
        return [start for start in starts if start]

    def last_word(self) -> LastWord | None:
        """Returns how the trainer's latest start ended. Returns ``None`` if that is unknown."""
        try:
            first, _, end = read_regular(self._path / "last").decode("utf-8", "replace").partition("\n")
            word, node, status, log = first.split(" ", 3)
            return LastWord(word, node, int(status), log, cause(end.splitlines()))
        except (OSError, ValueError):
            return None

    def _numbers(self, kind: str) -> list[int]:
        try:
            return numbered(self._path / kind)
        except OSError:
            return []

    def _read(self, kind: type[R], folder: str, number: int) -> R | None:
        return try_read_json(self._path / folder / f"{number:06d}.json", kind)
