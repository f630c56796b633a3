"""The samples of a step: each step of ``data`` by hand, and properties that hold for all of them in any order."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflow_hpc.config.training import AdvantageConfig, TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.algorithms import Choice, choose
from megaflow_hpc.training.algorithms.samples import SampleGroup
from tests.support.groups import failed, group, groups, sample

RECIPES = "megaflow_hpc.training.recipes"


def overlong(longest: int, buffer: int) -> dict[str, Any]:
    return {"method": {"name": f"{RECIPES}:soft_overlong", "args": {"longest": longest, "buffer": buffer}}}


STEPS: list[Any] = [
    {"penalty": -0.5},
    overlong(100, 50),
    f"{RECIPES}:mask_truncated",
    f"{RECIPES}:shuffled",
    "zero_variance",
    {"pass_rate": [0.2, 0.8]},
    {"replay": 0.5},
]


def training(*data: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"policies": {"p": {}}, "batch": 2, "data": list(data)})


def chosen(data: Sequence[Any], there: Sequence[SampleGroup], version: int = 0, want: int = 99, **more: Any) -> Choice:
    return choose(training(*data), there, version=version, want=want, **more)


# --- each by hand ---


def test_without_steps_every_group_is_taken() -> None:
    there = [group([0, 1], "a/p"), group([1, 1], "b/p")]
    assert chosen([], there).taken == tuple(there)


def test_what_infrastructure_failed_leaves_its_group() -> None:
    whole = SampleGroup(
        "a/p",
        "a",
        (
            sample("a/p", 0, 1.0),
            failed("a/p", 1),
            sample("a/p", 2, 0.0),
            sample("a/p", 3, math.nan, status="cancelled"),
            sample("a/p", 4, math.nan),
            sample("a/p", 5, 1.0, tokens=0, oldest=-1),
        ),
    )
    choice = chosen([], [whole])
    assert [s.index for s in choice.taken[0].samples] == [0, 2]
    assert choice.drops == {
        "a/p/1": "failed: sandbox",
        "a/p/3": "cancelled",
        "a/p/4": "no reward",
        "a/p/5": "nothing sampled",
    }


def test_shuffled_rewards_are_as_many_as_before_and_say_nothing_of_who_earned_them() -> None:
    there = [group([1] * 8 if number % 2 else [0] * 8, f"t{number:02}/p") for number in range(40)]
    choice = chosen([f"{RECIPES}:shuffled"], there, random=np.random.default_rng(1))
    assert [[s.id for s in g.samples] for g in choice.taken] == [[s.id for s in g.samples] for g in there]
    given = {s.id: s.reward for g in choice.taken for s in g.samples}
    earned = {s.id: s.reward for g in there for s in g.samples}
    assert sum(given.values()) == sum(earned.values()) == 160
    assert 120 < sum(given[name] == earned[name] for name in earned) < 200, "by lot 160; 4 standard deviations are 36"
    assert chosen([f"{RECIPES}:shuffled"], there, random=np.random.default_rng(1)).taken == choice.taken


def test_a_group_of_one_survivor_is_dropped_whole() -> None:
    choice = chosen([], [SampleGroup("a/p", "a", (sample("a/p", 0, 1.0), failed("a/p", 1, "node")))])
    assert choice.taken == ()
    assert choice.drops == {"a/p/1": "failed: node", "a/p": "fewer than two samples"}


def test_groups_with_equal_rewards_are_dropped() -> None:
    choice = chosen(["zero_variance"], [group([0, 1], "a/p"), group([1, 1], "b/p"), group([0, 0], "c/p")])
    assert [g.id for g in choice.taken] == ["a/p"]
    assert choice.drops == {"b/p": "zero variance", "c/p": "zero variance"}


def test_a_penalty_before_the_filter_makes_rewards_differ() -> None:
    equal = SampleGroup("a/p", "a", (sample("a/p", 0, 0.0), sample("a/p", 1, 0.0, status="truncated")))
    penalty = {"penalty": -0.5}
    assert [s.penalty for s in chosen([penalty, "zero_variance"], [equal]).taken[0].samples] == [0.0, -0.5]
    assert chosen(["zero_variance", penalty], [equal]).drops == {"a/p": "zero variance"}


def test_long_rollouts_are_punished_softly() -> None:
    """DAPO's numbers: 16,384 tokens without penalty, 4,096 more until the full penalty."""
    lengths = [16384, 17408, 18432, 20480, 30000]
    there = SampleGroup("a/p", "a", tuple(sample("a/p", i, 1.0, tokens=n) for i, n in enumerate(lengths)))
    step = overlong(20480, 4096)
    assert [s.penalty for s in chosen([step], [there]).taken[0].samples] == [0, -0.25, -0.5, -1, -1]


def test_unfinished_rollouts_can_be_left_untrained() -> None:
    there = SampleGroup("a/p", "a", (sample("a/p", 0, 1.0), sample("a/p", 1, 0.0, status="truncated")))
    assert [s.weight for s in chosen([f"{RECIPES}:mask_truncated"], [there]).taken[0].samples] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [([0.0, 1.0, "exclusive"], ["half"]), ([0.0, 0.5], ["none", "half"]), ([0.5, 1.0], ["half", "all"])],
)
def test_groups_outside_a_range_of_pass_rates_are_dropped(bounds: list[Any], kept: list[str]) -> None:
    there = [group([0, 0.9], "none/p"), group([0, 1], "half/p"), group([1, 1], "all/p")]
    choice = chosen([{"pass_rate": bounds}], there)
    assert sorted(g.task for g in choice.taken) == sorted(kept)
    assert set(choice.drops.values()) == {"pass rate"}


def test_samples_that_are_too_old_leave_their_group() -> None:
    there = SampleGroup("a/p", "a", tuple(sample("a/p", i, float(i), oldest=i) for i in range(4)))
    choice = chosen([], [there], version=4, bound=2)
    assert [s.index for s in choice.taken[0].samples] == [2, 3]
    assert choice.drops == {"a/p/0": "stale", "a/p/1": "stale"}


def test_groups_with_the_oldest_tokens_come_first() -> None:
    there = [group([0, 1], "new/p", oldest=3, time_ns=1), group([0, 1], "old/p", oldest=2, time_ns=9)]
    assert [g.task for g in chosen([], there).taken] == ["old", "new"]


def test_a_step_settles_as_many_groups_as_are_wanted_and_leaves_the_rest() -> None:
    there = [group([i % 2, 1], f"t{i}/p", oldest=i) for i in range(5)]
    choice = chosen(["zero_variance"], there, want=3)
    assert [g.id for g in choice.taken] == ["t0/p", "t2/p"]
    assert choice.drops == {"t1/p": "zero variance"}
    assert [g.id for g in choice.left] == ["t3/p", "t4/p"]


def test_named_rewards_have_to_be_known_and_have_to_differ() -> None:
    both = AdvantageConfig(rewards={"tests": 1.0, "style": 0.1})
    here = (
        sample("a/p", 0, 1.0, rewards={"tests": 1.0, "style": 0.0}),
        sample("a/p", 1, 1.0, rewards={"tests": 1.0, "style": 0.5}),
        sample("a/p", 2, 1.0, rewards={"tests": 1.0}),
    )
    choice = chosen(["zero_variance"], [SampleGroup("a/p", "a", here)], advantage=both)
    assert choice.drops == {}
    assert len(choice.taken[0].samples) == 3, "one whose verifier did not name all has 0 there, and stays"
    assert chosen(["zero_variance"], [SampleGroup("a/p", "a", here[1:])], advantage=both).drops == {}
    alone = AdvantageConfig(rewards={"tests": 1.0})
    assert chosen(["zero_variance"], [SampleGroup("a/p", "a", here)], advantage=alone).drops == {"a/p": "zero variance"}


def test_a_reward_that_nobody_gives_is_an_error_with_the_names_that_there_are() -> None:
    there = [group([0, 1], "a/p", rewards={"tests": 1.0, "lint": 0.0})]
    with pytest.raises(ConfigError, match=r"no rollout has a reward 'style'.*lint, tests"):
        chosen([], there, advantage=AdvantageConfig(rewards={"style": 1.0}))


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_is_an_error_that_names_the_rollout(reward: float) -> None:
    with pytest.raises(ConfigError, match=r"a/p/1: reward is -?inf"):
        chosen([], [group([0, reward], "a/p")])


def test_the_latest_groups_are_replayed_once_as_a_share_of_the_step() -> None:
    step = {"replay": 0.5}
    before = [group([0, 1], f"old{i}/p") for i in range(6)]
    there = [group([0, 1], f"new{i}/p") for i in range(2)]
    first = chosen([step], there, replayed=before)
    assert [g.task for g in first.replayed] == ["old4", "old5"]
    second = chosen([step], there, replayed=before, state=first.state)
    assert [g.task for g in second.replayed] == ["old2", "old3"]
    assert chosen([step], there, replayed=before, state=second.state).replayed == ()
    quarter = chosen([{"replay": 0.25}], [*there, group([0, 1], "new2/p")], replayed=before)
    assert [g.task for g in quarter.replayed] == ["old5"]


def test_what_is_replayed_is_the_same_as_it_was_taken_or_as_it_was_read_again() -> None:
    steps = [{"penalty": -0.5}, f"{RECIPES}:mask_truncated", {"replay": 0.5}]
    raw = [SampleGroup("old/p", "old", (sample("old/p", 0, 1.0), sample("old/p", 1, 1.0, status="truncated")))]
    taken = chosen(steps, raw).taken
    for before in (raw, taken):
        again = chosen(steps, [group([0, 1], "new/p")], replayed=before).replayed
        assert [(s.penalty, s.weight) for s in again[0].samples] == [(0.0, 1.0), (-0.5, 0.0)]


# --- properties of all steps ---

some_steps = st.permutations(STEPS).flatmap(lambda steps: st.integers(0, len(steps)).map(lambda n: steps[:n]))


def everything(choice: Choice) -> Any:
    return choice.taken, choice.drops, choice.left, choice.replayed, choice.state


@settings(max_examples=60, deadline=None)
@given(groups(), groups(), some_steps, st.integers(0, 8), st.integers(0, 6), st.integers(0, 9))
def test_nothing_is_lost_taken_twice_or_too_old(
    there: list[SampleGroup], used: list[SampleGroup], steps: list[Any], version: int, want: int, seed: int
) -> None:
    before = [replace(g, id=f"before-{g.id}") for g in used]
    choice = chosen(steps, there, version, want, replayed=before, random=np.random.default_rng(seed), bound=2)
    taken = {s.id for g in choice.taken for s in g.samples}
    of_dropped_groups = {s.id for g in there if g.id in choice.drops for s in g.samples}
    dropped = {s.id for g in there for s in g.samples if s.id in choice.drops} | of_dropped_groups
    waiting = {s.id for g in choice.left for s in g.samples}
    assert taken | dropped | waiting == {s.id for g in there for s in g.samples}
    assert not taken & dropped
    assert not (taken | dropped) & waiting
    assert len(there) - len(choice.left) == min(want, len(there))
    assert {g.id for g in choice.taken} | {g for g in choice.drops if g in {g.id for g in there}} | {
        g.id for g in choice.left
    } == {g.id for g in there}
    assert all(version - s.oldest <= 2 for g in choice.taken for s in g.samples)
    assert all(len(g.samples) >= 2 for g in choice.taken)
    assert all(s.verified for g in choice.taken for s in g.samples)
    assert {g.id for g in choice.replayed} <= {g.id for g in before}
    assert len({g.id for g in choice.replayed}) == len(choice.replayed)
    assert json.loads(json.dumps(choice.state)) == choice.state


@settings(max_examples=60, deadline=None)
@given(groups(), some_steps, st.integers(0, 8), st.integers(0, 6), st.randoms(use_true_random=False))
def test_the_order_of_what_is_handed_in_says_nothing(
    there: list[SampleGroup], steps: list[Any], version: int, want: int, shuffle: Any
) -> None:
    mixed = list(there)
    shuffle.shuffle(mixed)
    before = [replace(g, id=f"before-{g.id}") for g in there]
    one, other = (
        chosen(steps, handed, version, want, replayed=before, random=np.random.default_rng(3))
        for handed in (there, mixed)
    )
    assert everything(one) == everything(other)


@settings(max_examples=60, deadline=None)
@given(groups(), st.integers(0, 8))
def test_filters_of_whole_groups_commute(there: list[SampleGroup], version: int) -> None:
    filters = ["zero_variance", {"pass_rate": [0.2, 0.8]}]
    results = [chosen(order, there, version) for order in (filters, filters[::-1], [filters[1], filters[0]])]
    assert all(a.taken == b.taken and a.drops.keys() == b.drops.keys() for a, b in pairwise(results))


@settings(max_examples=60, deadline=None)
@given(groups())
def test_amounts_add_up_in_any_order(there: list[SampleGroup]) -> None:
    added = [{"penalty": -0.5}, overlong(100, 50), f"{RECIPES}:mask_truncated"]
    one, other = chosen(added, there), chosen(added[::-1], there)
    assert [(s.id, s.weight) for g in one.taken for s in g.samples] == [
        (s.id, s.weight) for g in other.taken for s in g.samples
    ]
    for a, b in zip(one.taken, other.taken, strict=True):
        assert [s.penalty for s in a.samples] == pytest.approx([s.penalty for s in b.samples])
