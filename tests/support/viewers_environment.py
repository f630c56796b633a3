"""The environment of experiment trackers, Inspect and verifiers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT


@pytest.fixture(scope="session")
def viewers_python() -> Path:
    """The interpreter of that environment; made at the first use (some minutes)."""
    done = subprocess.run(
        ["bash", str(ROOT / "launchers" / "viewers-env.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def environment(**more: str) -> dict[str, str]:
    """Return variables for programs of that environment: the sources to import, and no reports to anybody."""
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    quiet |= {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Compiled files go to a directory of the environment, not to the sources.
    return {**kept, **quiet, "PYTHONPATH": str(ROOT), **more}
