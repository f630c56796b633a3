"""A trainer's files in ``RUN/training/<policy>``: requested batches, step plans and commits.

::

    batches/000003.json     :class:`TaskBatch`: tasks requested together
    refills/012001.json     :class:`Refill`: tasks that step 12 requested to replace dropped groups
    added/3610421.json      :class:`Added`: extra tasks that the trainer requested
    steps/000012.json       :class:`StepPlan`: the rollouts that step 12 trains on and drops; never changed
    amendments/000003.json  changes to steps that are not committed (:mod:`megaflow_hpc.rundir.amendments`)
    columns/000012.npz      extra values of its tokens, computed by the trainer; contains the plan's digest
    commits/000012.json     commit of step 12: its checkpoint, weights and metrics
    trainers/000002.json    the second start of the trainer; earlier starts can no longer commit
    checkpoints/12/         the trainer's own files

A plan is claimed before it is used: its file is hard-linked under the step's number, which succeeds only once. A
trainer that loses this race uses the existing plan. So a step always has the same rollouts, no matter which process
dies. A trainer that was wrongly assumed dead can repeat a step, but cannot commit it. The records of commits and
trainer starts are defined in :mod:`megaflow_hpc.rundir.training`, because other subpackages read them too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError, LedgerError
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.amendments import Amendment
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit, Trainer, numbered

FORMAT_VERSION = 2

COLUMN_PREFIX = "column."
"""Prefix of column names in the columns file."""

R = TypeVar("R", bound=msgspec.Struct)
BySequence = Mapping[tuple[int, int], NDArray[np.float32]]
"""Maps (rollout index, sequence index) in a step to values of shape (L), one for each of the sequence's L tokens."""
Columns = Mapping[str, list[list[NDArray[np.float32]]]]
"""Maps column names to nested lists. For each rollout and each of its sequences, there is an array with a value per
token."""


class RecordPlace(msgspec.Struct, array_like=True, frozen=True):
    """Location of a rollout's record in the journals."""

    journal: str
    """Name of the journal file in ``RUN/journal``."""
    start: int
    """Offset of the record's first byte in the file."""
    epoch: int = 0


class PlannedRollout(msgspec.Struct, kw_only=True):
    """One rollout of a step."""

    id: str
    task: str
    group: str
    agent: str = ""
    """Name of the agent in the campaign."""
    place: RecordPlace
    reward: float | None = None
    """The verifier's reward, or ``None`` if the rollout was not verified."""
    scores: dict[str, float] = {}
    """Rewards from a scorer, by name. The reward ``score`` is for the whole rollout and replaces ``reward``."""
    advantage: float = 0.0
    """Advantage of all sampled tokens. If :attr:`advantages` is set, this is the mean over tokens."""
    advantages: list[float] = []
    """Advantage of each of the policy's sequences, or of each turn in :attr:`turns`. Empty if all tokens have the same
    advantage."""
    turns: list[tuple[int, int, int]] = []
    """Sequence index, first token and end of each of the policy's model calls, if calls have their own advantages."""
    roles: dict[str, float] = {}
    """Reward of each role that the policy played. Empty if the agents do not form a team."""
    weight: float = 1.0
    """Weight of the rollout's tokens in the loss."""
    oldest: int = -1
    """Index among the policy's versions of the oldest weights that sampled a token. -1 if nothing was sampled."""
    replayed: bool = False
    """True if an earlier step settled the rollout and a ``data`` operation added it again."""
    lengths: list[int] = []
    """Token count of each of the policy's sequences."""
    sampled: list[int] = []
    """Number of sampled tokens in each of the policy's sequences."""


class Settled(msgspec.Struct, kw_only=True, frozen=True):
    """State of the rollout buffer after a step: groups that are settled, and rollouts that wait for a step."""

    cursor: dict[str, Any] = {}
    """Position in each journal at which reading resumes."""
    waiting: list[RecordPlace] = []
    """Records of the rollouts that have been read but that no step has used yet."""
    first_block: int = 0
    """Number of the first block that may have unsettled groups. The groups in all earlier blocks are settled."""
    groups: list[str] = []
    """Settled groups in the block :attr:`first_block` and later blocks."""


class StepPlan(msgspec.Struct, kw_only=True):
    """Stored plan of one step: its rollouts, and the decisions about them."""

    format_version: int = FORMAT_VERSION
    step: int
    """Step number, from 1."""
    version: int
    """Index of the policy's newest weights when the step was planned. Staleness is measured relative to it."""
    seed: list[int]
    """Seed of every random choice in the step."""
    rollouts: list[PlannedRollout] = []
    drops: dict[str, str] = {}
    """Maps the id of each dropped rollout or group to the reason."""
    settled: Settled = Settled()
    state: dict[str, Any] = {}
    """State of the data algorithms after this step."""
    trainer: int = 0
    """Sequence number of the trainer start that made the plan."""
    scorer: str = ""
    """Name of the function that scored the rollouts, and a SHA-256 digest of its source files."""

    @property
    def staleness(self) -> list[int]:
        """For each rollout, the number of versions published since its oldest token was sampled."""
        return [self.version - rollout.oldest if rollout.oldest >= 0 else 0 for rollout in self.rollouts]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that are new in this step."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None and not rollout.replayed]

    @property
    def groups(self) -> set[str]:
        """Ids of the groups that the step settles, whether it trains on them or drops them."""
        dropped = {name if name.count("/") == 1 else name.rpartition("/")[0] for name in self.drops}
        return dropped | {rollout.group for rollout in self.rollouts if not rollout.replayed}


AMENDED = "amended"
"""Reason in a plan's ``drops`` for a rollout that an amendment leaves out. The amendment gives the cause."""


def amended(plan: StepPlan, amendments: Iterable[Amendment]) -> StepPlan:
    """Applies amendments that leave out rollouts. Returns a plan in which these rollouts have weight 0 and are listed
    in ``drops``.

    All other rollouts keep their index and minibatch. If one rollout of a preference pair is left out, so is the other.
    """
    left_out: dict[str, str] = {}
    for amendment in amendments:
        names = [rollout.id for rollout in plan.rollouts] if amendment.skip else amendment.rollouts
        left_out |= dict.fromkeys(names, AMENDED)
    if not left_out:
        return plan
    for pair in _pairs(plan):
        if not left_out.keys().isdisjoint(pair):
            left_out |= dict.fromkeys(pair, AMENDED)
    rollouts = [
        msgspec.structs.replace(rollout, weight=0.0) if rollout.id in left_out else rollout for rollout in plan.rollouts
    ]
    return msgspec.structs.replace(plan, rollouts=rollouts, drops=plan.drops | left_out)


def _pairs(plan: StepPlan) -> Iterator[tuple[str, str]]:
    """Yields the preference pairs of a plan. In each pair, no other rollout of the group has an advantage, and the two
    advantages have opposite signs.

    A rollout of a pair cannot be trained on alone, because it would have nothing to be compared with.
    """
    groups: dict[str, list[PlannedRollout]] = {}
    for rollout in plan.rollouts:
        if rollout.weight and (rollout.advantage or any(rollout.advantages)):
            groups.setdefault(rollout.group, []).append(rollout)
    for rollouts in groups.values():
        if len(rollouts) == 2 and rollouts[0].advantage * rollouts[1].advantage < 0:
            yield rollouts[0].id, rollouts[1].id


class TaskBatch(msgspec.Struct, kw_only=True):
    """Record of tasks that a trainer requested together. The ledger's blocks are derived from it, so each block is
    added only once."""

    batch: int
    """Batch number, from 0."""
    tasks: list[tuple[str, int]]
    """Requested groups, as (task id, round number) pairs."""
    samples: int
    version: int = 0
    """Index of the oldest weights that may sample the batch's tokens. It is the index of the policy's newest weights at
    the time of the request, or the number of steps that a helper policy had committed, if smaller."""
    state: dict[str, Any] = {}
    """State of task selection after this batch."""


class Refill(TaskBatch, kw_only=True):
    """Record of extra tasks that a step requested to replace dropped groups. ``batch`` is the number of batches so
    far."""


class Added(TaskBatch, kw_only=True):
    """Record of extra tasks that the user's trainer requested. ``batch`` is the number of batches so far."""


class TrainingFiles:
    """Reads and writes the training files of one policy. The constructor does not access the disk."""

    def __init__(self, run: RunDir, policy: str) -> None:
        self.run, self.path = run, run.training / policy
        self.checkpoints, self.metrics = self.path / "checkpoints", self.path / "metrics.jsonl"

    def create(self) -> None:
        """Creates the directories of the training files."""
        for folder in (self.path.parent, self.path, self.checkpoints, *map(self._folder, _KINDS)):
            make_directory(folder)

    def _folder(self, kind: type[msgspec.Struct]) -> Path:
        return self.path / _KINDS[kind]

    def numbers(self, kind: type[msgspec.Struct]) -> list[int]:
        """Returns the numbers of all existing records of a kind."""
        return numbered(self._folder(kind))

    def read(self, kind: type[R], number: int) -> R | None:
        """Returns a record, or ``None`` if it does not exist.

        Raises:
            ConfigError: the record is damaged, or was written by a newer version of the package.
        """
        path = self._folder(kind) / f"{number:06d}.json"
        try:
            data = read_regular(path)
        except FileNotFoundError:
            return None
        try:
            record = msgspec.json.decode(data, type=kind)
        except ValueError as error:
            raise ConfigError(f"{path}: cannot be read ({error}); the run directory is damaged") from None
        if getattr(record, "format_version", FORMAT_VERSION) > FORMAT_VERSION:
            raise ConfigError(f"{path}: was written by a later version; use a newer megaflow-hpc")
        return record

    def claim(self, number: int, record: R) -> R:
        """Stores a record under a number unless that number is taken. Returns the record that is stored."""
        path = self._folder(type(record)) / f"{number:06d}.json"
        try:
            write_atomic(path, msgspec.json.encode(record), exclusive=True)
        except FileExistsError:
            stored = self.read(type(record), number)
            assert stored is not None, path
            return stored
        return record

    def digest(self, step: int) -> str:
        """Returns the hexadecimal SHA-256 digest of a plan's file."""
        return hashlib.sha256(read_regular(self._folder(StepPlan) / f"{step:06d}.json")).hexdigest()

    # --- columns ---

    def columns_file(self, step: int) -> Path:
        """Returns the path of a step's columns file."""
        return self.path / "columns" / f"{step:06d}.npz"

    def columns_digest(self, step: int) -> str:
        """Returns the hexadecimal SHA-256 digest of a step's columns file."""
        return hashlib.sha256(read_regular(self.columns_file(step))).hexdigest()

    def claim_columns(self, plan: StepPlan, values: Mapping[str, BySequence]) -> None:
        """Stores the columns of a step unless they already exist.

        Args:
            plan: the stored plan.
            values: by column name, the values for each sequence. Missing sequences get 0.
        """
        arrays = {
            "plan": np.frombuffer(bytes.fromhex(self.digest(plan.step)), np.uint8),
        }
        for name, by_sequence in values.items():
            parts = [by_sequence.get(key, np.zeros(length, np.float32)) for key, length in _sequences(plan)]
            arrays[COLUMN_PREFIX + name] = np.concatenate([np.zeros(0, np.float32), *parts])
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]
        path = self.columns_file(plan.step)
        make_directory(path.parent)
        with contextlib.suppress(FileExistsError):
            write_atomic(path, file.getvalue(), exclusive=True)

    def columns(self, plan: StepPlan) -> Columns:
        """Returns the columns of a step.

        Raises:
            ConfigError: the file is missing or damaged, or belongs to another plan.
        """
        path = self.columns_file(plan.step)
        lengths = np.array([length for _, length in _sequences(plan)], np.int64)
        columns = {}
        try:
            with np.load(io.BytesIO(read_regular(path)), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if arrays["plan"].tobytes() != bytes.fromhex(self.digest(plan.step)):
                raise ValueError("it belongs to another plan")
            for name, values in arrays.items():
                if not name.startswith(COLUMN_PREFIX):
                    continue
                if len(values) != lengths.sum():
                    raise ValueError("it has another number of values")
                parts = iter(np.split(values, np.cumsum(lengths)[:-1]))
                columns[name.removeprefix(COLUMN_PREFIX)] = [[next(parts) for _ in r.lengths] for r in plan.rollouts]
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); remove it, and it is computed again") from None
        return columns

    def prune_columns(self, step: int) -> None:
        """Removes the columns of all steps up to ``step``, because these steps are never repeated."""
        for path in self.columns_file(step).parent.glob("[0-9]*.npz"):
            if int(path.stem) <= step:
                path.unlink(missing_ok=True)

    # --- starts of the trainer ---

    def enter(self, trainer: Trainer) -> int:
        """Records a new start of the policy's trainer. Returns its sequence number, from 1."""
        number = (self.numbers(Trainer) or [0])[-1] + 1
        while self.claim(number, trainer) is not trainer:
            number += 1
        return number

    def check(self, trainer: int) -> None:
        """Checks that no trainer was started after the given start number.

        Raises:
            LedgerError: a newer trainer was started.
        """
        latest = (self.numbers(Trainer) or [0])[-1]
        if latest > trainer:
            later = self.read(Trainer, latest)
            where = f" (process {later.pid} on {later.node})" if later else ""
            raise LedgerError(f"{self.path}: start {latest} of the trainer{where} has taken over; this one ends")

    # --- commits ---

    def commit(self, commit: Commit) -> None:
        """Publishes the commit of a step, replacing an earlier commit of the same step.

        Raises:
            LedgerError: a newer trainer was started.
        """
        self.check(commit.trainer)
        write_atomic(self._folder(Commit) / f"{commit.step:06d}.json", msgspec.json.encode(commit))

    def checkpoint_name(self, checkpoint: str | os.PathLike[str]) -> str:
        """Returns a checkpoint's path as commits store it. The path is relative if the checkpoint is in the run
        directory.

        Raises:
            ConfigError: the directory is missing.
        """
        path, run = Path(checkpoint).absolute(), self.run.path
        if not path.is_dir():
            raise ConfigError(f"{path}: is not a directory; write the checkpoint before committing the step")
        return os.path.relpath(path, run) if path.is_relative_to(run) else str(path)

    def committed(self, with_checkpoint: bool = False) -> Commit | None:
        """Returns the last commit, or ``None`` if there is none. With ``with_checkpoint``, considers only commits whose
        checkpoint exists."""
        for number in reversed(self.numbers(Commit)):
            commit = self.read(Commit, number)
            if commit and (not with_checkpoint or (commit.checkpoint and (self.run.path / commit.checkpoint).exists())):
                return commit
        return None


def _sequences(plan: StepPlan) -> Iterator[tuple[tuple[int, int], int]]:
    """Yields ((rollout index, sequence index), number of tokens) for each sequence in a plan."""
    for index, rollout in enumerate(plan.rollouts):
        for number, length in enumerate(rollout.lengths):
            yield (index, number), length


_KINDS: dict[type[msgspec.Struct], str] = {
    TaskBatch: "batches",
    Refill: "refills",
    Added: "added",
    StepPlan: "steps",
    Commit: "commits",
    Trainer: "trainers",
}
