"""Every rollout counts once although the run directory misbehaves like a network file system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ledger.passthrough import DEVICE, device

SCALE = "0.3"
"""A hundredth of the real times."""


@pytest.mark.slow
@pytest.mark.skipif(not device(), reason=f"no FUSE device that this user may open: /dev/fuse is closed, {DEVICE} unset")
def test_a_fuse_mount_for_each_that_misbehaves_loses_and_doubles_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ledger.faults", str(tmp_path / "run"), "--scale", SCALE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout)
    assert found["old attributes"]
    met = found["faults"].values()
    assert all(sum(each[kind] for each in met) for kind in ("stale", "replayed", "ESTALE", "pauses"))
