"""Files by which a trainer shows its state to other processes: finished steps, its starts, and the outcome of its last
start.

::

    RUN/training/<policy>/
      commits/000012.json     :class:`Commit`: step 12 is done
      trainers/000002.json    :class:`Trainer`: the second start of the trainer; earlier starts no longer commit
      last                    outcome of the last ended start, and the end of its log; written by the batch shell
      gpu-<job>-<node>.*      GPUs that trainer and engine use in turn: :class:`SharedGpu`

The other files there are private to the trainer (:mod:`megaflow_hpc.training`).
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
from megaflow_hpc.rundir.json_files import read_json, try_read_json
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import cause

LAST_WORD_LOG_BYTES = 4000
"""Bytes of a log's end that are stored with the last word."""

R = TypeVar("R", bound=msgspec.Struct)

_NUMBERED = re.compile(r"(\d{6,})\.json")
"""File name of a record. It contains the record's number."""
FOR_GOOD = ("failed", "lost")
"""Last words of a trainer that is not restarted: an error, or too many starts that committed nothing."""


def numbered(folder: Path) -> list[int]:
    """Returns the sorted numbers of a directory's records. Empty if there is no directory. Raises OSError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = map(_NUMBERED.fullmatch, names)
    return sorted(int(match[1]) for match in matches if match)


class Commit(msgspec.Struct, kw_only=True):
    """A finished step."""

    step: int
    plan: str = ""
    """Digest of the plan."""
    checkpoint: str | None = None
    """Directory of the trainer's state after the step, relative to RUN if it is inside. ``None`` if no state was kept.
    """
    weights: int = 0
    """Number of the policy's newest weight version after the step. 0 means the campaign's own model."""
    trainer: int = 0
    metrics: dict[str, float] = {}
    at: float = 0.0
    """Seconds UTC."""


class Trainer(msgspec.Struct, kw_only=True):
    """One start of a policy's trainer."""

    consumer: str = ""
    node: str = ""
    pid: int = 0
    job_id: str = ""
    at: float = 0.0

    @classmethod
    def here(cls, consumer: str) -> Trainer:
        """Returns the record of this process."""
        job = os.environ.get("SLURM_JOB_ID", "")
        return cls(consumer=consumer, node=node_name(), pid=os.getpid(), job_id=job, at=time.time())


@dataclass(frozen=True)
class LastWord:
    """The outcome of a start of the trainer."""

    word: str
    """``done``; ``requeued``; ``left`` if Slurm or the job's owner decides; or one of :data:`FOR_GOOD`."""
    node: str
    exit_status: int
    log: str
    cause: str
    """The line of the log that explains the outcome, if one was found."""


def say_last(run: RunDir, policy: str, word: str, exit_status: int, log: Path, written: int = 0) -> None:
    """Writes the last word on a start of the trainer, in the same way as ``trainer.sh``.

    Args:
        written: Number of bytes that earlier starts wrote to the log.
    """
    with open(log, "rb") as file:
        file.seek(max(written, file.seek(0, os.SEEK_END) - LAST_WORD_LOG_BYTES))
        end = file.read()
    line = f"{word} {os.uname().nodename} {exit_status} {log}\n".encode()
    write_atomic(run.training / policy / "last", line + end)


class GpuRequest(msgspec.Struct, frozen=True):
    """The trainer's file. It means that the trainer wants the GPUs or has them."""

    turn: str
    """Unique name of one use of the GPUs."""
    process: str
    """The process that lives as long as any process may use them (:class:`~megaflow_hpc.host.process.Identity`)."""
    boot: str


class GpuGrant(msgspec.Struct, frozen=True):
    """The server's file. None of its engines uses the GPUs while the trainer's file exists and its process lives."""

    turn: str
    wake_s: float = 0.0
    """Seconds that the engine took to wake after the previous turn, including loading of weights."""


class SharedGpu:
    """GPUs that a policy's trainer and its engine use in turn. Two files, each with one writer, replace a lock.

    Both sides run on one node in one job, so each can check whether a process of the other lives. The trainer uses the
    GPUs only while the server's file names its turn. The server starts or wakes an engine only while no live trainer
    wants them. So neither side needs to know whether or when the other was killed.
    """

    def __init__(self, run: RunDir, policy: str) -> None:
        name = f"gpu-{os.environ.get('SLURM_JOB_ID') or 'local'}-{node_name()}"
        folder = run.training / policy
        self._wish_file, self._given_file = folder / f"{name}.wanted", folder / f"{name}.given"
        self._wish: GpuRequest | None = None

    # --- used by the trainer ---

    def want(self, turn: str, process: Identity) -> None:
        """Requests the GPUs, for as long as the process lives or until :meth:`release`."""
        write_atomic(self._wish_file, msgspec.json.encode(GpuRequest(turn, str(process), boot_id())))

    def given(self, turn: str) -> GpuGrant | None:
        """Returns the server's answer to this turn. ``None`` while it does not release the GPUs for it."""
        given = try_read_json(self._given_file, GpuGrant)
        return given if given and given.turn == turn else None

    def release(self) -> None:
        """Reports that the trainer holds nothing on the GPUs any more."""
        self._wish_file.unlink(missing_ok=True)

    # --- used by the server ---

    def wanted(self) -> str:
        """Returns the turn of a live trainer that wants or has the GPUs. Empty without one."""
        try:
            self._wish = read_json(self._wish_file, GpuRequest)
        except FileNotFoundError:
            self._wish = None
        except (OSError, ValueError):  # the file system is temporarily unavailable: keep the last answer
            pass
        wish = self._wish
        process = Identity.parse(wish.process) if wish and wish.boot == boot_id() else None
        return wish.turn if wish and process and process.alive() else ""

    def give(self, given: GpuGrant) -> None:
        """Releases the GPUs to a turn. Raises OSError."""
        write_atomic(self._given_file, msgspec.json.encode(given))


class TrainingView:
    """The visible state of one policy's training. Files that were read once are cached."""

    def __init__(self, run: RunDir, policy: str) -> None:
        self.policy, self._path, self._lease = policy, run.training / policy, run.ledger / "open" / policy
        self._commits: dict[int, Commit] = {}

    @property
    def open(self) -> bool:
        """True if the trainer may still request rollouts, because it has not ended."""
        return self._lease.exists()

    def commits(self, count: int) -> list[Commit]:
        """Returns the last ``count`` commits, oldest first. Unreadable ones are left out."""
        numbers = self._numbers("commits")[-count:]
        commits = {}
        for number in numbers:
            commit = self._commits.get(number)
            if commit is None or number == numbers[-1]:  # the last commit may be rewritten with a checkpoint
                commit = self._read(Commit, "commits", number)
            if commit is not None:
                commits[number] = commit
        self._commits = commits
        return list(commits.values())

    def trainers(self) -> list[Trainer]:
        """Returns every start of the trainer, oldest first."""
        starts = (self._read(Trainer, "trainers", number) for number in self._numbers("trainers"))
        return [start for start in starts if start]

    def last_word(self) -> LastWord | None:
        """Returns the last word on the last ended start. ``None`` if no start has ended or the file is unreadable."""
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
