"""Training keeps pace with engines and with the other policies that learn: it never waits for the dead, and never
trains on rollouts beyond its staleness bound."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import read_blocks, write_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.training import say_last
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from megaflow_hpc.types import Rollout
from tests.support.hash_trainer import START, step_through, train
from tests.support.training import Engines, Pods, rollouts, training_run

FORK = multiprocessing.get_context("fork")
LONGEST_LIFE = 120
"""Number of writes before a trainer is killed. A step writes some thirty times."""
TWO = {"solver": 4, "critic": 0}


def plans(run: RunDir, policy: str = "default") -> list[StepPlan]:
    """Return the plans of all steps."""
    files = TrainingFiles(run, policy)
    return [plan for number in files.numbers(StepPlan) if (plan := files.read(StepPlan, number))]


def settled(run: RunDir, policy: str = "default") -> list[set[str]]:
    """Return the groups that each step settles. Checks that no group is settled twice."""
    groups = [plan.groups for plan in plans(run, policy)]
    assert sum(map(len, groups)) == len(set().union(*groups))
    return groups


def requested(run: RunDir) -> set[str]:
    """Return the groups in all blocks."""
    return {rollout.group_id for block in read_blocks(run) for rollout in block.rollouts}


def stalest(run: RunDir, policy: str = "default") -> int:
    """Return the staleness of the stalest rollout that was trained on."""
    return max(staleness for plan in plans(run, policy) for staleness in plan.staleness)


def drops(run: RunDir, policy: str = "default") -> set[str]:
    """Return the causes of all drops."""
    return {cause for plan in plans(run, policy) for cause in plan.drops.values()}


def one_step(flow: Dataflow, number: int) -> None:
    """Take a step whose rollouts are there."""
    plan = flow.try_plan(number)
    assert plan is not None
    step_through(flow, Step(flow, plan), START)


def waits(flow: Dataflow, step: int) -> str:
    """Check that a step cannot be planned yet. Return what it waits for."""
    assert [flow.try_plan(step) for _ in range(3)] == [None] * 3
    return flow.planning.missing(step)


def learn(
    run: RunDir,
    pods: Pods,
    engines: Engines,
    turn: Callable[[int], None] = lambda turn: None,
    pauses: dict[str, float] | None = None,
    kills: int = 4,
) -> None:
    """Train every policy to the end, each in a process of its own that is killed between any two writes.

    Args:
        turn: called with 0, 1, … between two looks at engines and pods.
        pauses: policy → seconds of each of its steps.
    """
    draw, turns, pauses = random.Random(kills), 0, pauses or {"default": 0.0}
    running = {}

    def start(policy: str) -> None:
        nonlocal kills
        writes = draw.randrange(LONGEST_LIFE) if kills > 0 else None
        kills -= 1
        running[policy] = FORK.Process(target=train, args=(run.path, 2, pauses[policy], policy, writes))
        running[policy].start()

    for policy in pauses:
        start(policy)
    deadline = time.monotonic() + 120
    try:
        while running:
            assert time.monotonic() < deadline, {policy: len(plans(run, policy)) for policy in pauses}
            turn(turns)
            turns += 1
            engines.beat()
            pods.work()
            time.sleep(0.01)
            for policy, child in list(running.items()):
                if child.exitcode == -signal.SIGKILL:
                    start(policy)
                elif child.exitcode is not None:
                    assert child.exitcode == 0
                    del running[policy]
    finally:
        for child in running.values():
            child.kill()


@pytest.fixture
def short_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine count as dead after half a second."""
    monkeypatch.setattr("megaflow_hpc.rundir.endpoints.STALE_S", 0.5)


# --- engines ---


@pytest.mark.usefixtures("short_lives")
@pytest.mark.parametrize("bound", [0, 2])
def test_training_does_not_wait_for_a_dead_engine(tmp_path: Path, bound: int) -> None:
    run = training_run(tmp_path / "run", {"staleness": bound, "batch": 2, "steps": 6})
    engines = Engines(run, ["default.0", "default.1"])
    engines.dead = {"default.1"}
    learn(run, Pods(run, engines=engines), engines)
    assert set().union(*settled(run)) == requested(run)
    assert (len(plans(run)), drops(run)) == (6, set())
    assert stalest(run) <= bound


@pytest.mark.parametrize("bound", [0, 1])
def test_training_does_not_wait_for_an_engine_that_refuses_weights_and_drops_what_it_samples(
    tmp_path: Path, bound: int
) -> None:
    run = training_run(tmp_path / "run", {"staleness": bound, "batch": 2, "steps": 6}, samples=6)
    engines = Engines(run, ["default.0", "default.1"])
    engines.refusing = {"default.1"}
    learn(run, Pods(run, engines=engines), engines)
    assert set().union(*settled(run)) == requested(run)
    assert (len(plans(run)), drops(run)) == (6, {"stale"})
    assert stalest(run) <= bound
    assert all(plan.rollouts for plan in plans(run))


@pytest.mark.parametrize("bound", [0, 2])
def test_a_lagging_engine_is_waited_for_so_that_the_bound_is_kept(tmp_path: Path, bound: int) -> None:
    run = training_run(tmp_path / "run", {"staleness": bound, "batch": 2, "steps": 6})
    engines = Engines(run, ["default.0", "default.1"])

    def turn(number: int) -> None:
        engines.lagging = set() if number % 20 == 0 else {"default.1"}

    learn(run, Pods(run, engines=engines), engines, turn)
    assert set().union(*settled(run)) == requested(run)
    assert (len(plans(run)), drops(run)) == (6, set())
    assert stalest(run) <= bound


def test_a_step_names_the_engine_that_it_waits_for(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"staleness": 1, "batch": 2, "steps": 8})
    engines = Engines(run, ["default.0", "default.1"])
    engines.lagging = {"default.1"}
    engines.beat()
    pods, flow = Pods(run, engines=engines), Dataflow(run)
    flow.start()
    assert flow.try_plan(1) is None
    for step in (1, 2):
        pods.work()
        one_step(flow, step)
        engines.beat()
    pods.work()
    assert waits(flow, 3) == (
        "rollouts: 0 of 2 groups are complete, 0 are under way; the next request waits for default.1 (serves 0) to "
        "load weights 2"
    )
    engines.lagging = set()
    engines.beat()
    assert flow.try_plan(3) is None
    pods.work()
    one_step(flow, 3)
    assert (stalest(run), drops(run)) == (1, set())
    flow.leave()


def test_rollouts_of_old_weights_are_not_used_up_while_no_engine_serves_the_newest(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"staleness": 1, "batch": 2, "steps": 8})
    pods, flow = Pods(run, version=lambda: 0), Dataflow(run)
    flow.start()
    assert flow.try_plan(1) is None
    for step in (1, 2):
        pods.work()
        one_step(flow, step)
    pods.work()
    assert waits(flow, 3) == (
        "an engine of policy 'default' to serve its newest weights; some rollouts are older than staleness: 1 allows"
    )
    engines = Engines(run, ["default.0"])
    engines.beat()
    plan = flow.try_plan(3)
    assert plan is not None
    assert (plan.rollouts, {*plan.drops.values()}) == ([], {"stale", "fewer than two samples"})
    step_through(flow, Step(flow, plan), START)
    pods = Pods(run, engines=engines, pod="later")
    while len(plans(run)) < 8:
        engines.beat()
        if (plan := flow.try_plan(len(plans(run)) + 1)) is not None:
            step_through(flow, Step(flow, plan), START)
        pods.work()
    assert [bool(plan.rollouts) for plan in plans(run)[4:]] == [True] * 4
    assert stalest(run) <= 1
    flow.leave()


def test_an_asynchronous_training_waits_for_no_engine(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"staleness": None, "batch": 2, "steps": 6})
    engines = Engines(run, ["default.0"])
    engines.lagging = {"default.0"}
    learn(run, Pods(run, engines=engines), engines, kills=2)
    assert (len(plans(run)), stalest(run), drops(run)) == (6, 5, set())


# --- policies that sample nothing themselves ---


@pytest.mark.parametrize(("slow", "bound"), [("critic", 0), ("solver", 1), ("critic", None)])
def test_a_helper_uses_its_owners_groups_step_by_step_whoever_is_slower(
    tmp_path: Path, slow: str, bound: int | None
) -> None:
    run = training_run(tmp_path / "run", {"staleness": bound, "batch": 2, "steps": 6}, policies=TWO)
    engines = Engines(run, ["solver.0", "critic.0"])
    pods = Pods(run, engines=engines, helpers=["critic"])
    learn(run, pods, engines, pauses={"solver": 0.0, "critic": 0.0, slow: 0.15})
    assert settled(run, "solver") == settled(run, "critic")
    assert set().union(*settled(run, "critic")) == requested(run)
    assert drops(run, "solver") == drops(run, "critic") == set()
    if bound is not None:
        assert max(stalest(run, "solver"), stalest(run, "critic")) <= bound
    assert Marks(run).open == [], "both let the campaign end"


def pair(run: RunDir) -> tuple[Dataflow, Dataflow]:
    """Return the dataflows of an owner and a helper that have started."""
    flows = Dataflow(run, "solver"), Dataflow(run, "critic")
    for flow in flows:
        flow.start()
        assert flow.try_plan(1) is None
    return flows


def test_owners_wait_for_a_helper_whose_trainer_failed_and_name_the_remedy(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"staleness": 1, "batch": 2, "steps": 6}, policies=TWO)
    pods = Pods(run, helpers=["critic"])
    solver, critic = pair(run)
    for step in (1, 2):
        pods.work()
        one_step(solver, step)
    log = run.logs / "trainer.log"
    log.write_text("Error: CUDA out of memory\n")
    say_last(run, "critic", "failed", 1, log)
    critic.leave()
    assert waits(solver, 3) == (
        "rollouts: 0 of 2 groups are complete, 0 are under way; the next request waits for the trainer of policy "
        "'critic' to commit step 1, but it failed (Error: CUDA out of memory); start it again with: "
        f"megaflow-hpc resume {run}"
    )
    again = Dataflow(run, "critic")
    again.start()
    one_step(again, 1)
    assert solver.try_plan(3) is None
    assert pods.work() == 2 * 4
    one_step(solver, 3)
    one_step(again, 2)
    one_step(again, 3)
    assert waits(again, 4) == "the trainer of policy 'solver' to plan step 4"
    solver.leave()
    again.leave()


def test_owners_use_a_group_in_time_for_a_helper_whose_tokens_are_older(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"staleness": 1, "batch": 2, "steps": 4}, policies=TWO)
    pods = Pods(run, helpers=["critic"])
    solver, critic = pair(run)
    for step in (1, 2):
        pods.work()
        one_step(solver, step)
    one_step(critic, 1)
    assert solver.try_plan(3) is None
    slow = min(requested(run) - set().union(*settled(run, "solver")))  # requested by solver's version 2, critic's 1
    pods.work(only=lambda rollout: rollout.group_id != slow or rollout.sample_index > 0)
    one_step(critic, 2)
    assert solver.try_plan(3) is None
    pods.work(only=lambda rollout: rollout.group_id != slow)
    assert solver.try_plan(3) is None, "in step 4, critic's tokens of the slow group would be too old"
    pods.work()
    for step in (3, 4):
        one_step(solver, step)
        one_step(critic, step)
    assert slow in settled(run, "solver")[2]
    assert (drops(run, "critic"), stalest(run, "critic")) == (set(), 1)
    solver.leave()
    critic.leave()


def test_a_helper_is_complete_when_its_owners_have_ended_and_no_group_is_left(tmp_path: Path) -> None:
    training = {"staleness": 1, "batch": 2, "steps": 9, "prompts": {"pass_rate": [0, 0.05]}}
    run = training_run(tmp_path / "run", training, tasks=4, policies=TWO)
    pods = Pods(run, lambda rollout: 1.0, helpers=["critic"])
    solver, critic = pair(run)
    said: list[str] = []
    critic.tell = said.append
    steps = 0
    while (plan := solver.try_plan(steps + 1)) is not None or pods.work():
        if plan is not None:
            steps += 1
            step_through(solver, Step(solver, plan), START)
            one_step(critic, steps)
    solver.close()
    assert 0 < steps < 9
    assert [step.number for step in critic.steps()] == []
    assert said == [
        f"{run}: the trainers of solver have ended, and no group of theirs is left; {steps} of 9 steps are done"
    ]
    assert Marks(run).open == []
    assert settled(run, "solver") == settled(run, "critic")


def test_a_helper_asks_for_no_rollouts_of_its_own(tmp_path: Path) -> None:
    training = {"staleness": 0, "batch": 2, "steps": 2, "evaluate": {"tasks": "held-out", "every": 1}}
    run = training_run(
        tmp_path / "run", training, tasks=3, held_out=1, policies={"solver": 2, "critic": 0}, scheduling={"spare": 1}
    )
    solver, critic = pair(run)
    with pytest.raises(ConfigError, match=r"policy 'critic' runs no tasks \(samples: 0\)"):
        critic.add(["task-0"], token="more")
    Pods(run, helpers=["critic"]).work()
    one_step(solver, 1)
    one_step(critic, 1)
    assert {rollout.policy for block in read_blocks(run) for rollout in block.rollouts} == {"solver"}
    solver.leave()
    critic.leave()


@pytest.mark.parametrize("bound", [0, None])
def test_a_helper_of_a_policy_that_does_not_learn_ends_with_its_groups(tmp_path: Path, bound: int | None) -> None:
    training = {"staleness": bound, "batch": 2, "steps": 20, "policies": {"critic": {}}}
    run = training_run(tmp_path / "run", training, policies=TWO)
    write_blocks(run, [r for n in range(5) for r in of_solver(f"task-{n}")], size=4)
    engines = Engines(run, ["critic.0"])
    pods = Pods(run, engines=engines, helpers=["critic"])
    learn(run, pods, engines, pauses={"critic": 0.0}, kills=2)
    assert set().union(*settled(run, "critic")) == requested(run)
    assert Marks(run).open == []
    if bound is not None:
        assert stalest(run, "critic") <= bound


def of_solver(task: str) -> Sequence[Rollout]:
    """Return the samples of a task under the policy ``solver``."""
    return [Rollout(task, "solver", r.sample_index, "nop") for r in rollouts([task], 4)]
