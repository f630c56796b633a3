"""The dataflow: every group belongs to exactly one step despite kills, and each step is planned once."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError, LedgerError
from megaflow_hpc.ledger import read_blocks, write_blocks
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.rundir.weight_delta import put_together
from megaflow_hpc.rundir.weight_source import DELTA
from megaflow_hpc.rundir.weights import current, ordinals, versions
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.training.plan import Refill, StepPlan, TaskBatch, TrainingFiles
from megaflow_hpc.training.policy import evaluations
from megaflow_hpc.training.staleness import FIRST_ADDED_ROUND, FIRST_REFILL_ROUND
from megaflow_hpc.types import Rollout
from tests.support.hash_trainer import START, begun, drink, planned, step_through, train, trained, watched
from tests.support.tensors import safetensors
from tests.support.training import Pods, by_index, rollouts, training_run

FORK = multiprocessing.get_context("fork")
SYNCHRONOUS = {"staleness": 0, "batch": 2, "steps": 3}


def steps_without(flow: Dataflow, pods: Pods, slow: str) -> list[StepPlan]:
    """Take steps until none is left, while one group that began with the first version does not end."""
    pods.work(only=lambda r: not (r.group_id == slow and r.sample_index))
    seen, parameters = list[StepPlan](), START
    while (plan := flow.try_plan(len(seen) + 1)) is not None:
        seen.append(plan)
        parameters = step_through(flow, Step(flow, plan), parameters)
        pods.work(only=lambda r: r.group_id != slow)
    return seen


def test_synchronous_training_asks_for_a_batch_trains_on_it_and_asks_for_the_next(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", SYNCHRONOUS, tasks=3, samples=4)
    flow, plans = drink(run, Pods(run))
    assert [plan.step for plan in plans] == [1, 2, 3]
    assert [plan.version for plan in plans] == [0, 1, 2]
    assert all(staleness == 0 for plan in plans for staleness in plan.staleness)
    groups = [sorted({rollout.group for rollout in plan.rollouts}) for plan in plans]
    assert all(len(own) == 2 for own in groups)
    assert len({name for own in groups for name in own}) == 6  # a repeated task is another group
    assert sum(len(block.rollouts) for block in read_blocks(run)) == 3 * 2 * 4
    assert list((run.path / "ledger" / "open").iterdir()) == []  # the trainer lets the campaign end
    assert [v.ordinal for v in versions(run, "default")] == [1, 2, 3]
    assert [json.loads(line)["step"] for line in flow.files.metrics.read_text().splitlines()] == [1, 2, 3]
    commit = flow.files.committed()
    assert commit is not None
    assert (commit.step, commit.weights) == (3, 3)
    assert commit.metrics["reward"] == 0.5
    assert commit.metrics["rollouts"] == 8


def test_spare_samples_are_asked_for_and_those_that_were_not_needed_leave_their_group(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {**SYNCHRONOUS, "steps": 1}, tasks=2, samples=2, scheduling={"spare": 1})

    class Closing(Pods):
        """Closes each group once it has two rewards."""

        def work(self, most: int | None = None, status: Callable[[Rollout], str] = lambda rollout: "") -> int:
            return super().work(most, lambda rollout: "completed" if rollout.sample_index < 2 else "cancelled")

    _, (plan,) = drink(run, Closing(run))
    assert len(plan.rollouts) == 4
    assert sorted(plan.drops.values()) == ["cancelled", "cancelled"]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_bound_on_staleness_is_kept_by_when_batches_are_asked_for(tmp_path: Path, bound: int) -> None:
    run = training_run(tmp_path / "run", {"staleness": bound, "batch": 2, "steps": 8}, tasks=5, samples=3)
    flow, plans = drink(run, Pods(run))
    stale = [staleness for plan in plans for staleness in plan.staleness]
    assert max(stale) == bound  # everything is sampled right after its request, so it is as stale as it can be
    assert not any(plan.drops for plan in plans)
    assert flow.files.numbers(TaskBatch) == list(range(8))


def test_a_slow_group_is_waited_for_before_it_is_too_old_and_not_earlier(tmp_path: Path) -> None:
    training = {"staleness": 4, "batch": 2, "steps": 12}
    run = training_run(tmp_path / "run", training, tasks=6, samples=2)
    pods = Pods(run)
    flow = Dataflow(run, say=lambda text: None)
    flow.start()
    flow.request()
    slow = next(r.group_id for block in read_blocks(run) for r in block.rollouts)
    seen = steps_without(flow, pods, slow)
    assert len(seen) == 4  # the fifth step would be too late for it
    assert not any(rollout.group == slow for plan in seen for rollout in plan.rollouts)
    pods.work()
    last = planned(flow, 5)
    assert slow in {rollout.group for rollout in last.rollouts}
    assert max(last.staleness) == 4
    flow.leave()


def test_what_is_dropped_has_its_cause_in_the_plan_and_holds_up_nothing(tmp_path: Path) -> None:
    training = {**SYNCHRONOUS, "batch": 4, "data": ["zero_variance"]}
    run = training_run(tmp_path / "run", training, tasks=4, samples=4)

    def reward(rollout: Rollout) -> float | None:
        if rollout.task_id == "task-0":
            return 1.0  # nothing to learn
        if rollout.task_id == "task-1" and rollout.sample_index:
            return None  # only one sample is left
        return by_index(rollout)

    _, plans = drink(run, Pods(run, reward))
    assert len(plans) == 3
    for plan in plans:
        assert {rollout.task for rollout in plan.rollouts} == {"task-2", "task-3"}
        dropped = {name.partition("@")[0].partition("/")[0] for name in plan.drops}
        assert dropped == {"task-0", "task-1"}


def test_dropped_groups_are_replaced_until_the_step_is_full(tmp_path: Path) -> None:
    training = {**SYNCHRONOUS, "batch": 4, "refill": 10, "data": ["zero_variance"]}
    run = training_run(tmp_path / "run", training, tasks=12, samples=2)

    def reward(rollout: Rollout) -> float:
        return by_index(rollout) if int(rollout.task_id.partition("-")[2]) % 2 else 1.0  # half have equal rewards

    flow, plans = drink(run, Pods(run, reward))
    asked = [rollout for block in read_blocks(run) for rollout in block.rollouts]
    assert len({rollout.id for rollout in asked}) == len(asked)
    assert len(plans) == 3
    for plan in plans:
        assert len({rollout.group for rollout in plan.rollouts}) == 4
        assert set(plan.drops.values()) == {"zero variance"}
        assert set(plan.staleness) == {0}
    assert flow.files.numbers(Refill)
    settled = [name for plan in plans for name in {*plan.drops, *(rollout.group for rollout in plan.rollouts)}]
    assert len(settled) == len(set(settled)) == len({rollout.group_id for rollout in asked}), (
        "none twice, none for nothing"
    )
    first = [rollout.task_id for rollout in asked if rollout.sample_index == 0][:12]
    assert len(set(first)) == 12, "each task once before any comes again, be it asked for in the place of another"


@pytest.mark.parametrize("bound", [1, 3])
def test_steps_are_full_where_later_batches_fill_them_too(tmp_path: Path, bound: int) -> None:
    training = {"staleness": bound, "batch": 2, "refill": 10, "data": ["zero_variance"], "steps": 6}
    run = training_run(tmp_path / "run", training, tasks=9, samples=2)
    pods = Pods(run, lambda r: 1.0 if r.task_id < "task-4" else by_index(r))
    _, plans = drink(run, pods)
    assert [len({rollout.group for rollout in plan.rollouts}) for plan in plans] == [2] * 6
    assert max(staleness for plan in plans for staleness in plan.staleness) <= bound


def test_replacing_ends_where_it_is_in_vain_or_no_task_is_left(tmp_path: Path) -> None:
    training = {**SYNCHRONOUS, "batch": 2, "refill": 2, "data": ["zero_variance"]}
    run = training_run(tmp_path / "run", training, tasks=4, samples=2)
    flow, plans = drink(run, Pods(run, lambda r: 1.0))
    assert [plan.rollouts for plan in plans] == [[], [], []]
    assert flow.files.numbers(Refill) == [1000, 1001, 2000, 2001, 3000, 3001]
    training["prompts"] = {"pass_rate": [0, 0.05]}
    run = training_run(tmp_path / "solved", {**training, "steps": 9}, tasks=5, samples=2)
    said: list[str] = []
    flow = watched(run, Pods(run, lambda r: 1.0))
    flow.tell = said.append
    drops = []
    for step in flow.steps():
        drops.append(len(step.plan.drops))
        step_through(flow, step, START)
    assert ["no task is left to request" in line for line in said] == [True]
    assert drops == [2 + 2 * 2]
    assert len({rollout.task_id for block in read_blocks(run) for rollout in block.rollouts}) == 5


def test_a_step_that_was_begun_again_asks_for_the_same_in_the_place_of_others(tmp_path: Path) -> None:
    training = {**SYNCHRONOUS, "batch": 4, "refill": 10, "data": ["zero_variance"], "steps": 1}
    run = training_run(tmp_path / "run", training, tasks=12, samples=2)
    pods = Pods(run, lambda r: by_index(r) if int(r.task_id.partition("-")[2]) % 2 else 1.0)
    flow = begun(run, pods)
    add, flow.planning.control._add_blocks = flow.planning.control._add_blocks, _dies  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        flow.try_plan(1)
    refill = flow.files.read(Refill, 1000)
    assert refill is not None
    flow.planning.control._add_blocks = add  # type: ignore[method-assign]
    flow.leave()
    _, (plan,) = drink(run, pods)
    assert {task for task, _ in refill.tasks} <= {
        rollout.task_id for block in read_blocks(run) for rollout in block.rollouts
    }
    assert len({rollout.group for rollout in plan.rollouts}) == 4


def _groups(run: RunDir, first: int) -> list[str]:
    """Return the groups of rounds from ``first`` on, in the order of their requests."""
    return list(dict.fromkeys(r.group_id for block in read_blocks(run) for r in block.rollouts if r.round >= first))


@pytest.mark.parametrize("staleness", [0, None])
@pytest.mark.parametrize("in_vain", [0, 1])
def test_the_last_groups_asked_for_in_the_place_of_others_are_waited_for(
    tmp_path: Path, staleness: int | None, in_vain: int
) -> None:
    training = {"staleness": staleness, "batch": 2, "refill": 1, "data": ["zero_variance"], "steps": 1}
    run = training_run(tmp_path / "run", training, tasks=6, samples=2)
    flat: list[str] = []
    pods = Pods(run, lambda r: 1.0 if r.round < FIRST_REFILL_ROUND or r.group_id in flat else by_index(r))
    flow = begun(run, pods)
    assert [flow.try_plan(1) for _ in range(3)] == [None] * 3, "pods take longer than a look"
    first, second = _groups(run, FIRST_REFILL_ROUND)
    flat += [first] * in_vain
    pods.work(only=lambda r: r.group_id == first)
    assert [flow.try_plan(1) for _ in range(3)] == [None] * 3
    pods.work()
    plan = planned(flow, 1)
    assert {rollout.group for rollout in plan.rollouts} == {first, second} - {*flat}
    assert flow.files.numbers(Refill) == [1000], "as often as the campaign file says"
    flow.leave()


def test_nothing_is_asked_for_in_the_place_of_a_batch_that_engines_still_load_weights_for(tmp_path: Path) -> None:
    training = {**SYNCHRONOUS, "batch": 2, "refill": 3, "data": ["zero_variance"]}
    run = training_run(tmp_path / "run", training, tasks=6, samples=2)

    def serves(version: int) -> None:
        here = Endpoint(server="default.0", policy="default", url="http://127.0.0.1:1/v1", weight_version=version)
        EndpointFiles(run).publish(here)

    serves(0)
    pods = Pods(run)
    flow = begun(run, pods)
    plan = planned(flow, 1)
    step_through(flow, Step(flow, plan), START)
    assert [flow.try_plan(2) for _ in range(3)] == [None] * 3
    assert (flow.files.numbers(TaskBatch), flow.files.numbers(Refill)) == ([0], [])
    serves(current(run, "default").version)
    assert flow.try_plan(2) is None
    pods.work()
    assert flow.try_plan(2) is not None
    assert (flow.files.numbers(TaskBatch), flow.files.numbers(Refill)) == ([0, 1], [])
    flow.leave()


def test_a_slow_group_in_the_place_of_another_is_not_taken_too_old(tmp_path: Path) -> None:
    training = {"staleness": 1, "batch": 2, "refill": 5, "data": ["zero_variance"], "steps": 6}
    run = training_run(tmp_path / "run", training, tasks=9, samples=2)
    pods = Pods(run, lambda r: 1.0 if r.round < 4 else by_index(r))
    flow = begun(run, pods)
    assert flow.try_plan(1) is None
    slow = _groups(run, FIRST_REFILL_ROUND)
    assert len(slow) == 2
    flow.add(["task-0", "task-1"], token="faster")
    pods.work(only=lambda r: r.round < FIRST_REFILL_ROUND or not r.sample_index)  # begun with version 0, not ended
    plan = planned(flow, 1)
    step_through(flow, Step(flow, plan), START)
    pods.work(only=lambda r: r.round < FIRST_REFILL_ROUND)
    assert flow.try_plan(2) is None, "another step, and it would be older than the bound"
    pods.work()
    last = planned(flow, 2)
    assert {rollout.group for rollout in last.rollouts} == {*slow}
    assert max(last.staleness) == 1
    flow.leave()


def test_what_was_written_down_in_the_place_of_others_is_asked_for_once_the_disk_answers(tmp_path: Path) -> None:
    training = {**SYNCHRONOUS, "batch": 2, "refill": 5, "data": ["zero_variance"], "steps": 1}
    run = training_run(tmp_path / "run", training, tasks=6, samples=2)
    pods = Pods(run, lambda r: 1.0 if r.round < FIRST_REFILL_ROUND else by_index(r))
    flow = begun(run, pods)
    add, flow.planning.control._add_blocks = flow.planning.control._add_blocks, _full  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            flow.try_plan(1)
    flow.planning.control._add_blocks = add  # type: ignore[method-assign]
    assert flow.try_plan(1) is None
    assert len(_groups(run, FIRST_REFILL_ROUND)) == 2
    pods.work()
    assert flow.try_plan(1) is not None
    assert flow.files.numbers(Refill) == [1000]
    flow.leave()


def _full(*_: object) -> None:
    raise OSError("full")


def _dies(*_: object) -> None:
    raise RuntimeError("killed")


def test_an_infinite_reward_ends_it_before_a_plan_is_made(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", SYNCHRONOUS, tasks=2, samples=2)
    pods = Pods(run, lambda r: math.inf if r.sample_index else 0.0)
    with pytest.raises(ConfigError, match="reward is inf"):
        drink(run, pods)
    assert TrainingFiles(run, "default").numbers(StepPlan) == []


def test_advantages_and_masks_reach_every_token(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {**SYNCHRONOUS, "steps": 1}, tasks=2, samples=4)
    flow = Dataflow(run)
    steps = flow.steps()
    pods = Pods(run, lambda r: float(r.sample_index == 0))
    flow.start()
    flow.request()
    pods.work()
    step = next(steps)
    (minibatch,) = step.minibatches()
    (batch,) = minibatch.microbatches(4096)
    for number, rollout in enumerate(batch.sample.tolist()):
        own = slice(batch.offsets[number], batch.offsets[number + 1])
        planned = step.plan.rollouts[rollout]
        assert planned.advantage == pytest.approx(0.75 if planned.reward else -0.25)
        sampled = batch.mask[own] == 1
        assert set(batch.advantages[own][sampled].tolist()) == {planned.advantage}
        assert set(batch.versions[own].tolist()) == {-1, 0}
        assert not batch.advantages[own][~sampled].any()
    step.commit()
    assert list(steps) == []


def test_ranks_share_a_step_and_only_the_first_one_writes(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {**SYNCHRONOUS, "steps": 2}, tasks=2, samples=4)
    pods = Pods(run)
    flows = [Dataflow(run, rank=rank, ranks=2) for rank in range(2)]
    flows[0].start()
    flows[0].request()
    pods.work()
    iterators = [flow.steps() for flow in flows]
    first, second = (next(iterator) for iterator in iterators)
    assert first.plan == second.plan
    halves = [[b for m in step.minibatches() for b in m.microbatches(32)] for step in (first, second)]
    assert len(halves[0]) == len(halves[1])
    assert sum(batch.sampled for half in halves for batch in half) == first.tokens
    second.commit()
    assert flows[0].files.committed() is None
    first.commit()
    pods.work()
    assert [next(iterator).number for iterator in iterators] == [2, 2]


def test_a_step_without_a_checkpoint_is_trained_again_after_a_restart_from_the_same_plan(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {**SYNCHRONOUS, "steps": 5}, tasks=3, samples=2)
    pods = Pods(run)
    flow, parameters = watched(run, pods), START
    before = {}
    for step in flow.steps():
        before[step.number] = step.plan
        parameters = step_through(flow, step, parameters, checkpoint=step.number == 2)
        if step.number == 4:
            break
    flow.leave()
    assert len(list((run.path / "ledger" / "open").iterdir())) == 1
    again = Dataflow(run)
    state = again.restore()
    assert state is not None
    assert state.step == 2
    steps = again.steps()
    replayed = [next(steps), next(steps)]
    assert [step.plan for step in replayed] == [before[3], before[4]]
    parameters = (again.checkpoint(state) / "parameters").read_text()
    for step in replayed:
        parameters = step_through(again, step, parameters)
    assert len(versions(run, "default")) == 4  # each version is published once
    assert parameters == trained(trained(trained(trained(START, before[1]), before[2]), before[3]), before[4])


def test_whatever_trains_publishes_what_differs_where_the_campaign_says_so(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {**SYNCHRONOUS, "publish_delta": True}, tasks=2, samples=2)
    flow = watched(run, Pods(run))
    weights, written = bytearray(random.Random(0).randbytes(40_000)), dict[int, bytes]()
    for step in flow.steps():
        if step.number == 3:
            weights = bytearray(random.Random(1).randbytes(40_000))
        weights[step.number] ^= 1
        folder = tmp_path / f"model-{step.number}"
        folder.mkdir()
        written[step.number] = safetensors(bytes(weights))
        (folder / "model.safetensors").write_bytes(written[step.number])
        step.publish(folder, move=step.number == 2)
        step.commit()
    flow.leave()
    first, second, third = (Path(version.path) for version in versions(run, "default"))
    assert (second / DELTA).is_file()
    assert (put_together(second, first, tmp_path / "whole") / "model.safetensors").read_bytes() == written[2]
    assert (third / "model.safetensors").read_bytes() == written[3], "it differs everywhere"
    assert [(tmp_path / f"model-{number}").exists() for number in written] == [True, False, True]
    assert not list(flow.files.path.glob(".export-*"))


def _trainer(run: Path, every: int, pause_s: float, result: object, writes: int | None = None) -> None:
    try:
        result.put(train(run, every, pause_s, writes=writes))  # type: ignore[attr-defined]
    except LedgerError as error:
        result.put(f"LedgerError: {error}")  # type: ignore[attr-defined]


def _check_all(run: RunDir, steps: int, parameters: str) -> None:
    """Check that exactly one plan settles every requested group, and that the parameters follow from the plans."""
    files = TrainingFiles(run, "default")
    assert files.numbers(StepPlan) == list(range(1, steps + 1))
    settled: list[str] = []
    wanted = START
    for number in range(1, steps + 1):
        plan = files.read(StepPlan, number)
        assert plan is not None
        settled += {rollout.group for rollout in plan.rollouts} | {name for name in plan.drops if name.count("/") == 1}
        wanted = trained(wanted, plan)
    asked = {rollout.group_id for block in read_blocks(run) for rollout in block.rollouts}
    assert sorted(settled) == sorted(asked)  # none lost, none repeated
    assert parameters == wanted
    assert len(ordinals(run, "default")) == steps + 1
    commit = files.committed()
    assert commit is not None
    assert commit.step == steps


def _train_with_kills(run: RunDir, pods: Pods, draw: random.Random, kills: int, every: int, writes: int) -> str:
    """Trains while pods work, and kills the trainer between any two writes. Returns its parameters at the end.

    Args:
        every: Number of steps from one checkpoint to the next.
        writes: Maximum number of writes in a life.
    """
    results = FORK.SimpleQueue()
    for life in range(kills + 1):
        left = draw.randrange(writes) if life < kills else None
        child = FORK.Process(target=_trainer, args=(run.path, every, 0.0, results, left))
        child.start()
        deadline = time.monotonic() + 120
        while child.is_alive():
            pods.work()
            time.sleep(0.01)
            if time.monotonic() > deadline:
                child.kill()
        child.join()
        if not child.exitcode:
            break
        assert (child.exitcode, time.monotonic() < deadline) == (-signal.SIGKILL, True)
    assert life > kills // 2
    parameters: str = results.get()
    return parameters


@pytest.mark.slow
def test_killed_at_random_instants_it_loses_no_group_and_takes_none_twice(tmp_path: Path) -> None:
    kills = int(os.environ.get("MEGAFLOW_KILLS", "12"))
    steps = kills // 2  # more steps than the killed processes can finish, so that most kills happen
    training = {"staleness": 2, "batch": 3, "steps": steps}
    run = training_run(tmp_path / "run", training, tasks=7, samples=2)
    pods = Pods(run)
    parameters = _train_with_kills(run, pods, random.Random(1), kills, every=3, writes=100)
    _check_all(run, steps, parameters)
    assert len(TrainingFiles(run, "default").numbers(Commit)) == steps


def _check_borrowed(files: TrainingFiles, steps: int) -> int:
    """Check that groups without a success hold the newest earlier success of their task. Returns their number."""
    newest: dict[str, list[str]] = {}
    borrowed = 0
    for number in range(1, steps + 1):
        plan = files.read(StepPlan, number)
        assert plan is not None
        assert all(rollout.scores == {"score": rollout.reward} for rollout in plan.rollouts)
        past = {task: list(ids) for task, ids in newest.items()}
        for name in dict.fromkeys(rollout.group for rollout in plan.rollouts):
            own = [r for r in plan.rollouts if r.group == name and not r.replayed]
            lacks = all(rollout.reward == 0 for rollout in own)
            again = [rollout.id for rollout in plan.rollouts if rollout.group == name and rollout.replayed]
            assert again == ([past[own[0].task].pop()] if lacks and past.get(own[0].task) else [])
            borrowed += len(again)
        for rollout in plan.rollouts:
            if rollout.reward == 1 and not rollout.replayed:
                newest.setdefault(rollout.task, []).append(rollout.id)
                newest[rollout.task] = newest[rollout.task][-2:]
    return borrowed


@pytest.mark.slow
def test_killed_at_random_instants_it_scores_all_and_borrows_the_newest_successes(tmp_path: Path) -> None:
    training = {"staleness": 1, "batch": 2, "steps": 12, "data": ["megaflow_hpc.training.recipes:past_successes"]}
    training |= {"policies": {"default": {"score": "tests.support.hash_trainer:repeated"}}}
    run = training_run(tmp_path / "run", training, tasks=3, samples=2)
    pods = Pods(run, lambda r: float(r.sample_index == 1 and zlib.crc32(r.group_id.encode()) % 2))
    parameters = _train_with_kills(run, pods, random.Random(2), kills=8, every=2, writes=100)
    _check_all(run, 12, parameters)
    assert _check_borrowed(TrainingFiles(run, "default"), 12) >= 3


def test_past_successes_are_added_off_policy_and_the_same_after_a_restart(tmp_path: Path) -> None:
    training = {"staleness": 0, "batch": 1, "steps": 4, "data": ["megaflow_hpc.training.recipes:past_successes"]}
    run = training_run(tmp_path / "run", training, tasks=1, samples=3)
    solved = {"task-0/default/1", "task-0@1/default/2"}
    pods = Pods(run, lambda r: float(r.id in solved))
    flow, plans, parameters = watched(run, pods), [], START
    for step in flow.steps():
        plans.append(step.plan)
        if step.number == 3:
            (batch,) = next(step.minibatches()).microbatches(4096)
            (row,) = [n for n, r in enumerate(batch.sample.tolist()) if step.plan.rollouts[r].replayed]
            own = slice(batch.offsets[row], batch.offsets[row + 1])
            (recorded,) = step.sequences(3)
            assert batch.logprobs[own][batch.mask[own] == 1].tolist() == [x for x in recorded.logprobs if x == x]
            assert set(batch.versions[own].tolist()) == {-1, 1}
            break
        parameters = step_through(flow, step, parameters)
    third = plans[2]
    assert [(r.id, r.group, r.advantage) for r in third.rollouts] == [
        *((f"task-0@2/default/{index}", "task-0@2/default", -0.25) for index in range(3)),
        ("task-0@1/default/2", "task-0@2/default", 0.75),
    ]
    assert [r.replayed for r in third.rollouts] == [False, False, False, True]
    assert (third.rewards, third.groups) == ([0.0] * 3, {"task-0@2/default"})
    flow.leave()
    (flow.files.path / "steps" / "000003.json").unlink()  # as if the trainer had been killed before it claimed the plan
    again = Dataflow(run)
    step = next(iter(again.steps()))
    assert msgspec.structs.replace(step.plan, trainer=1) == third
    again.leave()


@pytest.mark.slow
def test_a_trainer_that_was_thought_dead_ends_when_it_wakes_up(tmp_path: Path) -> None:
    training = {"staleness": 1, "batch": 2, "steps": 6}
    run = training_run(tmp_path / "run", training, tasks=4, samples=2)
    pods = Pods(run)
    results, others = FORK.Queue(), FORK.Queue()

    def until(enough: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not enough():
            assert time.monotonic() < end
            pods.work()
            time.sleep(0.01)

    files = TrainingFiles(run, "default")
    frozen = FORK.Process(target=_trainer, args=(run.path, 1, 0.1, results))
    frozen.start()
    assert frozen.pid is not None
    until(lambda: len(files.numbers(Commit)) >= 2)
    os.kill(frozen.pid, signal.SIGSTOP)
    successor = FORK.Process(target=_trainer, args=(run.path, 1, 0.1, others))
    successor.start()
    until(lambda: len(files.numbers(Commit)) >= 4)
    os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: not frozen.is_alive() and not successor.is_alive())
    assert "has taken over; this one ends" in results.get(timeout=10)
    _check_all(run, 6, others.get(timeout=10))


def test_a_campaign_that_is_over_can_be_trained_on_as_it_is(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {}, tasks=3, samples=2)
    write_blocks(run, rollouts(["a", "b", "c", "d", "e"], 2), size=4)
    Pods(run).work()
    (run.path / "ledger" / "finished").write_text("{}")
    given = TrainingConfig.model_validate({"policies": {"default": {}}, "batch": 2, "steps": 50})
    flow = Dataflow(run, training=given)
    sizes = []
    for step in flow.steps():
        sizes.append(len(step.plan.rollouts))
        step.commit()
    assert sizes == [4, 4, 2]


def test_a_trainer_may_ask_for_tasks_of_its_own_choice_once(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {**SYNCHRONOUS, "staleness": None, "steps": 2}, tasks=3, samples=2)
    pods = Pods(run)
    flow = watched(run, pods)
    for _ in range(2):
        flow.add(["task-0", "task-2"], token="hard-ones", samples=3)
    with pytest.raises(ConfigError, match="policy 'default' does not train on task task-9"):
        flow.add(["task-9"], token="other")
    asked = [rollout for block in read_blocks(run) for rollout in block.rollouts]
    assert [rollout.task_id for rollout in asked] == ["task-0"] * 3 + ["task-2"] * 3
    assert len({rollout.group_id for rollout in asked}) == 2
    settled: set[str] = set()
    for step in flow.steps():
        step_through(flow, step, START)
        settled |= {rollout.group for rollout in step.plan.rollouts}
    assert len(settled) == 4  # two of the requested groups wait for a step that does not come


@pytest.mark.parametrize("refill", [0, 2])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_tasks_of_a_trainers_own_choice_make_a_step_larger_rather_than_others_too_old(
    tmp_path: Path, bound: int, refill: int
) -> None:
    training = {"staleness": bound, "batch": 2, "refill": refill, "steps": 9}
    run = training_run(tmp_path / "run", training, tasks=5, samples=2)
    pods = Pods(run)
    plans, parameters = [], START
    while len(plans) < 9:
        flow = watched(run, pods)
        for step in flow.steps():
            plans.append(step.plan)
            if step.number in (1, 4):
                flow.add(["task-0", "task-1", "task-2"], token=f"more-{step.number}")
            parameters = step_through(flow, step, parameters)
            if step.number in (2, 5):
                break  # a later start continues
        flow.leave()
    assert [plan.step for plan in plans] == list(range(1, 10)), "no step lacks what an earlier one took"
    assert max(staleness for plan in plans for staleness in plan.staleness) == bound
    groups = [name for plan in plans for name in {rollout.group for rollout in plan.rollouts}]
    assert len(groups) == len(set(groups)) == 9 * 2 + 2 * 3
    assert min(len({rollout.group for rollout in plan.rollouts}) for plan in plans) == 2


def test_a_slow_group_of_a_trainers_own_choice_is_waited_for_before_it_is_too_old(tmp_path: Path) -> None:
    training = {"staleness": 2, "batch": 2, "steps": 9}
    run = training_run(tmp_path / "run", training, tasks=6, samples=2)
    pods = Pods(run)
    flow = Dataflow(run, say=lambda text: None)
    flow.add(["task-0"], token="slow")
    (slow,) = _groups(run, FIRST_ADDED_ROUND)
    flow.request()
    seen = steps_without(flow, pods, slow)
    assert len(seen) == 2  # the third step would be too late for it
    flow.leave()
    flow = Dataflow(run, say=lambda text: None)  # a later start has the same knowledge
    flow.start()
    assert flow.try_plan(3) is None
    pods.work()
    last = planned(flow, 3)
    assert slow in {rollout.group for rollout in last.rollouts}
    assert max(last.staleness) == 2
    flow.leave()


def test_held_out_tasks_are_asked_for_every_few_steps_and_never_trained_on(tmp_path: Path) -> None:
    training = {**SYNCHRONOUS, "steps": 4, "evaluate": {"tasks": "held-out", "every": 2, "samples": 3}}
    run = training_run(tmp_path / "run", training, tasks=4, samples=2, held_out=1)
    pods = Pods(run, lambda r: by_index(r) if r.task_id != "task-3" else r.round / 4)
    _, plans = drink(run, pods)
    assert {rollout.task for plan in plans for rollout in plan.rollouts} == {"task-0", "task-1", "task-2"}
    pods.work()
    assert [(e.step, e.agent, e.rollouts, e.reward, e.passed) for e in evaluations(run, "default")] == [
        (2, "nop", 3, 0.5, 0.0),
        (4, "nop", 3, 1.0, 1.0),
    ]
    assert evaluations(run, "other") == []
    again = Dataflow(run)  # as after a crash between the commit and the request
    again.start()
    commit = again.files.committed()
    assert commit is not None
    again.committed(commit)
    assert pods.work() == 0


def test_a_trainer_of_another_policy_and_a_run_that_does_not_train_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy 'other' is not trained; training\.policies has: default"):
        Dataflow(training_run(tmp_path / "other", {}), "other")
    with pytest.raises(ConfigError, match="has no section training"):
        Dataflow(training_run(tmp_path / "run", None))
    with pytest.raises(ConfigError, match="not a run directory"):
        Dataflow(tmp_path)


def test_trainers_are_told_the_temperature_at_which_the_policy_samples(tmp_path: Path) -> None:
    for number, (sampling, temperature) in enumerate([(None, 1.0), ({"temperature": 0.7}, 0.7)]):
        run = training_run(tmp_path / str(number), SYNCHRONOUS, sampling=sampling)
        flow = watched(run, Pods(run))
        step = next(flow.steps())
        assert flow.temperature == step.temperature == temperature


@pytest.mark.parametrize("how", ["drop", "truncate", "penalise"])
def test_no_step_trains_on_a_sequence_over_length(tmp_path: Path, how: str) -> None:
    training = {**SYNCHRONOUS, "steps": 1, "data": [{"over_length": [20, how]}]}
    run = training_run(tmp_path, training, tasks=2, samples=8)
    flow = begun(run, Pods(run))
    plan = planned(flow, 1)
    lengths = {rollout.id: rollout.lengths for rollout in plan.rollouts}
    assert lengths
    assert all(length <= 20 for own in lengths.values() for length in own)
    cut = [rollout for rollout in plan.rollouts if rollout.lengths == [20]]
    assert bool(cut) == (how != "drop")
    assert bool([cause for cause in plan.drops.values() if cause == "over length"]) == (how == "drop")
    step = Step(flow, plan)
    for batch in step.minibatch().microbatches(64):
        assert len(batch.tokens) == batch.offsets[-1] == len(batch.mask)
    assert sum(batch.sampled for batch in step.minibatch().microbatches(64)) == step.tokens
    for rollout in cut:
        others = [other for other in plan.rollouts if (other.group, other.reward) == (rollout.group, rollout.reward)]
        uncut = [other.advantage for other in others if other.lengths[0] < 20]
        assert all((rollout.advantage < advantage) == (how == "penalise") for advantage in uncut)
