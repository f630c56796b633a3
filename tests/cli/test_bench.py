"""``bench`` without measuring: what needs a checkout, what is refused, and the form of its report."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megaflow_hpc.bench import checkout
from megaflow_hpc.bench.figures import Figure, median
from megaflow_hpc.cli import main
from megaflow_hpc.cli.bench import page

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("sandbox --peers --image {image}", "--peers"),
        ("exec --peers --image {image}", "--peers"),
        ("gateway --peers --shapes", "--peers"),
        ("gateway --conversations 1 --shapes", "--conversations"),
        ("gateway --shapes", "bench gateway"),
        ("images", "bench images"),
        ("dispatch --peers", "--peers"),
        ("dispatch --metadata", "--metadata"),
        ("dispatch --simulate --policies", "--policies"),
        ("store --peers --rollouts 0 --generated 0", "--peers"),
        ("campaign --image {image}", "bench campaign"),
        ("campaign --image {image} --chaos", "bench campaign"),
    ],
)
def test_what_comes_with_the_sources_is_refused_without_them_in_one_line(
    words: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(checkout, "ROOT", tmp_path / "site-packages")
    (tmp_path / "image.sif").touch()
    assert main(["bench", *shlex.split(words.format(image=tmp_path / "image.sif")), "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith(f"megaflow-hpc: {option}: needs the sources, and {checkout.ROOT} is no checkout")
    assert "clone the repository" in line


@pytest.mark.parametrize("module", sorted(path.stem for path in (checkout.ROOT / "tests" / "bench").glob("[a-z]*.py")))
def test_a_checkout_has_every_part_and_none_needs_more_than_the_package_to_be_imported(module: str) -> None:
    assert checkout.from_checkout(module, "--peers").__doc__


def test_durations_that_are_none_are_named_with_file_and_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "seconds.txt"
    words = ["bench", "dispatch", "--simulate", "--durations", str(file)]
    for content, said in (
        ("12.5\n\nsoon\n", f"{file}:3: 'soon': give seconds above 0, one number a line"),
        ("-1\n", f"{file}:1: '-1': give seconds above 0"),
        ("", f"{file}: empty; give seconds above 0"),
    ):
        file.write_text(content)
        assert main(words) == 2
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
