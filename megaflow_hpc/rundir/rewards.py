"""Reads and writes ``RUN/rewards``: rewards that ``reverify`` adds to stored rollouts.

::

    rewards/<name>/<time>.<random>.jsonl    one :class:`GivenReward` per line

The campaign's own rewards stay unchanged. Each process appends to its own file, and a line counts only once it is
durable. A process may therefore be killed at any time: readers ignore an incomplete line, and its rollout is scored
again. If two processes scored the same rollout, the earlier line counts. Lines are never changed.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import file_mode, fsync, make_directory
from megaflow_hpc.host.files import open_regular
from megaflow_hpc.rundir.budget import Used
from megaflow_hpc.rundir.layout import RunDir

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Pattern of a valid name for a set of rewards. A dot is not allowed, because it separates this name from a part's
name."""
RESERVED = frozenset({"reward", "turn", "sequence"})
MAX_LINE_BYTES = 1 << 20


class GivenReward(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The rewards that one scorer gave to one rollout."""

    id: str
    """Id of the rollout."""
    at: float
    """Time of scoring, as a Unix timestamp in seconds."""
    digest: str
    """Digest of the scorer's file. Without a scorer, digest of the task's files."""
    reward: float | None = None
    """Reward of the whole rollout. ``None`` if the scorer rewarded only parts of it."""
    rewards: dict[str, float] = {}
    """Rewards by name. ``turn.N`` is the reward of model call N."""
    error: str = ""
    """Reason why the task's tests gave no valid reward. The reward is then 0."""
    judge: Used = {}
    """Usage of judges, by name."""

    def named(self, name: str) -> dict[str, float]:
        """Returns the rewards by the names that readers see: ``NAME``, and ``NAME.PART`` for each part."""
        parts = {f"{name}.{part}": value for part, value in self.rewards.items() if part != "reward"}
        return parts if self.reward is None else {name: self.reward, **parts}


def check_name(name: str) -> None:
    """Checks the name of a set of rewards.

    Raises:
        ConfigError: The name is invalid.
    """
    if not NAME.fullmatch(name) or name in RESERVED:
        reserved = ", ".join(sorted(RESERVED))
        raise ConfigError(f"--name {name}: expected letters, digits, _ or -, but not one of {reserved}")


def given_rewards(run: RunDir) -> dict[str, dict[str, GivenReward]]:
    """Returns all rewards in ``RUN/rewards``, by name and rollout id. Skips damaged lines."""
    if not run.rewards.is_dir():
        return {}
    names = sorted(path.name for path in run.rewards.iterdir() if NAME.fullmatch(path.name))
    return {name: given for name in names if (given := given_as(run, name))}


def given_as(run: RunDir, name: str) -> dict[str, GivenReward]:
    """Returns the rewards in ``RUN/rewards/NAME`` by rollout id. Skips damaged lines."""
    given: dict[str, GivenReward] = {}
    for path in sorted((run.rewards / name).glob("*.jsonl")):
        for line in _lines(path):
            before = given.get(line.id)
            if before is None or line.at < before.at:
                given[line.id] = line
    return given


def _lines(path: Path) -> Iterator[GivenReward]:
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                continue
            try:
                given = msgspec.json.decode(line, type=GivenReward)
            except ValueError:
                continue
            if all(map(math.isfinite, (given.at, given.reward or 0.0, *given.rewards.values()))):
                yield given


class RewardLog:
    """Appends rewards to ``RUN/rewards/NAME``. The file is created with the first reward."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._run, self._folder = run, run.rewards / name
        self._file: int | None = None

    def add(self, given: GivenReward) -> None:
        """Appends a line and makes it durable. Raises OSError."""
        if self._file is None:
            self._file = self._create()
        line = msgspec.json.encode(given) + b"\n"
        while line:
            line = line[os.write(self._file, line) :]
        os.fdatasync(self._file)

    def close(self) -> None:
        """Closes the file of rewards."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _create(self) -> int:
        for folder in (self._run.rewards, self._folder):
            if folder.is_symlink():
                raise ConfigError(f"{folder}: is a symbolic link, which is not followed; remove it")
            make_directory(folder)
        path = self._folder / f"{time.time_ns()}.{secrets.token_hex(4)}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.fchmod(file, file_mode(self._folder))
        fsync(self._folder)
        return file
