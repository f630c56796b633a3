"""The benchmark of desktops, in small."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.bench import desktops


@pytest.mark.slow
def test_desktops_are_measured_and_killed_owners_leave_nothing(
    desktop_sif: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(scratch))
    parser = argparse.ArgumentParser()
    desktops.add_arguments(parser)
    words = ("--image", str(desktop_sif), "--starts", "1", "--desktops", "1", "--actions", "3", "--owners", "1")
    figures = {figure.name: figure for figure in desktops.run(parser.parse_args(words), print)}
    left = [figure.value for name, figure in figures.items() if name.endswith("left by killed owners")]
    assert left == [0, 0, 0]
    assert all(figure.value > 0 for name, figure in figures.items() if not name.endswith("left by killed owners"))
    assert figures["processes and threads of a desktop"].value < 512
