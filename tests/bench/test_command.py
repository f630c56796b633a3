"""What benchmarks share: their command line, figures with goals and peers, and the report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench import dispatch
from tests.bench.command import main, page
from tests.bench.figures import Figure, median, report
from tests.bench.flat import busy

Capture = pytest.CaptureFixture[str]


def test_durations_that_are_none_are_named_with_file_and_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "seconds.txt"
    words = ["--simulate", "--durations", str(file)]
    for content, said in (
        ("12.5\n\nsoon\n", f"{file}:3: 'soon': give seconds above 0, one number a line"),
        ("-1\n", f"{file}:1: '-1': give seconds above 0"),
        ("", f"{file}: empty; give seconds above 0"),
    ):
        file.write_text(content)
        assert main(dispatch.__doc__, dispatch.add_arguments, dispatch.run, words) == 2
        assert said in capsys.readouterr().err


def test_a_table_has_a_line_for_each_figure_and_each_of_its_peers() -> None:
    met = median("starts", "ms", [10.0, 20.0, 30.0], goal=25.0).beside("other", "1.2", 200.0)
    missed = median("commands", "per s", [100.0], goal=3000.0, better="higher")
    head, _, *lines = page([met, missed, Figure("memory", "MB", 5.25, 1)]).splitlines()
    assert head.split()[:3] == ["figure", "value", "unit"]
    assert [re.split(r"  +", line.strip()) for line in lines] == [
        ["starts", "20", "ms", "10 – 30", "3", "≤ 25", "met"],
        ["other 1.2", "200", "ms", "10 ×"],
        ["commands", "100", "per s", "100 – 100", "1", "≥ 3000", "missed"],
        ["memory", "5.25", "MB", "1"],
    ]


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


def test_slots_are_busy_while_a_rollout_runs_and_count_until_the_last_one_starts() -> None:
    assert busy([(0, 10), (0, 12), (10, 20), (12, 99)], slots=2) == pytest.approx((10 + 12 + 2) / 24)
    assert busy([(5, 9), (5, 8)], slots=2) == 1.0
