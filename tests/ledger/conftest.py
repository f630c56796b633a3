"""Fixtures of the ledger's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory with a ledger."""
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    return run
