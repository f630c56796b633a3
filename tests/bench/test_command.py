"""Figures of benchmarks: ratios to peers, and the share of busy slots."""

from __future__ import annotations

import pytest

from tests.bench.figures import median
from tests.bench.flat import busy


def test_a_peer_ratio_above_one_means_that_ours_is_better() -> None:
    faster = median("start", "ms", [10.0, 20.0, 30.0], goal=25.0).beside("other", "1.0", 200.0)
    assert (faster.value, faster.passed, faster.peers[0].ratio) == (20.0, True, 10.0)
    rate = median("commands", "1/s", [100.0], goal=3000.0, better="higher").beside("other", "1.0", 50.0)
    assert (rate.passed, rate.peers[0].ratio) == (False, 2.0)


def test_slots_are_busy_while_a_rollout_runs_and_count_until_the_last_one_starts() -> None:
    assert busy([(0, 10), (0, 12), (10, 20), (12, 99)], slots=2) == pytest.approx((10 + 12 + 2) / 24)
    assert busy([(5, 9), (5, 8)], slots=2) == 1.0
