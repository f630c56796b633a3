"""Reads rollout durations from earlier campaigns. Planning and pods use them for estimates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, pvariance

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import VERIFIED, Rollout, RolloutName


def durations(path: Path) -> list[tuple[str, str, float]]:
    """Returns (task, arm, seconds) of every rollout that ran to verification.

    Args:
        path: A gathered run directory, or a ``trajectories.h5``.

    Raises:
        ConfigError: The file is missing or not a campaign file.
    """
    # Lazy imports: these modules load h5py, which planning does not need otherwise.
    from megaflow_hpc.trajectories.hdf5.columns import read, texts
    from megaflow_hpc.trajectories.hdf5.file import open_file

    file_path = path / "trajectories.h5" if path.is_dir() else path
    try:
        with open_file(file_path) as file:
            table = file["trajectories"]
            tasks, ids, statuses = (texts(table[name]) for name in ("task_id", "id", "status"))
            seconds = read(table["finished_at"]) - read(table["started_at"])
    except OSError as error:
        raise ConfigError(
            f"{file_path}: cannot be read as trajectories ({error}); give a run directory that was gathered, "
            "or its trajectories.h5"
        ) from None
    measured = []
    for task, name, status, duration in zip(tasks, ids, statuses, seconds.tolist(), strict=True):
        if status in VERIFIED and duration > 0:
            measured.append((task, RolloutName.parse(name).arm, duration))
    return measured


class Durations:
    """Rollout durations from earlier campaigns, by task and arm (:attr:`.Rollout.arm`).

    Args:
        paths: Gathered run directories, or campaign files.

    Raises:
        ConfigError: A file cannot be read, or no file has a rollout that ran to verification.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._seconds: dict[tuple[str, ...], list[float]] = {}
        paths = list(paths)
        for path in paths:
            for task, arm, seconds in durations(path):
                for key in _keys(task, arm):
                    self._seconds.setdefault(key, []).append(seconds)
        if not self._seconds:
            raise ConfigError(f"{', '.join(map(str, paths))}: no rollout ran there; leave learn_from out")
        self._means = {key: mean(seconds) for key, seconds in self._seconds.items()}

    def expected_s(self, rollout: Rollout) -> float:
        """Returns the mean duration, in seconds, of rollouts with the same task and arm.

        Falls back to rollouts of the same task, then of the same arm, then to all rollouts.
        """
        return next(self._means[key] for key in _keys(rollout.task_id, rollout.arm) if key in self._means)

    def learned(self, rollouts: Iterable[Rollout]) -> list[tuple[str, str, int, float, float]]:
        """Returns the known durations of the given rollouts, which pods use as initial estimates.

        Returns:
            (task, arm, count, mean, variance) per task and arm. Mean and variance are of the logarithm of the duration
            in seconds. If a task has no durations with its arm, those with other arms are used. Tasks without any
            durations are omitted.
        """
        estimates = []
        for task, arm in dict.fromkeys((rollout.task_id, rollout.arm) for rollout in rollouts):
            of_both, of_task, *_ = _keys(task, arm)
            seconds = self._seconds.get(of_both) or self._seconds.get(of_task)
            if seconds:
                logs = [math.log(duration) for duration in seconds]
                estimates.append((task, arm, len(logs), round(mean(logs), 4), round(pvariance(logs), 4)))
        return estimates


def _keys(task: str, arm: str) -> tuple[tuple[str, ...], ...]:
    """Returns the lookup keys of a duration, from most to least specific."""
    return (task, arm), ("task", task, ""), ("arm", arm, ""), ()
