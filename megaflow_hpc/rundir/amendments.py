"""Reads and writes amendments, which change training steps that are not committed yet.

::

    RUN/training/<policy>/amendments/000003.json    :class:`Amendment`

The plan of a step is immutable. To change a step, the user or the trainer adds an amendment. It skips a rollout, skips
the whole step, or changes a setting. Amendments are immutable too. They are claimed like plans: a hard link to the next
free number succeeds for only one process. Each commit records how many amendments existed when its step was trained. So
a step that is repeated after a crash applies the same ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import numbered
from megaflow_hpc.rundir.weights import versions

USER, TRAINER = "user", "trainer"


class Amendment(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A change to one step, or to all later steps. Settings that are ``None`` are left unchanged."""

    step: int = 0
    """Step to amend. 0 means every step that starts after the amendment."""
    skip: bool = False
    """True to skip the whole step."""
    rollouts: tuple[str, ...] = ()
    """Ids of the rollouts to leave out of the step."""
    lr: float | None = None
    """New learning rate."""
    microbatch: int | None = None
    """New maximum number of tokens per forward pass. If the trainer sets it, it also applies to all later steps."""
    steps: int | None = None
    """New total number of training steps."""
    cause: str = ""
    """Human-readable reason."""
    by: str = USER
    """Author of the amendment: :data:`USER` or :data:`TRAINER`."""
    at: float = 0.0
    """Creation time, as a Unix timestamp in seconds."""

    def applies(self, step: int) -> bool:
        """Returns whether the amendment applies to a step that started after the amendment was made."""
        return self.step in (0, step) or (self.microbatch is not None and step > self.step)


class Amendments:
    """The amendments to one policy's training. Caches each record after the first read."""

    def __init__(self, run: RunDir, policy: str) -> None:
        self._run, self.path = run, run.training / policy / "amendments"
        self._records: list[Amendment] = []

    def read(self) -> list[Amendment]:
        """Returns all amendments in numerical order.

        Raises:
            ConfigError: A record is damaged.
        """
        while True:
            path = self._file(len(self._records) + 1)
            try:
                self._records.append(msgspec.json.decode(read_regular(path), type=Amendment))
            except FileNotFoundError:
                return list(self._records)
            except ValueError as error:
                raise ConfigError(f"{path}: cannot be read ({error}); the run directory is damaged") from None

    def claim(self, amendment: Amendment) -> int:
        """Stores an amendment durably under the next free number, and returns that number."""
        for folder in (self._run.training, self.path.parent, self.path):
            make_directory(folder)
        while True:
            number = len(self.read()) + 1
            try:
                write_atomic(self._file(number), msgspec.json.encode(amendment), exclusive=True)
                return number
            except FileExistsError:
                continue

    def in_force(self, step: int, known: int | None = None) -> list[Amendment]:
        """Returns the amendments that apply to a step.

        Args:
            known: Number of amendments recorded in the step's commit. ``None`` if the step is not committed. The user's
                amendments beyond this number do not apply. The trainer's own amendments always apply, because the step
                cannot be repeated without them.
        """
        return [
            amendment
            for number, amendment in enumerate(self.read(), 1)
            if amendment.applies(step) and (known is None or number <= known or amendment.by == TRAINER)
        ]

    def _file(self, number: int) -> Path:
        return self.path / f"{number:06d}.json"


def settings(amendments: Iterable[Amendment]) -> dict[str, float | int]:
    """Returns the settings that the amendments change. Later amendments override earlier ones."""
    changed: dict[str, float | int] = {}
    for amendment in amendments:
        values = {"lr": amendment.lr, "microbatch": amendment.microbatch, "steps": amendment.steps}
        changed |= {name: value for name, value in values.items() if value is not None}
    return changed


# --- made by users ---


class _Id(msgspec.Struct):
    id: str


class _Plan(msgspec.Struct):
    """The part of a step's plan that amendments need."""

    rollouts: list[_Id]


def skip(run: RunDir, policy: str, step: int, rollout: str | None = None, cause: str = "") -> tuple[int, bool]:
    """Leaves one rollout out of a step. Without ``rollout``, skips the whole step.

    Returns:
        The amendment's number, and whether the step is already planned. If it is, a trainer may be training it. The
        amendment then takes effect only if that attempt is not committed.

    Raises:
        ConfigError: The step is committed, or the rollout is not in its plan. Nothing is changed.
    """
    amendments = Amendments(run, policy)
    _check_open(run, amendments, step)
    planned = _planned(amendments, step)
    if rollout is not None and planned is None:
        raise ConfigError(
            f"{run}: step {step} of policy {policy!r} is not planned yet, so its rollouts are unknown; "
            "skip the whole step, or wait"
        )
    if rollout is not None and planned is not None and rollout not in planned:
        raise ConfigError(
            f"{run}: step {step} of policy {policy!r} has no rollout {rollout!r}; it has {len(planned)}, such as "
            f"{planned[0] if planned else 'none'!r}"
        )
    rollouts = () if rollout is None else (rollout,)
    record = Amendment(step=step, skip=rollout is None, rollouts=rollouts, cause=cause, at=time.time())
    number = amendments.claim(record)
    _check_open(run, amendments, step, f"meanwhile, so amendment {number} has no effect")
    return number, planned is not None


def change(run: RunDir, policy: str, changes: dict[str, float | int], cause: str = "") -> int:
    """Changes ``lr``, ``microbatch`` or ``steps`` for all steps not started yet. Returns the amendment's number.

    Raises:
        ConfigError: A value is out of range, or ``steps`` is below the number of committed steps. Nothing is changed.
    """
    amendments = Amendments(run, policy)
    lr = changes.get("lr", 0.0)
    if not (math.isfinite(lr) and lr >= 0):
        raise ConfigError(f"lr {lr:g}: expected a finite number of at least 0")
    for name in ("microbatch", "steps"):
        if changes.get(name, 1) < 1:
            raise ConfigError(f"{name} {changes[name]:g}: expected a whole number of at least 1")
    committed = max(_commits(amendments), default=0)
    if changes.get("steps", committed) < committed:
        raise ConfigError(f"steps {changes['steps']}: {committed} steps are committed already")
    return amendments.claim(msgspec.convert({**changes, "cause": cause, "at": time.time()}, Amendment))


def _commits(amendments: Amendments) -> list[int]:
    return numbered(amendments.path.parent / "commits")


def _check_open(run: RunDir, amendments: Amendments, step: int, so: str = "already") -> None:
    """Raises ConfigError if a step is committed or its weights are published."""
    policy = amendments.path.parent.name
    if step < 1:
        raise ConfigError(f"step {step}: steps are counted from 1")
    if step in _commits(amendments):
        raise ConfigError(f"{run}: step {step} of policy {policy!r} is committed {so}; nothing was changed")
    if any(version.token == f"step-{step:06d}" and version.policy == policy for version in versions(run)):
        raise ConfigError(f"{run}: the weights of step {step} of policy {policy!r} are published {so}")


def _planned(amendments: Amendments, step: int) -> list[str] | None:
    """Returns the ids of a step's rollouts, or ``None`` if the step is not planned."""
    path = amendments.path.parent / "steps" / f"{step:06d}.json"
    try:
        return [rollout.id for rollout in msgspec.json.decode(read_regular(path), type=_Plan).rollouts]
    except FileNotFoundError:
        return None
