"""Advantages of samples, compared with values computed by hand, and properties that hold for all inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.algorithms import advantages
from megaflow_hpc.training.algorithms.samples import SampleGroup
from tests.support.groups import group, groups, sample


def valued(groups: list[SampleGroup], **advantage: Any) -> dict[str, float]:
    found = advantages(PolicyTraining.model_validate({"advantage": advantage}), groups)
    return {id: value for id, (value, _) in found.items()}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("grpo", [1.5, -0.5, -0.5, -0.5]),  # standard deviation with n - 1: sqrt(0.75 / 3) = 0.5
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),  # 1 - 0; 0 - 1/3
        ("median", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_each_kind(kind: str, expected: list[float]) -> None:
    assert list(valued([group([1, 0, 0, 0])], kind=kind).values()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["dr_grpo", "grpo", "rloo", "median"])
def test_equal_rewards_have_no_advantage_at_all(kind: str) -> None:
    """A sum of three times 0.1, divided by 3, is not 0.1. The trainer leaves out exact zeros only."""
    assert set(valued([group([0.1, 0.1, 0.1]), group([0.7] * 7, "b/p")], kind=kind).values()) == {0.0}


def test_groups_are_compared_within_and_survivors_among_themselves() -> None:
    whole = SampleGroup("b/p", "b", (sample("b/p", 0, 1.0), sample("b/p", 1, math.nan), sample("b/p", 2, 0.0)))
    found = valued([group([4, 2], "a/p"), whole])
    assert found == {"a/p/0": 1.0, "a/p/1": -1.0, "b/p/0": 0.5, "b/p/2": -0.5}


def test_penalties_count_and_weights_are_handed_on() -> None:
    there = SampleGroup("a/p", "a", (sample("a/p", 0, 1.0), sample("a/p", 1, 1.0, penalty=-0.5, weight=0.0)))
    assert advantages(PolicyTraining(), [there]) == {"a/p/0": (0.25, 1.0), "a/p/1": (-0.25, 0.0)}


def two_rewards() -> SampleGroup:
    """Tests differ by 2, style by 1. GDPO avoids that the sums 0, 1, 2, 3 mix the two."""
    rows = [(0.0, 0.0), (0.0, 1.0), (2.0, 0.0), (2.0, 1.0)]
    return SampleGroup(
        "a/p",
        "a",
        tuple(sample("a/p", i, t, rewards={"tests": t, "style": s}) for i, (t, s) in enumerate(rows)),
    )


def test_several_rewards_together_are_one_sum() -> None:
    found = valued([two_rewards()], kind="dr_grpo", rewards={"tests": 1.0, "style": 0.5})
    assert list(found.values()) == [-1.25, -0.75, 0.75, 1.25]


def test_several_rewards_apart_are_normalised_each_and_then_over_the_batch() -> None:
    """Each column becomes -a and a; the sum -3a/2, -a/2, a/2, 3a/2 has the deviation a sqrt(5) / 2."""
    found = valued([two_rewards()], kind="grpo", rewards={"tests": 1.0, "style": 0.5}, whiten="apart")
    assert list(found.values()) == pytest.approx([x / math.sqrt(5) for x in (-3, -1, 1, 3)], abs=1e-5)


def test_apart_a_penalty_is_one_more_reward() -> None:
    there = SampleGroup(
        "a/p",
        "a",
        (sample("a/p", 0, 1.0, rewards={"tests": 1.0}), sample("a/p", 1, 1.0, rewards={"tests": 1.0}, penalty=-0.5)),
    )
    found = valued([there], kind="dr_grpo", rewards={"tests": 1.0}, whiten="apart")
    assert list(found.values()) == pytest.approx([1.0, -1.0], abs=1e-5)


def test_whitening_counts_tokens() -> None:
    """Advantages 1 and -1 of 30 and 10 tokens: mean 0.5, deviation sqrt(0.75)."""
    there = SampleGroup("a/p", "a", (sample("a/p", 0, 2.0, tokens=30), sample("a/p", 1, 0.0, tokens=10)))
    found = valued([there], kind="dr_grpo", whiten=True)
    assert list(found.values()) == pytest.approx([0.5 / 0.75**0.5, -1.5 / 0.75**0.5], abs=1e-5)


def test_no_groups_have_no_advantages() -> None:
    assert valued([]) == {}
    assert valued([group([math.nan, math.nan])]) == {}


@pytest.mark.parametrize("reward", [math.inf, 1e300])
def test_a_reward_that_no_advantage_can_hold_is_an_error(reward: float) -> None:
    with pytest.raises(ConfigError, match="t/p/"):
        valued([group([0.0, reward])])


KINDS = st.sampled_from(["grpo", "dr_grpo", "rloo", "median"])


@settings(max_examples=60, deadline=None)
@given(groups(), KINDS, st.booleans())
def test_no_reward_that_is_missing_reaches_an_advantage(there: list[SampleGroup], kind: str, whiten: bool) -> None:
    found = valued(there, kind=kind, whiten=whiten)
    assert all(math.isfinite(value) for value in found.values())
    assert found.keys() == {s.id for g in there for s in g.samples if s.verified}


@settings(max_examples=60, deadline=None)
@given(groups(), KINDS, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_groups_and_samples_says_nothing(
    there: list[SampleGroup], kind: str, whiten: bool, shuffle: Any
) -> None:
    mixed = [g.only(tuple(shuffle.sample(g.samples, len(g.samples)))) for g in there]
    mixed = [SampleGroup(g.id, g.task, tuple(shuffle.sample(g.samples, len(g.samples)))) for g in mixed]
    shuffle.shuffle(mixed)
    one, other = (valued(handed, kind=kind, whiten=whiten) for handed in (there, mixed))
    assert one.keys() == other.keys()
    assert [other[id] for id in one] == pytest.approx(list(one.values()), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=6), KINDS, st.floats(-4, 4))
def test_what_all_samples_are_given_more_changes_nothing(rewards: list[float], kind: str, more: float) -> None:
    if kind == "grpo" and 0 < np.std(rewards) < 1e-2:
        return  # a spread that rounding could cause
    one, other = valued([group(rewards)], kind=kind), valued([group([r + more for r in rewards])], kind=kind)
    assert list(other.values()) == pytest.approx(list(one.values()), abs=1e-4)
