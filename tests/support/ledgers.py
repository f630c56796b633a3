"""Rollouts for the blocks of a ledger, tasks for these, and a clock set by hand."""

from __future__ import annotations

from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.types import Rollout


def rollouts(tasks: int, samples: int = 1) -> list[Rollout]:
    """``samples`` rollouts of each of ``tasks`` tasks, in the order of a plan."""
    return [Rollout(f"t{i:03d}", "oracle", s, "oracle") for i in range(tasks) for s in range(samples)]


class AnyTasks(dict[str, PlannedTask]):
    """Tasks of a campaign that has every task that is asked for."""

    def __missing__(self, task: str) -> PlannedTask:
        return PlannedTask({"id": task, "image": "none"}, {})


class Clock:
    """A clock that a test sets by hand: seconds in ``now``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
