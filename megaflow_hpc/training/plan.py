"""What a trainer keeps under ``RUN/training/<policy>``: batches asked for, plans of steps, commits.

::

    batches/000003.json     :class:`TaskBatch`: tasks that were asked for together
    refills/012001.json     :class:`Refill`: tasks that step 12 asked for in the place of groups that were dropped
    added/3610421.json      :class:`Added`: tasks that the trainer asked for by itself
    steps/000012.json       :class:`StepPlan`: what step 12 trains on, and what it drops; never changed
    commits/000012.json     step 12 is done: its checkpoint, its weights, its metrics
    trainers/000002.json    the second start of the trainer; earlier ones commit no more
    checkpoints/12/         the trainer's own files

A plan is claimed before anything of it is used: its file is linked to the step's number, which succeeds once, and who
comes second takes what is there. So a step is always made of the same rollouts, whoever dies and however often it is
begun; a trainer that was thought dead and lives on can at most do the same step again, and does not commit it.
Others look at commits and starts too: their records are in :mod:`megaflow_hpc.rundir.training`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megaflow_hpc.errors import ConfigError, LedgerError
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit, Trainer, numbered

FORMAT_VERSION = 1

R = TypeVar("R", bound=msgspec.Struct)


class RecordPlace(msgspec.Struct, array_like=True, frozen=True):
    """Where a journal holds a rollout."""

    journal: str
    """File name in ``RUN/journal``."""
    start: int
    """Its first byte."""
    epoch: int = 0


class PlannedRollout(msgspec.Struct, kw_only=True):
    """One rollout of a step."""

    id: str
    task: str
    group: str
    place: RecordPlace
    reward: float | None = None
    """``None`` unless verified."""
    advantage: float = 0.0
    """Of each of its sampled tokens."""
    weight: float = 1.0
    """Of its tokens in the loss."""
    oldest: int = -1
    """Ordinal of the oldest version that sampled a token of it; -1: nothing is sampled."""
    replayed: bool = False
    """Whether an earlier step trained on it as well."""
    lengths: list[int] = []
    """Tokens of each of its sequences of this policy."""
    sampled: list[int] = []
    """Sampled tokens of each of them."""


class Settled(msgspec.Struct, kw_only=True, frozen=True):
    """What is over and what waits after a step, as far as the places read so far tell."""

    cursor: dict[str, Any] = {}
    """Where the reading of the journals goes on."""
    waiting: list[RecordPlace] = []
    """Rollouts that were read and are of no step yet."""
    first_block: int = 0
    """Every group in blocks below this one is settled."""
    groups: list[str] = []
    """Groups in later blocks that are settled."""


class StepPlan(msgspec.Struct, kw_only=True):
    """What one step is made of."""

    format_version: int = FORMAT_VERSION
    step: int
    """From 1."""
    version: int
    """Ordinal of the policy's newest weights when it was planned: staleness counts from here."""
    seed: list[int]
    """Of every random choice in the step."""
    rollouts: list[PlannedRollout] = []
    drops: dict[str, str] = {}
    """Rollout or group → why no step trains on it."""
    settled: Settled = Settled()
    state: dict[str, Any] = {}
    """Of the data algorithms, after this step."""
    trainer: int = 0
    """The start of the trainer that made it."""

    @property
    def staleness(self) -> list[int]:
        """By rollout: versions published since the oldest of its tokens was sampled."""
        return [self.version - rollout.oldest if rollout.oldest >= 0 else 0 for rollout in self.rollouts]


class TaskBatch(msgspec.Struct, kw_only=True):
    """Tasks that were asked for together; their blocks are added from this, once."""

    batch: int
    """From 0."""
    tasks: list[tuple[str, int]]
    """Task and round."""
    samples: int
    version: int = 0
    """Ordinal of the policy's newest weights when it was asked for: none of its tokens is of an older one."""
    state: dict[str, Any] = {}
    """Of the choice of tasks, after this one."""


class Refill(TaskBatch, kw_only=True):
    """Further tasks for a step; ``batch`` counts the batches that were asked for before."""


class Added(TaskBatch, kw_only=True):
    """Tasks that a trainer asked for by itself; ``batch`` counts the batches that were asked for before."""


class TrainingFiles:
    """The files of one policy. Building one touches nothing."""

    def __init__(self, run: RunDir, policy: str) -> None:
        self.run, self.path = run, run.training / policy
        self.checkpoints, self.metrics = self.path / "checkpoints", self.path / "metrics.jsonl"

    def create(self) -> None:
        """Makes the directories."""
        for folder in (self.path.parent, self.path, self.checkpoints, *map(self._folder, _KINDS)):
            make_directory(folder)

    def _folder(self, kind: type[msgspec.Struct]) -> Path:
        return self.path / _KINDS[kind]

    def numbers(self, kind: type[msgspec.Struct]) -> list[int]:
        """Returns the numbers of the records of one kind that are there."""
        return numbered(self._folder(kind))

    def read(self, kind: type[R], number: int) -> R | None:
        """Returns a record; ``None`` if there is none.

        Raises:
            ConfigError: it is not whole, or of a later version.
        """
        path = self._folder(kind) / f"{number:06d}.json"
        try:
            data = read_regular(path)
        except FileNotFoundError:
            return None
        try:
            found = msgspec.json.decode(data, type=kind)
        except ValueError as error:
            raise ConfigError(f"{path}: cannot be read ({error}); the run directory is damaged") from None
        if getattr(found, "format_version", FORMAT_VERSION) > FORMAT_VERSION:
            raise ConfigError(f"{path}: is of a later version; use a newer megaflow-hpc")
        return found

    def claim(self, number: int, record: R) -> R:
        """Publishes a record under its number, unless there is one; returns the one that is there."""
        path = self._folder(type(record)) / f"{number:06d}.json"
        try:
            write_atomic(path, msgspec.json.encode(record), exclusive=True)
        except FileExistsError:
            found = self.read(type(record), number)
            assert found is not None, path
            return found
        return record

    def digest(self, step: int) -> str:
        """Returns the SHA-256 of a plan's file, in hexadecimal."""
        return hashlib.sha256(read_regular(self._folder(StepPlan) / f"{step:06d}.json")).hexdigest()

    # --- the trainer's starts ---

    def enter(self, trainer: Trainer) -> int:
        """Makes this the policy's latest trainer, and returns the number of its start, from 1."""
        number = (self.numbers(Trainer) or [0])[-1] + 1
        while self.claim(number, trainer) is not trainer:
            number += 1
        return number

    def check(self, trainer: int) -> None:
        """Checks that no later trainer was started.

        Raises:
            LedgerError: one was.
        """
        latest = (self.numbers(Trainer) or [0])[-1]
        if latest > trainer:
            later = self.read(Trainer, latest)
            where = f" (process {later.pid} on {later.node})" if later else ""
            raise LedgerError(f"{self.path}: start {latest} of the trainer{where} goes on with it; this one ends")

    # --- commits ---

    def commit(self, commit: Commit) -> None:
        """Publishes a step's commit, in the place of one that lacks what this one has.

        Raises:
            LedgerError: a later trainer was started.
        """
        self.check(commit.trainer)
        write_atomic(self._folder(Commit) / f"{commit.step:06d}.json", msgspec.json.encode(commit))

    def committed(self, with_checkpoint: bool = False) -> Commit | None:
        """Returns the last commit, or the last one with a checkpoint that is there; ``None`` without any."""
        for number in reversed(self.numbers(Commit)):
            found = self.read(Commit, number)
            if found and (not with_checkpoint or (found.checkpoint and (self.run.path / found.checkpoint).exists())):
                return found
        return None


_KINDS: dict[type[msgspec.Struct], str] = {
    TaskBatch: "batches",
    Refill: "refills",
    Added: "added",
    StepPlan: "steps",
    Commit: "commits",
    Trainer: "trainers",
}
