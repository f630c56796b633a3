"""Durations of the rollouts of earlier campaigns, read from their trajectories.h5, for plans and pods to learn from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, pvariance

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import VERIFIED, Rollout


def durations(path: Path) -> list[tuple[str, str, float]]:
    """Returns (task, policy, seconds) of every rollout that was carried out.

    Args:
        path: a run directory that was gathered, or a trajectories.h5.

    Raises:
        ConfigError: there is no such file, or it is not a campaign file.
    """
    from megaflow_hpc.trajectories.hdf5.columns import read, texts  # bring h5py, which no other part of a plan needs
    from megaflow_hpc.trajectories.hdf5.file import open_file

    file_path = path / "trajectories.h5" if path.is_dir() else path
    try:
        with open_file(file_path) as file:
            table = file["trajectories"]
            tasks, policies, statuses = (texts(table[name]) for name in ("task_id", "policy", "status"))
            seconds = read(table["finished_at"]) - read(table["started_at"])
    except OSError as error:
        raise ConfigError(
            f"{file_path}: cannot be read as trajectories ({error}); give a run directory that was gathered, "
            "or its trajectories.h5"
        ) from None
    return [
        (str(task), str(policy), float(took))
        for task, policy, status, took in zip(tasks, policies, statuses, seconds, strict=True)
        if status in VERIFIED and took > 0
    ]


class Durations:
    """Durations of earlier campaigns, by task and policy.

    Args:
        paths: gathered run directories, or campaign files.

    Raises:
        ConfigError: a file cannot be read, or no rollout was carried out in any of them.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._seen: dict[tuple[str, ...], list[float]] = {}
        paths = list(paths)
        for path in paths:
            for task, policy, seconds in durations(path):
                for key in self._keys(task, policy):
                    self._seen.setdefault(key, []).append(seconds)
        if not self._seen:
            raise ConfigError(f"{', '.join(map(str, paths))}: no rollout was carried out there; leave learn_from out")
        self._means = {key: mean(seconds) for key, seconds in self._seen.items()}

    @staticmethod
    def _keys(task: str, policy: str) -> tuple[tuple[str, ...], ...]:
        return (task, policy), ("task", task, ""), ("policy", policy, ""), ()

    def expected_s(self, rollout: Rollout) -> float:
        """Returns the mean duration of the rollout's task under its policy or else of the task, the policy, or all."""
        return next(self._means[key] for key in self._keys(rollout.task_id, rollout.policy) if key in self._means)

    def learned(self, rollouts: Iterable[Rollout]) -> list[tuple[str, str, int, float, float]]:
        """Returns the durations known for these rollouts, from which pods start to estimate.

        Returns:
            (task, policy, number, mean, variance) of the logarithm of seconds, per task and policy; where a task is
            unknown under its policy, those of the task under others. Unknown tasks are left out.
        """
        found = []
        for task, policy in dict.fromkeys((rollout.task_id, rollout.policy) for rollout in rollouts):
            for key in self._keys(task, policy)[:2]:
                if seconds := self._seen.get(key):
                    logs = [math.log(each) for each in seconds]
                    found.append((task, policy, len(logs), round(mean(logs), 4), round(pvariance(logs), 4)))
                    break
        return found
