"""The environment in which Harbor is installed, and with it LiteLLM."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT


@pytest.fixture(scope="session")
def harbor_python() -> Path:
    """The interpreter of an environment with Harbor; made at the first use (a minute or two)."""
    done = subprocess.run(
        ["bash", str(ROOT / "launchers" / "harbor-env.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
