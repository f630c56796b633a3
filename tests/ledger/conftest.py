"""A run directory with a ledger, and rollouts for its blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout


def rollouts(tasks: int, samples: int = 1) -> list[Rollout]:
    return [Rollout(f"t{i:03d}", "oracle", s, "oracle") for i in range(tasks) for s in range(samples)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    return run
