"""A run directory with a ledger, rollouts for its blocks, and a clock that is set by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    return run
