"""How busy slots were, from starts and ends of rollouts."""

from __future__ import annotations

import pytest

from tests.bench.flat import busy


def test_slots_are_busy_while_a_rollout_runs_and_count_until_the_last_one_starts() -> None:
    assert busy([(0, 10), (0, 12), (10, 20), (12, 99)], slots=2) == pytest.approx((10 + 12 + 2) / 24)
    assert busy([(5, 9), (5, 8)], slots=2) == 1.0
