"""A run directory with a ledger, rollouts for its blocks, tasks for these, a lease, and a clock set by hand."""

from __future__ import annotations

from pathlib import Path

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout

NOW = 1.79e9
"""A time in records, seconds since 1970."""
LEASE = {
    "pod": "8_0",
    "start": "0",
    "job_id": "",
    "host": "elsewhere",
    "pid": 7,
    "pid_start": 8,
    "counter": 3,
    "t": NOW,
    "running": 1,
    "queued": 1,
    "stored": 1,
    "tokens": 1,
    "tokens_per_s": 1.5,
    "core_s": 10.0,
    "began_at": NOW,
    "ended": False,
}
"""A lease as its file holds it, of a pod that ran on another host."""


def prepared(path: Path) -> RunDir:
    """A run directory with a ledger."""
    run = RunDir(path)
    run.create()
    Ledger(run).create()
    return run


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
