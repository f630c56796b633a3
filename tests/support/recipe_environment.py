"""The environment in which the packages of recipes are installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.places import LAUNCHERS


@pytest.fixture(scope="session")
def recipes_python() -> Path:
    """The interpreter of an environment with the packages that recipes need; made at the first use."""
    done = subprocess.run(["bash", str(LAUNCHERS / "recipes-env.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
