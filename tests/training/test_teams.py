"""A team learns: one policy asks for everybody, each role is compared with itself, and nothing is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflow_hpc.campaign.planning.own_code import check_methods
from megaflow_hpc.config.team import TeamConfig
from megaflow_hpc.config.training import PolicyTraining, PromptsConfig, TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training.algorithms import advantages, choose
from megaflow_hpc.training.algorithms.prompts import Prompts
from megaflow_hpc.training.algorithms.samples import RoleRewards, Sample, SampleGroup, TurnTokens
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from megaflow_hpc.types import Rollout
from tests.support.groups import sample as any_sample
from tests.support.hash_trainer import START, step_through
from tests.support.training import Pods, training_run

WRITER = {"writer": "author", "checker": {"policy": "second", "reward": "right"}}
CALLS = [("writer", "author"), ("checker", "second"), ("writer", "author")]
SYNCHRONOUS = {"staleness": 0, "batch": 2, "steps": 3}


def team(tmp_path: Path, roles: dict[str, Any], trained: list[str], models: int = 2, **more: Any) -> RunDir:
    """Make a run whose team has these roles."""
    policies = dict.fromkeys(["author", "second", "third"][:models], 0)
    training = {**SYNCHRONOUS, "policies": dict.fromkeys(trained), **more}
    return training_run(tmp_path / "run", training, policies=policies, team=roles, samples=4)


def written(rollout: Rollout) -> float:
    return float(rollout.sample_index % 2)


def right(rollout: Rollout) -> dict[str, float]:
    return {"right": float(rollout.sample_index < 2)}


def planned(run: RunDir, policy: str) -> list[StepPlan]:
    files = TrainingFiles(run, policy)
    return [plan for number in files.numbers(StepPlan) if (plan := files.read(StepPlan, number))]


def learn(run: RunDir, pods: Pods, policies: list[str]) -> None:
    """Let the trainers take turns, a step each, to the end."""
    flows = [Dataflow(run, policy, say=lambda text: None) for policy in policies]
    for flow in flows:
        flow.start()
    for number in range(1, flows[0].config.steps + 1):
        for flow in flows:
            plan = flow.try_plan(number)
            if plan is None:
                pods.work()
                plan = flow.try_plan(number)
            assert plan is not None, flow.planning.missing(number)
            step_through(flow, Step(flow, plan), START)
    for flow in flows:
        flow.leave()


def test_each_role_is_trained_on_its_own_reward(tmp_path: Path) -> None:
    run = team(tmp_path, WRITER, ["author", "second"])
    pods = Pods(run, written, roles=CALLS, named=right)
    learn(run, pods, ["author", "second"])
    for policy, reward in (("author", written), ("second", lambda rollout: right(rollout)["right"])):
        rollouts = {rollout.id: rollout for block in read_blocks(run) for rollout in block.rollouts}
        plans = planned(run, policy)
        assert len(plans) == 3
        for one in (one for plan in plans for one in plan.rollouts):
            assert one.advantage == reward(rollouts[one.id]) - 0.5
            assert one.advantages == [], "all sequences of the policy are of one role"
            assert len(one.lengths) == {"author": 2, "second": 1}[policy]
    metrics = [json.loads(line) for line in TrainingFiles(run, "second").metrics.read_text().splitlines()]
    assert [line["reward/checker"] for line in metrics] == [0.5] * 3
    settled = [[plan.groups for plan in planned(run, policy)] for policy in ("author", "second")]
    assert settled[0] == settled[1]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("trained", [["author"], ["second"], ["third"], ["second", "third"]])
def test_any_member_may_be_frozen_and_one_asks_for_all(tmp_path: Path, trained: list[str], staleness: int) -> None:
    roles = {**WRITER, "editor": "third"}
    run = team(tmp_path, roles, trained, models=3, staleness=staleness)
    pods = Pods(run, written, roles=[*CALLS, ("editor", "third")], named=right)
    learn(run, pods, trained)
    rollouts = [rollout for block in read_blocks(run) for rollout in block.rollouts]
    assert len(rollouts) == 3 * 2 * 4, "requested once"
    assert {rollout.policy for rollout in rollouts} == {"author"}
    for policy in trained:
        plans = planned(run, policy)
        assert sorted(one.id for plan in plans for one in plan.rollouts) == sorted(rollout.id for rollout in rollouts)
        assert max(age for plan in plans for age in plan.staleness) == staleness


def test_two_roles_of_one_policy_have_advantages_of_their_own(tmp_path: Path) -> None:
    roles = {"writer": "author", "checker": {"policy": "author", "reward": "right"}}
    run = team(tmp_path, roles, ["author"], models=1)
    calls = [(role, "author") for role in ("writer", "checker", "writer")]
    learn(run, Pods(run, written, roles=calls, named=right), ["author"])
    for one in (one for plan in planned(run, "author") for one in plan.rollouts):
        sample = int(one.id.rpartition("/")[2])
        own = float(sample % 2) - 0.5, float(sample < 2) - 0.5
        assert one.advantages == [own[0], own[1], own[0]]
        assert one.roles == {"writer": own[0] + 0.5, "checker": own[1] + 0.5}


def test_weights_are_given_to_an_opponent_every_few_steps(tmp_path: Path) -> None:
    roles = {"player": "author", "opponent": "second"}
    policies = {"author": {"snapshot": {"second": 2}}}
    run = team(tmp_path, roles, [], policies=policies, steps=4)
    learn(run, Pods(run, written, roles=[("player", "author"), ("opponent", "second")]), ["author"])
    assert [(v.ordinal, v.token) for v in versions(run, "second")] == [
        (1, "author-step-000002"),
        (2, "author-step-000004"),
    ]
    assert versions(run, "author")[-1].ordinal == 4


@pytest.mark.parametrize("how", ["truncate", "penalise"])
def test_a_sequence_that_is_cut_keeps_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    module = f"turns_for_{how}"
    (tmp_path / f"{module}.py").write_text("def own(g): return {s.id: s.turn_rewards for x in g for s in x.samples}\n")
    monkeypatch.syspath_prepend(tmp_path)
    policies = {"author": {"advantage": {"kind": f"{module}:own"}}}
    run = team(tmp_path, WRITER, [], policies=policies, data=[{"over_length": [7, how]}])
    learn(run, Pods(run, written, roles=CALLS, named=lambda rollout: {"turn.0": 1.0, "turn.2": 2.0}), ["author"])
    rollouts = [one for plan in planned(run, "author") for one in plan.rollouts]
    assert {7} < {length for one in rollouts for length in one.lengths}, "some sequences are cut, and some are not"
    for one in rollouts:
        assert one.advantages == [1.0, 2.0]
        assert [turn[0] for turn in one.turns] == [0, 1], "the first and the third call, which are of the writer"
        assert all(start <= end <= one.lengths[number] for number, start, end in one.turns)


def test_a_role_that_no_rollout_of_a_step_plays_needs_no_reward(tmp_path: Path) -> None:
    run = team(tmp_path, WRITER, ["author", "second"])
    learn(run, Pods(run, written, roles=[("writer", "author")]), ["author", "second"])
    for plan in planned(run, "second"):
        assert not plan.rollouts
        assert set(plan.drops.values()) == {"nothing sampled", "fewer than two samples"}
    assert [len(plan.rollouts) for plan in planned(run, "author")] == [8, 8, 8]


def test_settings_for_a_policy_outside_the_team_are_refused(tmp_path: Path) -> None:
    run = team(tmp_path, WRITER, ["author"])
    other = TrainingConfig.model_validate({"policies": {"default": {}}})
    with pytest.raises(ConfigError, match=r"policy 'default' has no role in the campaign's team: author, second"):
        Dataflow(run, training=other)


# --- credit, worked out by hand ---


def sample(index: int, reward: float, right: float | None, roles: tuple[str, ...]) -> Sample:
    turns = tuple(TurnTokens(number, number, 1, 2 + number) for number in range(len(roles)))
    rewards = {"reward": reward, **({} if right is None else {"right": right})}
    tokens, counts = sum(turn.end - turn.start for turn in turns), {"sequences": len(roles), "longest": 9}
    return any_sample("t/p", index, reward, rewards=rewards, tokens=tokens, turns=turns, roles=roles, **counts)


BOTH: RoleRewards = {"writer": None, "checker": "right"}


def group(*samples: tuple[float, float | None, tuple[str, ...]]) -> SampleGroup:
    return SampleGroup("t/p", "t", tuple(sample(number, *own) for number, own in enumerate(samples)))


def values(own: SampleGroup, roles: RoleRewards = BOTH, **advantage: Any) -> list[list[float]]:
    config = PolicyTraining.model_validate({"advantage": advantage})
    found = advantages(config, [own], roles)
    return [np.atleast_1d(found[sample.id][0]).tolist() for sample in own.samples]


def test_a_role_is_compared_with_the_same_role_alone() -> None:
    own = group((1, 0, ("writer", "checker")), (0, 3, ("writer", "checker")), (0.5, None, ("writer",)))
    assert values(own) == [[0.5, -1.5], [-0.5, 1.5], [0.0]]
    # Leave-one-out: writer 1 - mean(0, 0.5), …; checker 0 - 3 and 3 - 0.
    assert values(own, kind="rloo") == [[0.75, -3.0], [-0.75, 3.0], [0.0]]
    # A role without a reward of its own shares the weighted sum, here 1, 1.5 and 0.5.
    shared = values(own, kind="rloo", rewards={"reward": 1, "right": 0.5})
    assert shared == [[0.0, -3.0], [0.75, 3.0], [-0.75]]


def test_turns_are_compared_with_those_of_the_same_role() -> None:
    """The first rollout calls writer, checker and writer, the second checker and writer; a turn has a reward."""
    made = group((1, 0, ("writer", "checker", "writer")), (0, 3, ("checker", "writer")))
    first, second = (
        replace(one, rewards={**one.rewards, **more}, turns=tuple(turn._replace(state="same") for turn in one.turns))
        for one, more in zip(made.samples, ({"turn.0": 0.5}, {}), strict=True)
    )
    own = made.only((first, second))
    # Writer: returns 1.5 and 1 against 0 alone; checker: 0 against 3.
    to_go = values(own, kind="megaflow_hpc.training.recipes:returns_to_go")
    assert to_go == [[0.75, -1.5, 0.0], [1.5, -0.75]]
    # Each role's advantage of the rollout, and that of the turn among its role's turns, which saw the same.
    kind = {"name": "megaflow_hpc.training.recipes:anchor_groups", "args": {"discount": 1.0}}
    mean = 2.5 / 3
    anchored = [[0.75 + 1.5 - mean, -1.5 - 1.5, 0.75 + 1 - mean], [1.5 + 1.5, -0.75 - mean]]
    for got, expected in zip(values(own, kind=kind), anchored, strict=True):
        assert got == pytest.approx(expected)
    assert values(own, kind="megaflow_hpc.training.recipes:passed") == [[1.0, 0.0, 1.0], [1.0, 0.0]]


def test_whitening_counts_the_tokens_of_each_role() -> None:
    own = group((1, 0, ("writer", "checker")), (0, 3, ("writer", "checker")))
    got = np.array(values(own, whiten=True))
    tokens = np.array([[1, 2], [1, 2]])  # of the sequences, by their turns
    raw = np.array([[0.5, -1.5], [-0.5, 1.5]])
    mean = (raw * tokens).sum() / tokens.sum()
    expected = (raw - mean) / np.sqrt(((raw - mean) ** 2 * tokens).sum() / tokens.sum())
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_function_gets_the_rewards_of_all_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_role.py").write_text(
        "def own(groups):\n"
        "    return {s.id: [s.role_rewards[r] for r in s.roles] for g in groups for s in g.samples}\n"
        "def total(groups):\n"
        "    return {s.id: s.reward for g in groups for s in g.samples}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = group((1, 0, ("writer", "checker")), (0, 3, ("writer", "checker")))
    assert values(own, kind="by_role:own") == [[1.0, 0.0], [0.0, 3.0]]
    penalised = own.only(tuple(replace(sample, penalty=-0.5) for sample in own.samples))
    weighted = values(penalised, kind="by_role:own", rewards={"reward": 2, "right": 1})
    assert weighted == [[1.5, -0.5], [2.5, 2.5]], "the writer shares the weighted sum, and both the penalty"
    assert values(own, roles={"checker": "right"}, kind="by_role:total") == [[0.0], [3.0]]


def test_a_function_that_uses_roles_is_tried_with_roles(tmp_path: Path) -> None:
    (tmp_path / "uses_roles.py").write_text(
        "def own(groups):\n"
        "    return {s.id: [s.role_rewards[r] for r in s.roles] for g in groups for s in g.samples}\n"
        "def rate(rollouts):\n"
        "    return {r.sample.id: sum(turn.role == 'checker' for turn in r.trajectory.turns) for r in rollouts}\n"
        "def keep(groups, version, random):\n"
        "    return [g for g in groups if 'writer' in g.samples[0].roles]\n"
    )
    policy = {"advantage": {"kind": "uses_roles:own"}, "score": "uses_roles:rate"}
    config = training({"policies": {"author": policy}, "data": ["uses_roles:keep"]})
    roles = {"writer": "author", "checker": {"policy": "author", "reward": "right"}}
    check_methods(config, TeamConfig.model_validate(roles), tmp_path, lambda key: key)


def test_a_group_is_dropped_only_if_no_role_can_learn_from_it() -> None:
    config = training({"data": ["zero_variance"]})
    differs = group((1, 0, ("writer", "checker")), (1, 1, ("writer", "checker")))
    same = group((1, 1, ("writer", "checker")), (1, 1, ("writer", "checker")))
    assert choose(config, [differs], version=0, want=1, roles=BOTH).taken
    assert choose(config, [same], version=0, want=1, roles=BOTH).drops == {"t/p": "zero variance"}
    assert choose(config, [differs], version=0, want=1, roles={"writer": None}).drops == {"t/p": "zero variance"}


def test_tasks_and_groups_are_chosen_by_the_reward_of_the_role() -> None:
    """A frozen writer solves the task, and the checker that is trained is right once of twice."""
    own, checker = group((1, 0, ("checker",)), (1, 1, ("checker",))), {"checker": "right"}
    config = training({"data": [{"pass_rate": [0, 1, "exclusive"]}]})
    assert choose(config, [own], version=0, want=1, roles=checker).taken
    assert choose(config, [own], version=0, want=1).drops == {"t/p": "pass rate"}
    for roles, task in ((checker, [1, 2, 0.5, 0]), (None, [2, 2, 1.0, 1])):
        learned = Prompts(PromptsConfig(order="greso"), 1.0, roles).learn({}, [own])
        assert learned["tasks"]["t"] == pytest.approx(task)
    both = group((1, 0, ("writer", "checker")), (1, 1, ("checker", "writer")))
    learned = Prompts(PromptsConfig(), 1.0, BOTH).learn({}, [both])
    assert learned["tasks"]["t"] == pytest.approx([1, 2, 0.5, 0]), "both roles must pass"


def training(fields: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig.model_validate({"policies": {"p": {}}, **fields})


def test_a_reward_that_nobody_gives_is_named_with_its_key() -> None:
    own = group((1, None, ("checker",)), (0, None, ("checker",)))
    with pytest.raises(ConfigError, match=r"team.checker.reward: no rollout has a reward 'right'.*gave: reward"):
        choose(training({}), [own], version=0, want=1, roles=BOTH)
