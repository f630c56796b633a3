"""Advantages, data steps, prompts and learning rates from papers, on cases computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaflow_hpc.config.training import PolicyTraining, PromptsConfig, TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.rewards import GivenReward, RewardLog
from megaflow_hpc.training.algorithms import Prompts, advantages, choose
from megaflow_hpc.training.algorithms.prompts import TaskStatistics
from megaflow_hpc.training.algorithms.samples import Sample, StoredRollout, TurnTokens
from megaflow_hpc.training.recipes import (
    anchor_groups,
    by_effective_size,
    given,
    pairs,
    passed,
    returns_to_go,
    soft_overlong,
    uncertain,
)
from megaflow_hpc.training.trainer.probe import check, scheduled
from tests.support.groups import group, sample

HERE = "megaflow_hpc.training.recipes"


def turned(index: int, reward: float, *turns: float) -> Sample:
    """A sample whose turns have these rewards and one token each."""
    spans = tuple(TurnTokens(call, 0, 2 * call + 1, 2 * call + 2) for call in range(len(turns)))
    rewards = {f"turn.{call}": value for call, value in enumerate(turns)}
    return sample("t/p", index, reward, turns=spans, rewards=rewards, tokens=len(turns))


def test_rewards_given_later_to_a_rollout_its_turns_or_its_sequences(tmp_path: Path) -> None:
    log = RewardLog(RunDir(tmp_path), "mine")
    for number, rewards in enumerate([{"reward": 0.5, "sequence.0": 1.0}, {"turn.1": 0.25}, {"sequence.1": 0.75}]):
        log.add(GivenReward(id=f"t/p/{number}", at=1.0, digest="", reward=rewards.get("reward"), rewards=rewards))
    log.close()
    samples = [replace(turned(index, 0.0, 0.0, 0.0, 0.0), sequences=2) for index in range(4)]
    found = given([StoredRollout(one, None) for one in samples], str(tmp_path), "mine")  # type: ignore[arg-type]
    assert found == {"t/p/0": 0.5, "t/p/1": [0.0, 0.25, 0.0], "t/p/2": [0.0, 0.75], "t/p/3": None}


def test_soft_overlong_needs_a_buffer_within_its_lengths() -> None:
    with pytest.raises(ConfigError, match=r"buffer 20: expected a number from 1 to longest \(10\)"):
        soft_overlong([], 0, np.random.default_rng(0), longest=10, buffer=20)


def test_returns_to_go() -> None:
    both = group([]).only((turned(0, 1.0, 0.5, 0.0, 0.0), turned(1, 0.0, 0.0, 0.25)))
    # returns: 0.5 + 0.5 · (0 + 0.5 · 1) = 0.75, 0.5, 1; and 0 + 0.5 · 0.25 = 0.125, 0.25
    expected = {"t/p/0": [0.3125, 0.125, 0.0], "t/p/1": [-0.3125, -0.125]}
    assert returns_to_go([both], discount=0.5) == expected
    kind = {"name": f"{HERE}:returns_to_go", "args": {"discount": 0.5}}
    found = advantages(PolicyTraining.model_validate({"advantage": {"kind": kind}}), [both])
    assert {id: values.tolist() for id, (values, _) in found.items() if not isinstance(values, float)} == expected


def test_turns_are_compared_by_their_states() -> None:
    def visited(index: int, reward: float, *states: str) -> Sample:
        spans = tuple(TurnTokens(n, 0, 2 * n + 1, 2 * n + 2, state) for n, state in enumerate(states))
        return sample("t/p", index, reward, turns=spans, rewards={}, tokens=len(states))

    both = group([]).only((visited(0, 1.0, "start", "open", ""), visited(1, 0.0, "start", "open", "open")))
    # Returns with discount 0.5: 0.25, 0.5, 1; and 0, 0, 0. Means: start 0.125; open (0.5 + 0 + 0) / 3.
    found = anchor_groups([both], discount=0.5, weight=2.0)
    expected = {
        "t/p/0": [0.5 + 2 * 0.125, 0.5 + 2 * (0.5 - 0.5 / 3), 0.5],
        "t/p/1": [-0.5 - 2 * 0.125, -0.5 - 2 * 0.5 / 3, -0.5 - 2 * 0.5 / 3],
    }
    assert {id: pytest.approx(values) for id, values in found.items()} == expected
    alone = group([]).only((turned(0, 1.0, 0.5), turned(1, 0.0, 0.5)))
    assert anchor_groups([alone]) == {"t/p/0": [0.5], "t/p/1": [-0.5]}, "without states, the rollouts' own"


def test_passed_rollouts_are_demonstrations() -> None:
    assert passed([group([1, 0.5, 0])]) == {"t/p/0": 1.0, "t/p/1": 0.0, "t/p/2": 0.0}
    assert passed([group([1, 0.5])], threshold=0.5) == {"t/p/0": 1.0, "t/p/1": 1.0}


def test_pairs_are_of_the_best_and_the_worst() -> None:
    found = pairs([group([0, 1, 1, 0], "a/p"), group([1, 1], "b/p")])
    assert found == {"a/p/0": -1.0, "a/p/1": 1.0, "a/p/2": 0.0, "a/p/3": 0.0, "b/p/0": 0.0, "b/p/1": 0.0}


def test_no_pair_has_a_rollout_that_is_not_trained_on() -> None:
    masked = replace(sample("a/p", 3, 0.0), weight=0.0)
    found = pairs([group([1, 0.5, 0.7]).only((*group([1, 0.5, 0.7], "a/p").samples, masked))])
    assert found == {"a/p/0": 1.0, "a/p/1": -1.0, "a/p/2": 0.0, "a/p/3": 0.0}
    assert pairs([group([]).only((masked, replace(masked, id="a/p/4", reward=1.0)))]) == {"a/p/3": 0.0, "a/p/4": 0.0}


def test_long_rollouts_weigh_more() -> None:
    rows = [sample("t/p", index, 1.0, agent_s=seconds) for index, seconds in enumerate((10.0, 50.0, 0.0, 15.0))]
    method = {"method": {"name": f"{HERE}:by_duration", "args": {"cap": 1.5}}}
    config = TrainingConfig.model_validate({"policies": {"default": {}}, "data": [method]})
    found = choose(config, [group([]).only(tuple(rows))], version=0, want=1)
    assert [s.weight for s in found.taken[0].samples] == [0.4, 1.5, 1.0, 0.6]  # of a mean of 25 s


def test_uncertain_tasks_get_more_groups() -> None:
    statistics = {task: TaskStatistics(recent=rate, tried=4) for task, rate in (("a", 0.5), ("b", 0.9), ("c", 1.0))}
    # p (1 - p) = 0.25, 0.09, 0.01, and 0.25 for the new task d: of 12 groups 5, 1.8, 0.2 and 5
    found = uncertain(["a", "b", "c", "d"], 12, statistics, np.random.default_rng(0))
    assert {task: found.count(task) for task in "abcd"} == {"a": 5, "b": 2, "c": 0, "d": 5}
    prompts = Prompts(PromptsConfig.model_validate({"order": f"{HERE}:uncertain"}))
    state = prompts.learn({}, [group([1, 1], "a/p"), group([1, 0], "b/p")])
    assert prompts.choose(["a", "b"], 4, state, np.random.default_rng(0))[0] == ["b"] * 4


def test_a_group_without_a_success_gets_a_past_one() -> None:
    old, new = (sample("t@1/p", 3, 1.0, oldest=1), sample("t@2/p", 0, 1.0, oldest=4))
    groups = [group([0, 0, 0], "t@5/p"), group([0, 1], "t@6/p"), group([0, 0.5, 0.5], "t@7/p"), group([0, 0], "u@5/p")]

    def found(**args: Any) -> Any:
        method = {"method": {"name": f"{HERE}:past_successes", "args": args}}
        config = TrainingConfig.model_validate({"policies": {"default": {}}, "data": [method]})
        return choose(config, groups, version=6, want=9, earlier={"t": [old, new]})

    assert found().drops == {}
    taken = {g.id: g for g in found().taken}
    added = {name: [s.id for s in g.samples][-1] for name, g in taken.items()}
    assert added == {"t@5/p": "t@2/p/0", "t@6/p": "t@6/p/1", "t@7/p": "t@1/p/3", "u@5/p": "u@5/p/1"}
    # rewards 0, 0, 0 and 1 with mean 1/4; 0, 1/2, 1/2 and 1 with mean 1/2
    values = advantages(PolicyTraining(), [taken["t@5/p"], taken["t@7/p"]])
    assert [value for value, _ in values.values()] == [-0.25, -0.25, -0.25, 0.75, -0.5, 0.0, 0.0, 0.5]
    assert {g.id: len(g.samples) for g in found(age=2).taken} == {"t@5/p": 4, "t@6/p": 2, "t@7/p": 3, "u@5/p": 2}
    old, new = replace(old, agent="strong"), replace(new, agent="strong")
    assert {len(g.samples) for g in found().taken} == {2, 3}, "no group gets a rollout of another agent"


def test_the_learning_rate_follows_the_effective_sample_size() -> None:
    # weights 1, 1, 4: (1 + 1 + 4)² / (1 + 1 + 16) = 2 of 3 tokens
    assert by_effective_size(1, 10, 3e-6, {"effective": 2 / 3}, power=1.0) == pytest.approx(2e-6)
    assert by_effective_size(1, 10, 1.0, {"effective": 0.25}) == 0.5
    assert by_effective_size(1, 10, 1.0, {"effective": 1e-9}) == 0.1
    assert by_effective_size(1, 10, 1.0, {}) == 1.0


def test_all_are_functions_that_a_campaign_file_may_name() -> None:
    for kind in ("returns_to_go", "anchor_groups", "passed", "pairs"):
        check(TrainingConfig.model_validate({"policies": {"default": {"advantage": {"kind": f"{HERE}:{kind}"}}}}))
    config = TrainingConfig.model_validate(
        {
            "policies": {"default": {"optimizer": {"schedule": f"{HERE}:by_effective_size"}}},
            "data": [f"{HERE}:by_duration", f"{HERE}:past_successes"],
            "prompts": {"order": f"{HERE}:uncertain"},
        }
    )
    check(config)
    schedule = config.policies["default"].optimizer.schedule
    assert not isinstance(schedule, str)
    assert scheduled(schedule, 1, 10, 1.0, {"effective": 0.64}) == pytest.approx(0.8)
