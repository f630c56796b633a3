"""Runs that somebody moved or purged in part, or that another version planned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import ConfigError
from tests.support.campaigns import Make, forked, planned, rows


@pytest.fixture
def run(make_campaign: Make) -> Run:
    return planned(make_campaign(3, agent="oracle"))


def test_a_run_of_which_blocks_or_the_ledger_are_gone_is_refused(run: Run) -> None:
    (run.dir.tasks / "000001.json").unlink()
    with pytest.raises(
        ConfigError, match=r"1 of 3 rollouts are missing from the blocks in tasks/; restore it, or gather"
    ):
        run.resume(launcher="local")
    shutil.rmtree(run.dir.ledger)
    with pytest.raises(ConfigError, match="ledger/, which records what is done, is missing"):
        Run(run.path).resume(launcher="local")
    assert not run.dir.ledger.exists()


def test_another_minor_version_is_refused_before_anything_is_queued(run: Run) -> None:
    text = run.dir.run_json.read_text()
    run.dir.run_json.write_text(text.replace('"version": "0.', '"version": "9.'))
    with pytest.raises(ConfigError, match=r"made by megaflow-hpc 9\..*install 9\..* to continue it, or plan again"):
        Run(run.path).resume(launcher="local")


@pytest.mark.slow  # a whole campaign
def test_a_run_that_was_moved_and_purged_of_what_was_empty_goes_on(run: Run, tmp_path: Path) -> None:
    moved = run.path.rename(tmp_path / "elsewhere")
    for room in ("journal", "events", "logs", "weights"):
        (moved / room).rmdir()
    assert forked("resume", moved, "--launcher", "local").returncode == 0
    assert set(rows(moved).values()) == {("completed", 1.0)}
    shutil.rmtree(moved / "journal")
    assert Run(moved).status()["warnings"] == [], "what is gathered needs no journal"
    (moved / "trajectories.h5").unlink()
    [warning] = Run(moved).status()["warnings"]
    assert "journals of 1 pods with 3 stored rollouts are missing" in warning
