"""The verb ``janitor``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc.cli import main


def test_the_janitor_counts_what_it_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "owners" / "1-1" / "s1" / "layer").mkdir(parents=True)
    (tmp_path / "cache" / "work" / "1-1.abcd" / "rootfs").mkdir(parents=True)
    assert main(["janitor", "--scratch", str(tmp_path), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["owners"], counts["sandboxes"], counts["left"]) == (1, 1, 0)
    assert not list((tmp_path / "owners").iterdir())
    assert not list((tmp_path / "cache" / "work").iterdir())


def test_a_file_that_is_not_there_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["images", "build", "nothing.def"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"megaflow-hpc: images build: {tmp_path}/nothing.def: no such file; expected a SIF")
