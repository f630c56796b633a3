"""The campaign of a killed team, in small: tests/bench/killed_team.py says what it does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.bench.killed_team import BATCH, STEPS, campaign


@pytest.mark.slow
def test_a_team_loses_no_group_and_uses_none_twice_although_its_processes_are_killed(tmp_path: Path) -> None:
    counts = campaign(tmp_path, 6, random.Random(0))
    assert counts == {"kills": 6, "requested": STEPS * BATCH, "lost": 0, "twice": 0, "beyond the bound": 0}
