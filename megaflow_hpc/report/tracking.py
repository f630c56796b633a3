"""Computes a run's data points for experiment trackers. Stores them in a file, from which each tracker gets them.

::

    RUN/track/
      points.jsonl     one :class:`Point` per line, numbered from 1; append-only
      position.json    :class:`Position`: how far the run has been read, and how many points count
      wandb/ …         local files of a tracker

A batch of points counts once ``position.json`` includes it. Trackers receive only points that count. If a process is
killed, the next one therefore does not recompute points that a tracker already has.

The series are ``training/POLICY``, with the metrics of each of its trainer's commits, and ``rollouts/ARM``. ARM is a
policy, or ``policy+agent`` if the policy has several agents. A rollout that failed and later succeeds counts twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from megaflow_hpc.config.campaign import pass_threshold_of
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.host.locks import locked
from megaflow_hpc.report.series import significant
from megaflow_hpc.rundir.layout import RunDir, read_json
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import RunRecord, read_run
from megaflow_hpc.rundir.training import TrainingView
from megaflow_hpc.trajectories.journal.winners import journals
from megaflow_hpc.trajectories.reading.conversations import tokens_of_calls
from megaflow_hpc.trajectories.reading.follow import Follower
from megaflow_hpc.trajectories.reading.store import Row, open_trajectories
from megaflow_hpc.types import VERIFIED

WINDOWS = 500
"""Number of points after which windows grow. A point covers one rollout until an arm has twice this many rollouts, and
then 1/500 of the arm's rollouts. A million rollouts yield about 4,400 points."""
MAX_STEPS = 1_000_000


class Point(msgspec.Struct, frozen=True):
    """The values of a series at a step."""

    number: int
    """Position in the file, from 1."""
    series: str
    step: int
    """Training step, or number of the arm's rollouts so far."""
    at: float
    """Unix timestamp in seconds."""
    values: dict[str, float]

    def named(self) -> dict[str, float]:
        """Returns the values by name, such as ``rollouts/default/reward``."""
        return {f"{self.series}/{name}": value for name, value in self.values.items()}


class Sums(msgspec.Struct):
    """Sums of rewards, durations and other values over rollouts."""

    rollouts: int = 0
    verified: int = 0
    passed: int = 0
    failed: int = 0
    reward: float = 0.0
    tokens: int = 0
    sampled_tokens: int = 0
    sequences: int = 0
    calls: int = 0
    seconds: float = 0.0

    def add(self, row: Row, threshold: float) -> None:
        """Adds the values of a rollout."""
        self.rollouts += 1
        self.failed += row.status == "failed"
        if row.status in VERIFIED and math.isfinite(row.reward):
            self.verified += 1
            self.passed += row.reward >= threshold
            self.reward += row.reward
        turns, sequences = row.turns, row.sequences
        counts = tokens_of_calls(row)
        self.tokens += sum(len(view.tokens) for view in sequences)
        self.tokens += sum(sum(count) for turn, count in zip(turns, counts, strict=True) if turn.sequence < 0)
        self.sampled_tokens += sum(max(0, sampled) for _, sampled in counts)
        self.sequences += len(sequences)
        self.calls += len(turns)
        seconds = row.finished_at - row.started_at
        self.seconds += max(0.0, seconds) if math.isfinite(seconds) else 0.0


class TrackedArm(msgspec.Struct):
    """Rollouts of a policy or of one of its agents, from which points are computed."""

    total: Sums = msgspec.field(default_factory=Sums)
    window: Sums = msgspec.field(default_factory=Sums)
    """Rollouts that ended since the last point was logged."""
    at: float = 0.0
    """Time at which the latest rollout ended, in Unix seconds."""

    def add(self, row: Row, threshold: float) -> None:
        """Adds a rollout to the window and to the totals."""
        self.total.add(row, threshold)
        self.window.add(row, threshold)
        if math.isfinite(row.finished_at):
            self.at = max(self.at, row.finished_at)

    @property
    def is_due(self) -> bool:
        """True if the window has enough rollouts for a point."""
        return self.window.rollouts >= max(1, self.total.rollouts // WINDOWS)

    def values(self) -> dict[str, float]:
        """Returns the values of a point, and begins a new window.

        ``reward``, ``passed``, ``seconds``, ``tokens_per_rollout``, ``sequences_per_rollout`` and ``calls_per_rollout``
        are means over the window. All other values cover the whole campaign so far.
        """
        total, window = self.total, self.window
        values: dict[str, float] = {"rollouts": total.rollouts, "failed": total.failed}
        values |= {"tokens": total.tokens, "sampled_tokens": total.sampled_tokens}
        values["seconds"] = window.seconds / window.rollouts
        values["tokens_per_rollout"] = window.tokens / window.rollouts
        values["sequences_per_rollout"] = window.sequences / window.rollouts
        values["calls_per_rollout"] = window.calls / window.rollouts
        if window.verified:
            values["reward"] = window.reward / window.verified
            values["passed"] = window.passed / window.verified
        if total.verified:
            values["reward_so_far"] = total.reward / total.verified
            values["pass_rate_so_far"] = total.passed / total.verified
        self.window = Sums()
        return values


class Position(msgspec.Struct):
    """How far a run has been read, and which points count."""

    run: str = ""
    points: int = 0
    size: int = 0
    """Size in bytes of the part of ``points.jsonl`` that counts."""
    cursor: dict[str, Any] | None = None
    """Cursor of the :class:`~megaflow_hpc.trajectories.reading.follow.Follower`."""
    gathered: bool = False
    """True if the rollouts were read from ``trajectories.h5``. This is done if the run has no journals."""
    steps: dict[str, int] = {}
    """The last training step that was read, by policy."""
    arms: dict[str, TrackedArm] = {}


class PointLog:
    """Metrics of a run over time, one point for each window. Open it with :func:`open_points`.

    Args:
        folder: Directory of ``points.jsonl`` and ``position.json``.
    """

    def __init__(self, run: RunDir, record: RunRecord, folder: Path) -> None:
        self.run, self.record, self.folder = run, record, folder
        self.path = folder / "points.jsonl"
        self._position_file = folder / "position.json"
        self._threshold = pass_threshold_of(self.record.campaign)
        self._load()
        training = self.record.config.training if self.record.campaign.get("training") else None
        self._trainings = {policy: TrainingView(run, policy) for policy in training.policies} if training else {}

    def _load(self) -> None:
        """Reads the stored position, in order to continue from it."""
        self.position = self._read_position()
        self._follower = Follower(self.run, cursor=self.position.cursor)
        self._complete = True
        """False if memory contains a position that is not stored yet."""

    def _read_position(self) -> Position:
        try:
            position = read_json(self._position_file, Position)
        except FileNotFoundError:
            return Position(run=self.run.path.name)
        except ValueError as error:
            raise ConfigError(f"{error}; track into another directory with -o") from None
        if position.run != self.run.path.name:
            raise ConfigError(
                f"{self._position_file}: holds the points of run {position.run}, not of {self.run.path.name}; "
                "name another directory with -o"
            )
        return position

    def collect(self, final: bool) -> int:
        """Reads new training steps and rollouts of the run, and stores their points. Returns the number of new points.

        Args:
            final: Also store incomplete windows, because no more rollouts are expected.

        Raises:
            OSError: The run directory is unavailable. Nothing is lost: the next call continues.
        """
        if not self._complete:
            self._load()
        position, self._complete = self.position, False
        found = [*self._new_steps(), *self._new_windows(final)]
        lines = []
        for number, (series, step, at, values) in enumerate(found, position.points + 1):
            finite = {name: significant(value) for name, value in values.items() if math.isfinite(value)}
            lines.append(msgspec.json.encode(Point(number, series, step, at, finite)) + b"\n")
        position.cursor = self._follower.cursor
        position.points += len(lines)
        position.size = self._append(b"".join(lines), position.size)
        write_atomic(self._position_file, msgspec.json.encode(position))
        self._complete = True
        return len(lines)

    def _new_steps(self) -> Iterator[tuple[str, int, float, dict[str, float]]]:
        for policy, view in self._trainings.items():
            last = self.position.steps.get(policy, 0)
            for commit in view.commits(MAX_STEPS):
                if commit.step > last:
                    self.position.steps[policy] = commit.step
                    yield f"training/{policy}", commit.step, commit.at, {**commit.metrics, "step": commit.step}

    def _new_windows(self, final: bool) -> Iterator[tuple[str, int, float, dict[str, float]]]:
        arms = self.position.arms
        for row in self._new_rows():
            name = self._arm_of(row)
            arm = arms.setdefault(name, TrackedArm())
            arm.add(row, self._threshold)
            if arm.is_due:
                yield f"rollouts/{name}", arm.total.rollouts, arm.at, arm.values()
        for name, arm in arms.items():
            if final and arm.window.rollouts:
                yield f"rollouts/{name}", arm.total.rollouts, arm.at, arm.values()

    def _new_rows(self) -> Iterator[Row]:
        if journals(self.run):
            yield from self._follower.poll()
        elif not self.position.gathered and not self._follower.cursor["journals"] and self.run.trajectories.exists():
            with open_trajectories(self.run.trajectories) as store:
                yield from store
            self.position.gathered = True

    def _arm_of(self, row: Row) -> str:
        policy = self.record.policies.get(row.policy)
        several = policy is not None and len(policy.agents) > 1
        return f"{row.policy}+{row.agent.rpartition(':')[2]}" if several else row.policy

    def _append(self, data: bytes, size: int) -> int:
        """Truncates the file to its first ``size`` bytes and appends to it. A killed process may have left more
        bytes."""
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+b") as file:
            if os.fstat(file.fileno()).st_size < size:
                raise ConfigError(f"{self.path}: shorter than {self._position_file} says; track into another directory")
            file.truncate(size)
            file.seek(size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return size + len(data)

    def after(self, number: int) -> list[Point]:
        """Returns the points after ``number``."""
        if number >= self.position.points:
            return []
        with open(self.path, "rb") as file:
            lines = file.read(self.position.size).splitlines()
        return [msgspec.json.decode(line, type=Point) for line in lines[number:]]

    @property
    def is_over(self) -> bool:
        """True if the campaign has finished or was cancelled."""
        return Marks(self.run).over


@contextmanager
def open_points(run: RunDir, folder: Path) -> Iterator[PointLog]:
    """Opens the points of a run. Only one process at a time may extend them.

    Raises:
        ConfigError: ``folder`` cannot be written, contains another run's points, or another process extends it.
    """
    record = read_run(run)
    try:
        if folder.is_symlink():
            raise ConfigError(f"{folder}: is a symbolic link, which is not followed; name another directory with -o")
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_directory(folder)
        with locked(folder / "lock", timeout_s=0):
            yield PointLog(run, record, folder)
    except TimeoutError:
        raise ConfigError(f"{folder}: another megaflow-hpc track extends it; end that one first") from None
    except PermissionError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); name another directory with -o") from None
