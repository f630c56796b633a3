"""Each rollout has one winner, in whatever order the journals were written."""

from __future__ import annotations

import itertools

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import JournalWriter
from megaflow_hpc.trajectories.journal.winners import index
from megaflow_hpc.trajectory import Attempt
from tests.support.samples import commit, run_dir, trajectory


def winner(run, seals=None):
    found = index(run, seals or {})
    assert len(found.winners) == 1
    return found.load(found.winners[0])


RECORDS = {  # a record wins over all below it
    "success of epoch 0": (0, 0, "completed"),
    "second attempt of epoch 0": (0, 1, "truncated"),
    "success of epoch 1": (1, 0, "completed"),
    "failure of epoch 0": (0, 0, "failed"),
    "cancelled in epoch 1": (1, 0, "cancelled"),
    "failure of epoch 2": (2, 0, "failed"),
}


@pytest.mark.parametrize(("better", "worse"), list(itertools.combinations(RECORDS, 2)))
@pytest.mark.parametrize("reverse", [False, True])
def test_the_better_record_wins_in_either_order(tmp_path, better, worse, reverse):
    run = run_dir(tmp_path / "run")
    for pod, which in enumerate([worse, better] if reverse else [better, worse]):
        epoch, attempt, status = RECORDS[which]
        commit(run, f"pod{pod}", (0, epoch, trajectory(1, status=status, attempt=attempt, node=which)))
    found = winner(run)
    assert found.node == better
    assert (found.epoch, found.attempt, found.status) == RECORDS[better]


def test_of_one_identity_the_first_record_counts(tmp_path):
    run = run_dir(tmp_path / "run")
    commit(run, "a", (0, 0, trajectory(1, node="first")), (0, 0, trajectory(1, node="second")))
    assert winner(run).node == "first"


@pytest.mark.parametrize("owner", ["a.0", "a.0.journal"])
def test_records_behind_the_seal_are_void(tmp_path, owner):
    run = run_dir(tmp_path / "run")
    ends = commit(run, "a", (5, 0, trajectory(1)), (5, 0, trajectory(2)), (6, 0, trajectory(3)))
    commit(run, "b", (5, 1, trajectory(2, node="node-2")))
    found = index(run, {(5, 0): (owner, ends[0])})
    assert [(e.id, e.epoch) for e in found.winners] == [
        ("task/default/1", 0),
        ("task/default/3", 0),
        ("task/default/2", 1),
    ]
    assert not found.losers
    one_less = index(run, {(5, 0): (owner, ends[0] - 1)})
    assert "task/default/1" not in [e.id for e in one_less.winners]


def test_an_epoch_sealed_for_one_journal_is_void_in_every_other(tmp_path):
    run = run_dir(tmp_path / "run")
    commit(run, "a", (5, 0, trajectory(1)))
    commit(run, "zombie", (5, 0, trajectory(2)))
    assert [e.id for e in index(run, {(5, 0): ("a.0", 10**6)}).winners] == ["task/default/1"]


def test_rows_come_in_commit_order_across_journals(tmp_path):
    run = run_dir(tmp_path / "run")
    with JournalWriter(run.journal_file("b", "0")) as b, JournalWriter(run.journal_file("a", "0")) as a:
        for number, journal in enumerate((b, a, a, b, a)):
            journal.append({"kind": "trajectory", "trajectory": trajectory(number).to_record()})
    assert [e.id for e in index(run, {}).winners] == [f"task/default/{n}" for n in range(5)]


def test_attempts_of_superseded_records_are_kept(tmp_path):
    run = run_dir(tmp_path / "run")
    failed = Attempt(0, "failed", "node", "node went down")
    commit(run, "a", (0, 0, trajectory(1, status="failed", attempts=[failed])))
    commit(run, "b", (0, 1, trajectory(1, attempts=[Attempt(0, "completed")])))
    assert [(a.status, a.error) for a in winner(run).attempts] == [("failed", "node went down"), ("completed", "")]


def test_other_kinds_and_strange_records_are_skipped(tmp_path, caplog):
    run = run_dir(tmp_path / "run")
    with JournalWriter(run.journal_file("a", "0")) as journal:
        journal.append({"kind": "of a later version"})
        journal.append({"kind": "trajectory", "trajectory": 7})
        journal.append(b"\xc1")
        journal.append({"kind": "trajectory", "trajectory": trajectory(1).to_record()})
    assert winner(run).id == "task/default/1"
    assert caplog.text.count("skipped") == 2


def test_an_inconsistent_record_keeps_its_reward_and_says_what_is_lost(tmp_path, caplog):
    run = run_dir(tmp_path / "run")
    broken = trajectory(2)
    broken.sequences[0].logprobs.pop()
    commit(run, "a", (0, 0, broken))
    found = winner(run)
    assert (found.reward, found.sequences, found.turns) == (0.0, [], [])
    assert "tokens lost" in found.error
    assert "sequence 0 has columns of" in caplog.text


@pytest.mark.slow
def test_a_foreign_file_among_the_journals_is_named(tmp_path):
    run = run_dir(tmp_path / "run")
    (run.journal / "x.0.journal").write_text("hello, this is not a journal at all")
    with pytest.raises(ConfigError, match=r"x\.0\.journal: not a megaflow-hpc journal"):
        index(run, {})
