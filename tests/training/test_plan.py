"""The trainer's files: each record is claimed once, complete or absent, and protected from an earlier live trainer."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError, LedgerError
from megaflow_hpc.rundir.amendments import Amendment
from megaflow_hpc.rundir.training import Commit, Trainer
from megaflow_hpc.training.plan import AMENDED, PlannedRollout, RecordPlace, Settled, StepPlan, TrainingFiles, amended
from tests.support.samples import run_dir


@pytest.fixture
def files(tmp_path: Path) -> TrainingFiles:
    found = TrainingFiles(run_dir(tmp_path / "run"), "default")
    found.create()
    return found


def test_a_plan_comes_back_as_it_was_claimed(files: TrainingFiles) -> None:
    rollout = PlannedRollout(
        id="a/default/0", task="a", group="a/default", place=RecordPlace("p.0.journal", 28, 1), oldest=3
    )
    plan = StepPlan(
        step=12,
        version=5,
        seed=[0, 2, 12],
        rollouts=[rollout],
        drops={"b/default": "zero variance"},
        settled=Settled(
            cursor={"journals": {"p.0.journal": 99}}, waiting=[RecordPlace("p.0.journal", 60)], first_block=4
        ),
        state={"data": {"x": [1.5, None]}},
        trainer=2,
    )
    assert files.read(StepPlan, 12) is None
    assert files.claim(12, plan) is plan
    assert files.read(StepPlan, 12) == plan
    assert plan.staleness == [2]
    assert len(files.digest(12)) == 64


def test_of_many_who_claim_a_step_one_makes_its_plan_and_all_have_that(files: TrainingFiles) -> None:
    found: list[StepPlan] = []
    ready = threading.Barrier(8)

    def claim(number: int) -> None:
        ready.wait()
        found.append(files.claim(1, StepPlan(step=1, version=number, seed=[])))

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({plan.version for plan in found}) == 1
    assert files.numbers(StepPlan) == [1]
    assert [path.name for path in (files.path / "steps").iterdir()] == ["000001.json"]  # no files remain


def test_an_earlier_trainer_that_lives_on_commits_no_more(files: TrainingFiles) -> None:
    first = files.enter(Trainer(node="a", pid=7))
    files.commit(Commit(step=1, trainer=first))
    second = files.enter(Trainer(node="b", pid=8))
    assert (first, second) == (1, 2)
    with pytest.raises(LedgerError, match=r"start 2 of the trainer \(process 8 on b\) has taken over; this one ends"):
        files.commit(Commit(step=2, trainer=first))
    files.commit(Commit(step=2, trainer=second))
    assert (found := files.committed()) is not None
    assert (found.step, found.trainer) == (2, second)


def test_a_trainer_goes_on_from_the_last_checkpoint_that_is_there(files: TrainingFiles) -> None:
    trainer = files.enter(Trainer())
    assert files.committed(with_checkpoint=True) is None
    for step in (1, 2, 3):
        where = f"training/default/checkpoints/{step}" if step < 3 else None
        if step == 1:
            (files.checkpoints / "1").mkdir()
        files.commit(Commit(step=step, checkpoint=where, trainer=trainer))
    last, kept = files.committed(), files.committed(with_checkpoint=True)
    assert last is not None
    assert kept is not None
    assert (last.step, kept.step) == (3, 1)  # the checkpoint of step 2 is missing


@pytest.mark.parametrize("content", [b"", b'{"step": 1, "vers', b"[]", b'{"step": "x", "version": 1, "seed": []}'])
def test_a_damaged_plan_is_named(files: TrainingFiles, content: bytes) -> None:
    (files.path / "steps" / "000001.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"steps/000001\.json: cannot be read"):
        files.read(StepPlan, 1)


def test_a_plan_of_a_later_version_is_refused(files: TrainingFiles) -> None:
    files.claim(1, StepPlan(step=1, version=0, seed=[], format_version=99))
    with pytest.raises(ConfigError, match="later version"):
        files.read(StepPlan, 1)


def columned(files: TrainingFiles) -> StepPlan:
    """A plan of two rollouts with 3 and 2 + 1 tokens, and its columns: those of one sequence are missing."""
    rollouts = [
        PlannedRollout(id=f"a/default/{n}", task="a", group="a/default", place=RecordPlace("", 0), lengths=lengths)
        for n, lengths in enumerate(([3], [2, 1]))
    ]
    plan = files.claim(7, StepPlan(step=7, version=1, seed=[], rollouts=rollouts))
    values = {(0, 0): np.array([1, 2, 3], np.float32), (1, 1): np.array([4], np.float32)}
    files.claim_columns(plan, {"teacher": values})
    return plan


def test_columns_come_back_as_they_were_first_claimed(files: TrainingFiles) -> None:
    plan = columned(files)
    digest = files.columns_digest(7)
    files.claim_columns(plan, {"teacher": {}})
    assert files.columns_digest(7) == digest
    found = {name: [[s.tolist() for s in r] for r in rows] for name, rows in files.columns(plan).items()}
    assert found == {"teacher": [[[1, 2, 3]], [[0, 0], [4]]]}
    files.prune_columns(6)
    assert files.columns_file(7).exists()
    files.prune_columns(7)
    with pytest.raises(ConfigError, match=r"000007\.npz: cannot be read .*; remove it, and it is computed again"):
        files.columns(plan)


def test_damaged_columns_and_those_of_another_plan_are_refused(files: TrainingFiles) -> None:
    plan, path = columned(files), files.columns_file(7)
    whole = path.read_bytes()
    other = files.claim(8, StepPlan(step=8, version=1, seed=[], rollouts=plan.rollouts))
    files.columns_file(8).write_bytes(whole)
    with pytest.raises(ConfigError, match="it belongs to another plan"):
        files.columns(other)
    for damaged in (b"", whole[:100], b"\x80\x04K\x01."):  # the last is a pickle
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            files.columns(plan)


@pytest.mark.parametrize(
    ("advantages", "left_out", "trained"),
    [
        ([1.0, -1.0, 0.0], 0, []),  # a pair for DPO
        ([0.0, 1.0, -1.0], 2, []),
        ([1.0, 0.0, -1.0], 1, [0, 2]),  # the pair is whole
        ([0.5, -0.5], 1, []),
        ([1.0, 1.0, 0.0], 0, [1]),  # demonstrations
        ([1.0, -0.5, -0.5], 0, [1, 2]),
    ],
)
def test_an_amendment_leaves_out_a_pair_as_a_whole(advantages: list[float], left_out: int, trained: list[int]) -> None:
    def rollouts(task: str) -> list[PlannedRollout]:
        return [
            PlannedRollout(
                id=f"{task}/p/{n}", task=task, group=f"{task}/p", place=RecordPlace("j", 0), advantage=advantage
            )
            for n, advantage in enumerate(advantages)
        ]

    plan = StepPlan(step=3, version=0, seed=[], rollouts=[*rollouts("a"), *rollouts("b")])
    changed = amended(plan, [Amendment(step=3, rollouts=(f"a/p/{left_out}",))])
    of_a, of_b = changed.rollouts[: len(advantages)], changed.rollouts[len(advantages) :]
    assert [n for n, rollout in enumerate(of_a) if rollout.weight and rollout.advantage] == trained
    assert all(rollout.weight for rollout in of_b)
    assert changed.drops == {rollout.id: AMENDED for rollout in of_a if not rollout.weight}
