"""The verbs ``images`` and ``janitor``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc.cli import main


def test_images_are_built_from_a_definition_once_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "marker").write_text("x")
    definition = tmp_path / "tiny.def"
    definition.write_text("Bootstrap: scratch\n%files\n    tiny/marker /marker\n")
    monkeypatch.chdir(tmp_path)
    store = str(tmp_path / "store")
    assert main(["images", "build", "tiny.def", "--store", store, "--json"]) == 0
    built = json.loads(capsys.readouterr().out)["images"]["tiny.def"]
    changed = Path(built).stat().st_mtime_ns
    assert main(["images", "build", "tiny.def", "--store", store]) == 0
    assert Path(built).stat().st_mtime_ns == changed
    capsys.readouterr()
    assert main(["images", "list", "--store", store, "--json"]) == 0
    assert [image["path"] for image in json.loads(capsys.readouterr().out)["images"]] == [built]


def test_an_image_that_fails_to_build_is_the_sites_error_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    definition = tmp_path / "bad.def"
    definition.write_text("Bootstrap: nothing-of-that-name\nFrom: x\n")
    assert main(["images", "build", str(definition), "--store", str(tmp_path / "store")]) == 3
    assert "nothing-of-that-name" in capsys.readouterr().err
    assert not list((tmp_path / "store").glob("*.sif"))
    assert not list((tmp_path / "store").glob("*.partial*"))


def test_the_janitor_counts_what_it_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "owners" / "1-1" / "s1" / "layer").mkdir(parents=True)
    assert main(["janitor", "--scratch", str(tmp_path), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["owners"], counts["sandboxes"], counts["left"]) == (1, 1, 0)
    assert not list((tmp_path / "owners").iterdir())
