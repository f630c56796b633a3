"""The soak, in small: tests/bench/soak.py says what it does."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.bench.soak import soak


@pytest.mark.slow
def test_nothing_is_left_of_sandboxes_whose_owners_are_killed_at_random(base_sif: Path, tmp_path: Path) -> None:
    log = io.StringIO()
    verdict = soak(str(base_sif), sandboxes=60, slots=8, seed=3, scratch=tmp_path / "scratch", log=log)
    assert verdict["passed"], log.getvalue()
    assert verdict["workers_killed"] >= 1
