"""Amendments are claimed under one number each, never change, and apply to the same steps after every restart."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import msgspec
import pytest

from megaflow_hpc.cli import main
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.rundir import amendments
from megaflow_hpc.rundir.amendments import TRAINER, Amendment, Amendments, settings
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED
from megaflow_hpc.rundir.training import Commit
from tests.support.training import training_run

FORK = multiprocessing.get_context("fork")


def claim(run: RunDir, names: range) -> None:
    own = Amendments(run, "default")
    for name in names:
        own.claim(Amendment(step=1, rollouts=(str(name),)))


def commit(run: RunDir, step: int, known: int = 0) -> None:
    folder = run.training / "default" / "commits"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{step:06d}.json").write_bytes(msgspec.json.encode(Commit(step=step, amendments=known)))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return training_run(tmp_path / "run", {"policies": {"default": {}}})


def test_processes_that_claim_at_once_get_a_number_each(run: RunDir) -> None:
    ranges = [range(first, first + 20) for first in (0, 20, 40)]
    processes = [FORK.Process(target=claim, args=(run, names)) for names in ranges]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = Amendments(run, "default").read()
    assert sorted(int(one.rollouts[0]) for one in found) == list(range(60))


def test_a_committed_step_keeps_the_amendments_that_it_knew(run: RunDir) -> None:
    own = Amendments(run, "default")
    amendments.change(run, "default", {"lr": 1e-5, "steps": 9})
    amendments.skip(run, "default", 3)
    amendments.change(run, "default", {"lr": 1e-6})
    own.claim(Amendment(step=2, microbatch=8, by=TRAINER))
    assert settings(own.in_force(1)) == {"lr": 1e-6, "steps": 9}
    assert settings(own.in_force(1, known=1)) == {"lr": 1e-5, "steps": 9}
    assert settings(own.in_force(1, known=0)) == {}
    assert settings(own.in_force(4, known=0)) == {"microbatch": 8}  # a repeated step needs the trainer's own
    assert [one.skip for one in own.in_force(3, known=2)] == [False, True, False]


def test_an_amendment_that_comes_too_late_is_refused_and_one_that_the_commit_overtakes_is_reported(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(run, 1)
    with pytest.raises(ConfigError, match="step 1 of policy 'default' is committed already; nothing was changed"):
        amendments.skip(run, "default", 1)
    with pytest.raises(ConfigError, match="steps 0: expected a whole number"):
        amendments.change(run, "default", {"steps": 0})
    commit(run, 2)
    with pytest.raises(ConfigError, match="steps 1: 2 steps are committed already"):
        amendments.change(run, "default", {"steps": 1})
    assert Amendments(run, "default").read() == []
    claim = Amendments.claim

    def overtaken(own: Amendments, amendment: Amendment) -> int:
        number = claim(own, amendment)
        commit(run, 3)
        return number

    monkeypatch.setattr(Amendments, "claim", overtaken)
    with pytest.raises(ConfigError, match="step 3 of policy 'default' is committed meanwhile, so amendment 1 has no"):
        amendments.skip(run, "default", 3)


def test_the_command_amends_the_policy_that_is_trained(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["training", "set", str(run.path), "lr=1e-5", "microbatch=64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"amendment": 1, "policy": "default", "lr": 1e-5, "microbatch": 64}
    assert main(["training", "skip", str(run.path), "7", "--cause", "a test"]) == 0
    assert capsys.readouterr().out == "2\n"
    changed, skipped = Amendments(run, "default").read()
    assert (changed.lr, changed.microbatch, changed.step) == (1e-5, 64, 0)
    assert (skipped.step, skipped.skip, skipped.cause) == (7, True, "a test")
    for words, said in (
        (["skip", str(run.path), "7", "task-0/default/0"], "step 7 of policy 'default' is not planned yet"),
        (["skip", str(run.path), "7", "--policy", "other"], "policy 'other' is not trained; give --policy: default"),
        (["set", str(run.path), "batch=3"], "batch=3: expected lr=…, microbatch=…, steps=…"),
    ):
        assert main(["training", *words]) == 2
        assert said in capsys.readouterr().err
    assert len(Amendments(run, "default").read()) == 2
    (run.path / FINISHED).write_text(json.dumps({"blocks": len(read_blocks(run))}))
    assert main(["training", "skip", str(run.path), "8"]) == 2
    assert "is finished, so no trainer will start" in capsys.readouterr().err
