"""The buffer of rollouts that no step has trained on: whole groups, equal in every later process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.ledger import write_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training import buffer as module
from megaflow_hpc.training.buffer import LOST, Buffer, Sequences, _turns
from megaflow_hpc.training.plan import PlannedRollout, Settled, StepPlan
from megaflow_hpc.trajectory import TokenSequence, Turn
from megaflow_hpc.types import Rollout
from tests.support.training import DAMAGES, Pods, rollouts, sampled, training_run

MINE = frozenset({"default"})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return training_run(tmp_path / "run", {}, tasks=4, samples=3)


def buffer(run: RunDir, settled: Settled | None = None, owners: frozenset[str] | None = MINE) -> Buffer:
    return Buffer(run, Sequences(run, "default"), owners, lambda version: version, settled or Settled())


def names(found: Buffer) -> list[str]:
    return [group.id for group in found.complete()]


def test_a_group_is_complete_when_each_of_its_rollouts_has_ended_be_it_in_failure(run: RunDir) -> None:
    write_blocks(run, rollouts(["a", "b"], 3), size=6)
    pods, seen = Pods(run, lambda r: 1.0 if r.sample_index else None), buffer(run)
    assert pods.work(most=2) == 2
    assert seen.poll() == 2
    assert names(seen) == []
    pods.work(most=2, status=lambda r: "failed" if r.sample_index == 2 else "completed")
    assert seen.poll() == 2
    (group,) = seen.complete()
    assert (group.id, group.task) == ("a/default", "a")
    assert [s.status for s in group.samples] == ["completed", "completed", "failed"]
    assert group.samples[1].reward == 1.0
    assert math.isnan(group.samples[0].reward)
    assert math.isnan(group.samples[2].reward)
    assert group.samples[2].tokens == 0
    assert group.samples[2].oldest == -1
    assert seen.open_groups == 2


def test_a_later_success_takes_the_place_of_a_failure_that_waits(run: RunDir) -> None:
    (block,) = write_blocks(run, rollouts(["a"], 2), size=2)
    pods, seen = Pods(run, lambda r: 1.0), buffer(run)
    pods.work(status=lambda r: "failed" if r.sample_index else "completed")
    assert seen.poll() == 2
    pods.store(block, sampled(Rollout("a", "default", 1, "nop"), 1.0), epoch=1)
    pods.work()
    assert seen.poll() == 1
    assert [s.status for s in seen.complete()[0].samples] == ["completed", "completed"]


def test_a_later_process_goes_on_from_what_is_settled_and_reads_again_only_what_waits(run: RunDir) -> None:
    write_blocks(run, rollouts(["a", "b", "c"], 3), size=3)
    pods, seen = Pods(run, lambda r: 1.0), buffer(run)
    pods.work(most=5)  # a, and two samples of b
    seen.poll()
    seen.settle(["a/default"])
    settled = seen.settled
    assert len(settled.waiting) == 2
    assert settled.first_block == 1
    assert settled.groups == []
    pods.work()
    later = buffer(run, settled)
    assert later.poll() == 4
    assert names(later) == ["b/default", "c/default"]
    seen.poll()
    assert seen.complete() == later.complete()
    assert seen.settled == later.settled


def test_a_settled_group_stays_settled_while_its_block_is_open(run: RunDir) -> None:
    write_blocks(run, rollouts(["a", "b"], 3), size=6)
    seen = buffer(run)
    Pods(run, lambda r: 1.0).work()
    seen.poll()
    seen.settle(["b/default"])
    assert seen.settled.first_block == 0
    assert seen.settled.groups == ["b/default"]
    assert names(buffer(run, seen.settled)) == ["a/default"]
    seen.settle(["a/default"])
    assert (seen.settled.first_block, seen.settled.groups) == (1, [])
    assert names(buffer(run, seen.settled)) == []


def test_a_group_that_is_asked_again_is_another_group(run: RunDir) -> None:
    write_blocks(run, rollouts(["a"], 2) + rollouts(["a"], 2, round=3), size=2)
    seen = buffer(run)
    Pods(run, lambda r: 1.0).work()
    seen.poll()
    assert names(seen) == ["a/default", "a@3/default"]
    assert [group.task for group in seen.complete()] == ["a", "a"]


def test_only_the_policys_own_rollouts_and_tokens_are_seen(run: RunDir) -> None:
    other = [Rollout("a", "judge", sample, "nop") for sample in range(3)]
    write_blocks(run, [*rollouts(["a"], 3), *other], size=6)
    pods, seen, whole = Pods(run, lambda r: 1.0), buffer(run), buffer(run, owners=None)
    trajectory = sampled(Rollout("a", "default", 0, "nop"), 1.0, version=5)
    helper = TokenSequence("judge")
    helper.tokens.extend([1, 2])
    helper.logprobs.extend([math.nan, -1.0])
    helper.loss_mask.extend([0, 1])
    helper.weight_versions.extend([-1, 9])
    trajectory.sequences.append(helper)
    pods.store(0, trajectory)
    pods.work()
    assert seen.poll() == 3
    assert whole.poll() == 6
    first = seen.complete()[0].samples[0]
    assert (first.oldest, first.newest) == (5, 5)
    place = seen.arrived["a/default/0"].place
    assert [s.policy for s in Sequences(run, "default").at(place)] == ["default"]
    assert Sequences(run, "judge").at(place)[0].tokens.tolist() == [1, 2]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_fails_its_rollout_once_its_block_is_done(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    write_blocks(run, rollouts(["a", "b"], 3), size=3)
    pods, seen = Pods(run, lambda r: 1.0), buffer(run)
    pods.store(0, sampled(Rollout("a", "default", 1, "nop"), 1.0), damage=damage)
    pods.work()
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.0)
    inconsistent = damage == "odd bytes"  # then the heading and the reward are still readable
    assert seen.poll() == (6 if inconsistent else 5)
    assert names(seen) == (["a/default"] if inconsistent else []) + ["b/default"]
    pods.finish_blocks()
    assert seen.poll() == (0 if inconsistent else 1)
    samples = seen.complete()[0].samples
    assert [s.tokens > 0 for s in samples] == [True, False, True]
    assert inconsistent or (samples[1].status, samples[1].error_kind) == ("failed", LOST)
    again = buffer(run, seen.settled)
    again.poll()
    assert again.complete() == seen.complete()
    assert len(seen.settled.waiting) == (6 if inconsistent else 5)


def test_records_that_are_damaged_while_they_wait_cost_only_their_rollouts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_blocks(run, rollouts(["a", "b"], 3), size=6)
    pods, seen = Pods(run, lambda r: 1.0), buffer(run)
    pods.work()
    seen.poll()
    places = [seen.arrived[f"{task}/default/1"].place for task in "ab"]
    planned = [
        PlannedRollout(id=id, task="b", group="b/default", place=arrived.place, lengths=[1], sampled=[1])
        for id, arrived in seen.arrived.items()
        if id.startswith("b/")
    ]
    with open(run.journal / places[0].journal, "r+b") as file:
        for place in places:
            file.seek(place.start + 60)
            file.write(b"\xff")
    later = buffer(run, seen.settled)
    assert later.poll() == 0
    assert names(later) == []
    (replayed,) = later.read_groups(StepPlan(step=1, version=0, seed=[1], rollouts=planned))
    assert [sample.index for sample in replayed[0].samples] == [0, 2]
    pods.finish_blocks()
    assert later.poll() == 0, "a record may be hidden by a cache for a while"
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.0)
    assert later.poll() == 2
    assert [[s.error_kind for s in group.samples] for group in later.complete()] == [["", LOST, ""]] * 2


def test_the_state_of_a_turn_is_the_message_that_it_answered() -> None:
    """Not the id of the tool call, which differs between rollouts."""

    def state(**message: Any) -> str:
        messages = [{"role": "user", "content": "go"}, message, {"role": "assistant", "content": "done"}]
        one = sampled(Rollout("t", "p", 0, "a"), 1.0)
        one.messages, one.parents, one.turns = messages, [-1, 0, 1], [Turn(0, 0, 1, message=2)]
        return _turns(one, "p", one.sequences)[0].state

    output = state(role="tool", tool_call_id="call_1", content="a\nb \ud83e")
    assert output == state(role="tool", tool_call_id="call_2", content="a\nb \ud83e")
    parts = state(role="tool", content=[{"type": "text", "text": "a"}])
    assert len({output, parts, state(role="user", content="a\nb \ud83e"), state(role="tool", content="c")}) == 4
