"""A run directory with a ledger, rollouts for its blocks, and a clock that is set by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rollouts(tasks: int, samples: int = 1) -> list[Rollout]:
    return [Rollout(f"t{i:03d}", "oracle", s, "oracle") for i in range(tasks) for s in range(samples)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    return run
