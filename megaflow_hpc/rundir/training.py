"""What a trainer leaves for others to see: which step is done, who trains, and the last word on its last start.

::

    RUN/training/<policy>/
      commits/000012.json     :class:`Commit`: step 12 is done
      trainers/000002.json    :class:`Trainer`: the second start of the trainer; earlier ones commit no more
      last                    what became of the last start that has ended, and the end of its log; its batch shell's
      gpu-<job>-<node>.*      of GPUs that trainer and engine use in turn: :class:`SharedGpu`

The rest there is the trainer's own (:mod:`megaflow_hpc.training`).
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

TOLD = 4000
"""Bytes of a log's end that are kept beside the last word."""

R = TypeVar("R", bound=msgspec.Struct)

_NUMBERED = re.compile(r"(\d{6,})\.json")
"""Name of a record's file: the number of what it is about."""
FOR_GOOD = ("failed", "lost")
"""Last words of a trainer that nobody starts again: a mistake, or too many starts that committed nothing."""


def numbered(folder: Path) -> list[int]:
    """Returns the numbers of a directory's records, sorted; none without the directory. Raises OSError otherwise."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name)))


class Commit(msgspec.Struct, kw_only=True):
    """A step that is done."""

    step: int
    plan: str = ""
    """Digest of the plan."""
    checkpoint: str | None = None
    """Directory of the trainer's state after the step, relative to RUN where it lies there; ``None``: none was kept."""
    weights: int = 0
    """Number of the newest weight version that the policy had then; 0: the campaign's own model."""
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
        """Returns what is said of this process."""
        job = os.environ.get("SLURM_JOB_ID", "")
        return cls(consumer=consumer, node=node_name(), pid=os.getpid(), job_id=job, at=time.time())


@dataclass(frozen=True)
class LastWord:
    """What became of a start of the trainer."""

    word: str
    """``done``; ``requeued``; ``left``: Slurm, or who runs the job, decides; or one of :data:`FOR_GOOD`."""
    node: str
    exit_status: int
    log: str
    cause: str
    """The line of the log that says why, as far as that can be told."""


def say_last(run: RunDir, policy: str, word: str, exit_status: int, log: Path, written: int = 0) -> None:
    """Leaves the last word on a start of the trainer, as ``trainer.sh`` does.

    Args:
        written: bytes of the log that earlier starts wrote.
    """
    with open(log, "rb") as file:
        file.seek(max(written, file.seek(0, os.SEEK_END) - TOLD))
        end = file.read()
    said = f"{word} {os.uname().nodename} {exit_status} {log}\n".encode()
    write_atomic(run.training / policy / "last", said + end)


class Wish(msgspec.Struct, frozen=True):
    """The trainer's file: it wants the GPUs, or has them."""

    turn: str
    """Names one use of them; no other start has the same."""
    process: str
    """Which process ends with the last one that may use them (:class:`~megaflow_hpc.host.process.Identity`)."""
    boot: str


class Given(msgspec.Struct, frozen=True):
    """The server's file: no engine of it uses the GPUs until the trainer's file is gone, or its process is."""

    turn: str
    wake_s: float = 0.0
    """Seconds in which the engine woke after the turn before, weights that it loaded then included."""


class SharedGpu:
    """GPUs that a policy's trainer and its engine use in turn: two files, each of one writer, and no lock.

    Both are on one node and in one job, so that each sees whether a process of the other lives. The trainer touches the
    GPUs only while the server's file names its turn; the server starts or wakes an engine only while no trainer that
    lives wants them. So neither has to know whether the other was killed, or when.
    """

    def __init__(self, run: RunDir, policy: str) -> None:
        name = f"gpu-{os.environ.get('SLURM_JOB_ID') or 'local'}-{node_name()}"
        folder = run.training / policy
        self._wish_file, self._given_file = folder / f"{name}.wanted", folder / f"{name}.given"
        self._wish: Wish | None = None

    # --- the trainer's side ---

    def want(self, turn: str, process: Identity) -> None:
        """Says that the trainer wants the GPUs, as long as the process lives or until :meth:`release`."""
        write_atomic(self._wish_file, msgspec.json.encode(Wish(turn, str(process), boot_id())))

    def given(self, turn: str) -> Given | None:
        """Returns what the server says to this turn; ``None`` while it does not leave the GPUs to it."""
        given = try_read_json(self._given_file, Given)
        return given if given and given.turn == turn else None

    def release(self) -> None:
        """Says that the trainer holds nothing on the GPUs any more."""
        self._wish_file.unlink(missing_ok=True)

    # --- the server's side ---

    def wanted(self) -> str:
        """Returns the turn of the trainer that wants the GPUs, or has them; empty if none that lives does."""
        try:
            self._wish = read_json(self._wish_file, Wish)
        except FileNotFoundError:
            self._wish = None
        except (OSError, ValueError):  # a file system that is away for a moment: as it was
            pass
        wish = self._wish
        process = Identity.parse(wish.process) if wish and wish.boot == boot_id() else None
        return wish.turn if wish and process and process.alive() else ""

    def give(self, given: Given) -> None:
        """Leaves the GPUs to a turn. Raises OSError."""
        write_atomic(self._given_file, msgspec.json.encode(given))


class TrainingView:
    """What is to be seen of one policy's training; what was read once is not read again."""

    def __init__(self, run: RunDir, policy: str) -> None:
        self.policy, self._path, self._lease = policy, run.training / policy, run.ledger / "open" / policy
        self._commits: dict[int, Commit] = {}

    @property
    def open(self) -> bool:
        """Whether the trainer may yet ask for rollouts: it has not come to its end."""
        return self._lease.exists()

    def commits(self, count: int) -> list[Commit]:
        """Returns the last ``count`` commits, oldest first; those that cannot be read are left out."""
        known = self._commits
        numbers = self._numbers("commits")[-count:]
        # The last one may yet be written again, with a checkpoint.
        self._commits = {
            number: commit
            for number in numbers
            if (commit := (number != numbers[-1] and known.get(number)) or self._read(Commit, "commits", number))
        }
        return list(self._commits.values())

    def trainers(self) -> list[Trainer]:
        """Returns every start of the trainer, oldest first."""
        starts = (self._read(Trainer, "trainers", number) for number in self._numbers("trainers"))
        return [start for start in starts if start]

    def last_word(self) -> LastWord | None:
        """Returns the last word on the last start that has ended; ``None`` where none has, or it cannot be read."""
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
