"""Figures: goals, peers and the form of the report."""

from __future__ import annotations

from tests.bench.figures import median, report


def test_a_peer_ratio_above_one_means_that_ours_is_better() -> None:
    faster = median("start", "ms", [10.0, 20.0, 30.0], goal=25.0).beside("other", "1.0", 200.0)
    assert (faster.value, faster.passed, faster.peers[0].ratio) == (20.0, True, 10.0)
    rate = median("commands", "1/s", [100.0], goal=3000.0, better="higher").beside("other", "1.0", 50.0)
    assert (rate.passed, rate.peers[0].ratio) == (False, 2.0)


def test_the_report_names_machine_date_and_every_field_of_the_contract() -> None:
    content = report([median("start", "ms", [1.0, 2.0])])
    assert {"machine", "date", "figures"} == set(content)
    assert {"name", "unit", "value", "spread", "n", "goal", "pass", "simulated", "peers"} <= set(content["figures"][0])
    assert content["figures"][0]["pass"] is None
