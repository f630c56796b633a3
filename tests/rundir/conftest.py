"""An empty run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.rundir.layout import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run
