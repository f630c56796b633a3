"""The benchmark of a campaign that is weeks old runs, and its campaign stores each rollout once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import aged


def test_two_days_of_ten_pods_are_a_table_of_two_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pods", "10", "--days", "2", "--walltime", "4h", "--seconds", "10", "--rollouts", "360"]
    words += ["--directory", str(tmp_path)]
    assert aged.main(words) == 0
    said = capsys.readouterr().out
    assert "10 pods, walltimes of 4h, 120 starts in 2 days" in said
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in said.splitlines() if line.startswith("| ")}
    assert [column.strip() for column in rows[""]] == ["day 1", "day 2"]
    assert all(float(figure) < aged.MAX_TAKEOVER_S for figure in rows["takeover of the leader, simulated s"])
    assert all(float(figure) > 0 for figure in rows["all pods, operations/s"])
    assert list(tmp_path.iterdir()) == []
