"""How long the rollouts of earlier campaigns took, read from their trajectories.h5: what plans and pods learn from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, pvariance

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Rollout


def durations(path: Path) -> list[tuple[str, str, float]]:
    """(task, policy, seconds) of every rollout that was carried out.

    Args:
        path: a run directory or a trajectories.h5.

    Raises:
        ConfigError: there is no such file, or it is none of ours.
    """
    import h5py

    file_path = path / "trajectories.h5" if path.is_dir() else path
    try:
        with h5py.File(file_path) as file:
            table = file["trajectories"]
            ids, statuses = table["id"].asstr(errors="replace")[:], table["status"].asstr()[:]
            seconds = table["finished_at"][:] - table["started_at"][:]
    except (OSError, KeyError) as error:
        raise ConfigError(
            f"{file_path}: cannot be read as trajectories ({error}); give a run directory that was gathered, "
            "or its trajectories.h5"
        ) from None
    return [
        (*rollout_id.rsplit("/", 2)[:2], float(took))
        for rollout_id, status, took in zip(ids, statuses, seconds, strict=True)
        if status in ("completed", "truncated") and took > 0
    ]


class Durations:
    """What earlier campaigns tell of durations.

    Raises:
        ConfigError: a file cannot be read, or none tells of a rollout that was carried out.
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
        """Mean of a rollout's task under its policy; where that is unknown of the task, of the policy, or of all."""
        return next(self._means[key] for key in self._keys(rollout.task_id, rollout.policy) if key in self._means)

    def learned(self, rollouts: Iterable[Rollout]) -> list[tuple[str, str, int, float, float]]:
        """What pods of these rollouts begin with: (task, policy, number, mean, variance) of the logarithm of seconds.

        Of a task under its policy; where that is unknown, of the task under others. Others are left to be guessed.
        """
        found = []
        for task, policy in dict.fromkeys((rollout.task_id, rollout.policy) for rollout in rollouts):
            for key in self._keys(task, policy)[:2]:
                if seconds := self._seen.get(key):
                    logs = [math.log(each) for each in seconds]
                    found.append((task, policy, len(logs), round(mean(logs), 4), round(pvariance(logs), 4)))
                    break
        return found
