"""Progress of training in the status: its step, the last steps, and the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.cli.output import training_lines
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.monitor.training import TrainerJob
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit, Trainer, say_last
from megaflow_hpc.training.algorithms import choice
from megaflow_hpc.training.plan import TrainingFiles
from tests.support.training import training_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = training_run(tmp_path / "run", {"steps": 20})
    (made.ledger / "open").mkdir(exist_ok=True)
    (made.ledger / "open" / "default").touch()
    return made


def test_the_last_steps_are_told_with_their_means_and_the_share_of_waiting(run: RunDir) -> None:
    monitor = Monitor(run)
    before = monitor.status()["training"]["default"]
    assert (before["step"], before["steps"], before["last"], before["reward"]) == (0, 20, [], None)
    files = TrainingFiles(run, "default")
    files.create()
    for step in range(1, 8):
        metrics = {"reward": step / 10, "seconds": 10.0, "seconds/wait": float(step), "entropy": 0.5, "own": 1.0}
        files.commit(Commit(step=step, weights=step, metrics=metrics if step < 7 else {**metrics, "clipped": 0.25}))
    found = monitor.status()["training"]["default"]
    assert (found["step"], found["weights"]) == (7, 7)
    assert [row["step"] for row in found["last"]] == [3, 4, 5, 6, 7]
    assert found["last"][-1]["clipped"] == found["clipped"] == 0.25
    assert "own" not in found["last"][-1]
    assert found["reward"] == pytest.approx(0.5)
    assert found["wait_share"] == pytest.approx(0.5)


def test_a_trainer_is_where_its_job_is_and_its_last_word_stays(run: RunDir) -> None:
    monitor, files = Monitor(run), TrainingFiles(run, "default")

    def trainer(jobs: dict[str, TrainerJob] | None) -> dict[str, object]:
        return monitor.status(trainers=jobs)["training"]["default"]["trainer"]

    assert trainer(None)["state"] == "unknown"
    assert trainer({})["state"] == "not started"
    queued = trainer({"default": TrainerJob("queued", "7", reason="Priority")})
    assert (queued["state"], queued["job_id"], queued["cause"]) == ("queued", "7", "Priority")
    files.create()
    number = files.enter(Trainer(node="n1", job_id="7"))
    assert trainer({"default": TrainerJob("running", "7", "n1")})["state"] == "running"
    log = run.logs / "trainer-7.log"
    log.write_text("of an earlier start: Error: no\nloading\nConfigError: the tokenizer does not match\n")
    say_last(run, "default", "failed", 2, log, len("of an earlier start: Error: no\n"))
    ended = trainer({})
    assert (ended["state"], ended["node"], ended["job_id"], ended["starts"]) == ("ended", "n1", "7", 1)
    assert ended["last_word"]["word"] == "failed"
    assert ended["last_word"]["cause"] == "ConfigError: the tokenizer does not match"
    files.commit(Commit(step=20, trainer=number))
    (run.ledger / "open" / "default").unlink()
    say_last(run, "default", "done", 0, log)
    done = trainer({})
    assert (done["state"], "cause" in done["last_word"]) == ("done", False)


@pytest.mark.parametrize(
    ("z", "temperature", "warned"),
    [(39.8, 0.62, True), (-9.0, 1.4, True), (2.0, 0.9, False), (30.0, 0.99, False), (None, None, False)],
)
def test_status_warns_of_tokens_that_look_sampled_otherwise(
    run: RunDir, z: float | None, temperature: float | None, warned: bool
) -> None:
    files = TrainingFiles(run, "default")
    files.create()
    metrics = {} if z is None or temperature is None else {"sampling_z": z, "sampling_temperature": temperature}
    for step in (1, 2):
        files.commit(Commit(step=step, metrics={"reward": 0.5, "seconds": 1.0, **metrics}))
    status = Monitor(run).status()
    found = status["training"]["default"]
    assert (found["sampling_z"], found["sampling_temperature"]) == (z, temperature)
    lines = [line for line in training_lines(status) if "seem to be sampled at" in line]
    assert len(lines) == len(found["warnings"]) == warned
    if warned and z:
        assert f"{temperature} times the trained temperature" in lines[0]
        assert f"(z {z:.0f})" in lines[0]


def test_status_warns_if_most_rollouts_have_no_token_to_train_on(run: RunDir) -> None:
    files, name = TrainingFiles(run, "default"), f"dropped/{choice.NOTHING_SAMPLED}"
    files.create()
    files.commit(Commit(step=1, metrics={"reward": 0.5, "rollouts": 8.0, name: 7.0}))
    assert Monitor(run).status()["training"]["default"]["warnings"] == []
    files.commit(Commit(step=2, metrics={"rollouts": 0.0, name: 16.0}))
    (warning,) = Monitor(run).status()["training"]["default"]["warnings"]
    assert warning.startswith("23 rollouts of the last 2 steps had no token that the policy sampled freely")
