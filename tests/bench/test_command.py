"""The command line of the benchmarks, without measuring: errors and the table of figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench import dispatch
from tests.bench.command import main, page
from tests.bench.figures import Figure, median

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
