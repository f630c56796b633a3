"""Fixtures of the ledger's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.rundir.layout import RunDir
from tests.support.ledgers import prepared


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory with a ledger."""
    return prepared(tmp_path / "run")
