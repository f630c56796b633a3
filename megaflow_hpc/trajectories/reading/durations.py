"""Reads rollout durations from earlier campaigns, for estimates."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

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
    """Rollout durations from an earlier campaign, by task and arm (:attr:`.Rollout.arm`).

    Args:
        path: A gathered run directory, or a ``trajectories.h5``.

    Raises:
        ConfigError: The file cannot be read, or no rollout reached verification.
    """

    def __init__(self, path: Path) -> None:
        seconds: dict[tuple[str, ...], list[float]] = {}
        for task, arm, duration in durations(path):
            for key in _keys(task, arm):
                seconds.setdefault(key, []).append(duration)
        if not seconds:
            raise ConfigError(f"{path}: no rollout ran there; give another run")
        self._means = {key: mean(durations) for key, durations in seconds.items()}

    def expected_s(self, rollout: Rollout) -> float:
        """Returns the mean duration, in seconds, of rollouts with the same task and arm.

        Falls back to rollouts of the same task, then of the same arm, then to all rollouts.
        """
        return next(self._means[key] for key in _keys(rollout.task_id, rollout.arm) if key in self._means)


def _keys(task: str, arm: str) -> tuple[tuple[str, ...], ...]:
    """Returns the lookup keys of a duration, from most to least specific."""
    return (task, arm), ("task", task, ""), ("arm", arm, ""), ()
