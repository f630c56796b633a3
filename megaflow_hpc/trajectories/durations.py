"""How long the rollouts of earlier campaigns took, read from their trajectories.h5: what a plan's order learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

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


def expectation(paths: Iterable[Path]) -> Callable[[Rollout], float]:
    """Mean seconds of a rollout's task under its policy; where that is unknown of the task, of the policy, or of all.

    Raises:
        ConfigError: a file cannot be read, or none tells of a rollout that was carried out.
    """
    sums: dict[tuple[str, ...], tuple[float, int]] = {}
    paths = list(paths)
    for path in paths:
        for task, policy, seconds in durations(path):
            for key in ((task, policy), ("task", task, ""), ("policy", policy, ""), ()):
                total, count = sums.get(key, (0.0, 0))
                sums[key] = total + seconds, count + 1
    if not sums:
        raise ConfigError(f"{', '.join(map(str, paths))}: no rollout was carried out there; leave learn_from out")

    def expected_s(rollout: Rollout) -> float:
        task, policy = rollout.task_id, rollout.policy
        for key in ((task, policy), ("task", task, ""), ("policy", policy, ""), ()):
            if key in sums:
                total, count = sums[key]
                return total / count
        raise AssertionError

    return expected_s
