"""A run directory of somebody else, in which directories that a verb writes to are links to the reader's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import LiveFiles
from tests.support.campaigns import Make, gathered, verb


@pytest.fixture
def run(make_campaign: Make, tmp_path: Path) -> RunDir:
    return gathered(make_campaign(), tmp_path / "run")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """What links lead to: files of the names that verbs write, and others."""
    folder = tmp_path / "mine"
    (folder / "atif").mkdir(parents=True)
    names = ("index.html", "figures.json", "trajectories.jsonl", "preds.json", "atif/thesis", "jobs.lock")
    for name in names:
        (folder / name).write_text("mine")
    return folder


def link(run: RunDir, name: str, mine: Path) -> None:
    shutil.rmtree(run.path / name, ignore_errors=True)
    (run.path / name).symlink_to(mine)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("report", ["report", "--no-pictures"]),
        ("report", ["report"]),
        ("export", ["export", "--format", "jsonl,atif,preds"]),
        ("ledger", ["gather", "--rebuild"]),
        ("live", ["cancel"]),
        ("ledger", ["cancel"]),
        ("ledger", ["resume"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_no_verb_writes_through_a_link_of_a_run_directory(name: str, words: list[str], run: RunDir, mine: Path) -> None:
    link(run, name, mine)
    before = contents(mine)
    done = verb(words[0], run, *words[1:])
    assert contents(mine) == before
    assert done.returncode == 2
    assert f"{run.path / name}: " in done.stderr
    assert "link" in done.stderr


@pytest.mark.parametrize("words", [["report", "--no-pictures"], ["export", "--format", "jsonl,atif,preds"]])
def test_a_report_and_an_export_beside_a_file_follow_no_link(words: list[str], run: RunDir, mine: Path) -> None:
    """A file's report is written beside it, where an archive may have put a link."""
    beside = run.path.parent / "unpacked"
    beside.mkdir()
    shutil.copy(run.trajectories, beside)
    (beside / words[0]).symlink_to(mine)
    before = contents(mine)
    assert verb(words[0], beside / "trajectories.h5", *words[1:]).returncode == 2
    assert contents(mine) == before


@pytest.mark.parametrize("words", [["report", "--no-pictures"], ["export", "--format", "jsonl,atif,preds"]])
def test_files_that_are_links_are_replaced_and_not_followed(words: list[str], run: RunDir, mine: Path) -> None:
    folder = run.path / words[0]
    folder.mkdir(exist_ok=True)
    before = contents(mine)
    for name in before:
        if "/" not in name:
            (folder / name).symlink_to(mine / name)
    (folder / "atif").symlink_to(mine / "atif")
    done = verb(words[0], run, *words[1:], "--json")
    assert done.returncode == 0, done.stderr
    assert contents(mine) == before
    assert str(folder) in done.stdout
    assert "/proc/" not in done.stdout
    made = {"report": ("index.html", "figures.json"), "export": ("trajectories.jsonl", "atif")}
    assert not any((folder / name).is_symlink() for name in made[words[0]])


def test_a_viewer_asks_through_no_link(run: RunDir, mine: Path) -> None:
    link(run, "live", mine)
    before = contents(mine)
    with pytest.raises(OSError, match="link"):
        LiveFiles(run).ask(["task0/oracle/0"])
    assert contents(mine) == before


def test_a_run_directory_with_links_is_not_changed(run: RunDir, mine: Path) -> None:
    link(run, "ledger", mine)
    with pytest.raises(ConfigError, match=f"{run.ledger}: .*link"):
        run.check_ours()
