"""A trainer as other processes see it: its commits, complete or absent, its starts, and the last word on the last
start."""

from __future__ import annotations

from pathlib import Path

from megaflow_hpc.rundir.training import Commit, Trainer, TrainingView
from megaflow_hpc.training.plan import TrainingFiles
from tests.support.samples import run_dir


def test_the_last_commits_are_seen_the_newest_as_it_is_now(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    view, files = TrainingView(run, "default"), TrainingFiles(run, "default")
    assert view.commits(3) == []
    files.create()
    for step in range(1, 6):
        files.commit(Commit(step=step, metrics={"reward": step / 10}))
    assert [commit.step for commit in view.commits(3)] == [3, 4, 5]
    files.commit(Commit(step=5, metrics={"reward": 0.5}, checkpoint="checkpoints/5"))
    (files.path / "commits" / "000004.json").unlink()  # pruned
    assert [(commit.step, commit.checkpoint) for commit in view.commits(2)] == [(3, None), (5, "checkpoints/5")]
    (files.path / "commits" / "000006.json").write_text('{"step": 6, "met')
    assert [commit.step for commit in view.commits(2)] == [5]


def test_starts_and_the_last_word_are_seen(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    view, files = TrainingView(run, "default"), TrainingFiles(run, "default")
    assert (view.trainers(), view.last_word()) == ([], None)
    files.create()
    for job in ("7", "8"):
        files.enter(Trainer(node="n1", pid=5, job_id=job))
    assert [start.job_id for start in view.trainers()] == ["7", "8"]
    (files.path / "last").write_text(
        "failed n1 2 /logs of it/t.log\nloading\ntrainer: no tokenizer\nRuntimeError: by another rank\n"
    )
    word = view.last_word()
    assert word is not None
    assert (word.word, word.node, word.exit_status, word.log) == ("failed", "n1", 2, "/logs of it/t.log")
    assert word.cause == "trainer: no tokenizer"
    (files.path / "last").write_text("fail")
    assert view.last_word() is None
