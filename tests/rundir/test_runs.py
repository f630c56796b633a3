"""Finding the runs under a directory, and the run that a user names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir import runs
from tests.support.samples import run_dir


def planned(path: Path, at: int) -> Path:
    os.utime(run_dir(path).run_json, (at, at))
    return path


def test_runs_are_found_newest_first_by_every_way_to_them_and_once(tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    old, new = planned(home / "project" / "runs" / "old", 1000), planned(scratch / "new", 2000)
    (home / "runs").symlink_to(scratch)
    (home / "circle").symlink_to(home)
    (home / "nowhere").symlink_to(tmp_path / "gone")
    planned(home / ".cache" / "hidden", 3000)
    planned(home / "a" / "b" / "c" / "deep", 3000)
    planned(old / "export" / "copy", 3000)
    (home / "foreign").mkdir()
    (home / "foreign" / "run.json").write_text('{"format": "another"}')
    planned(home / "foreign" / "below", 1500)
    found = runs.find(home)
    assert found == runs.FoundRuns([home / "runs" / "new", home / "foreign" / "below", old])
    assert runs.latest(home) == home / "runs" / "new"
    assert runs.find(old).runs == [old]
    assert runs.named(f"{home}/latest") == home / "runs" / "new"
    assert runs.named(str(new)) == new
    (home / "latest").symlink_to(old)
    assert runs.named(f"{home}/latest") == home / "latest", "what is there is meant"


def test_a_run_whose_planning_did_not_end_is_shown_and_never_the_latest(tmp_path: Path) -> None:
    whole = planned(tmp_path / "whole", 1000)
    half = planned(tmp_path / "half", 2000)
    (half / "run.json").unlink()
    cut = planned(tmp_path / "cut", 3000)
    (cut / "run.json").write_text("")
    assert {*runs.find(tmp_path).runs} == {whole, half, cut}
    (cut / "run.json").unlink()
    assert runs.latest(tmp_path) == whole
    (whole / "run.json").unlink()
    with pytest.raises(ConfigError, match=f"no run directory in {tmp_path} or 3 levels below; name one"):
        runs.latest(tmp_path)
    with pytest.raises(ConfigError, match="not a readable directory"):
        runs.find(tmp_path / "missing")


def test_a_search_has_a_bound_and_near_runs_are_found_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = planned(tmp_path / "z", 1000)
    for number in range(20):
        (tmp_path / "data" / f"{number:02}" / "below").mkdir(parents=True)
    monkeypatch.setattr(runs, "DIRECTORIES", 10)
    assert runs.find(tmp_path) == runs.FoundRuns([near], cut=True)
    with pytest.raises(
        ConfigError, match=r"too many files in .* to search; name the run, or its parent directory as DIR/latest"
    ):
        runs.latest(tmp_path)
    monkeypatch.setattr(runs, "DIRECTORIES", 5000)
    monkeypatch.setattr(runs, "ENTRIES", 15)
    assert runs.find(tmp_path).cut
    assert runs.latest(near) == near


def test_runs_are_found_beside_more_task_directories_than_a_search_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "DIRECTORIES", 20)
    for number in range(50):
        (tmp_path / "many" / f"t{number:02}" / "tests").mkdir(parents=True)
        (tmp_path / "many" / f"t{number:02}" / "task.toml").touch()
    old, new = planned(tmp_path / "runs" / "old", 1000), planned(tmp_path / "runs" / "new", 2000)
    found = runs.find(tmp_path)
    assert (found.runs, found.cut, found.cut_runs) == ([new, old], True, False)
    assert runs.latest(tmp_path) == new
    monkeypatch.setattr(runs, "DIRECTORIES", 60)
    assert not runs.find(tmp_path).cut, "tasks are not searched"
    monkeypatch.setattr(runs, "DIRECTORIES", 3)
    with pytest.raises(ConfigError, match="too many files"):
        runs.latest(tmp_path)
