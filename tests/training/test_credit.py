"""Credit for turns: equal in expectation to one number for the rollout, with less variance, so it takes fewer steps.

The chain has independent turns. In each, one action is right and earns a reward for that turn. The exact gradient is
known, and for two turns every outcome of a group can be listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import pytest
from numpy.typing import NDArray

from megaflow_hpc.training.algorithms.samples import Sample, SampleGroup, TurnTokens
from megaflow_hpc.training.recipes import anchor_groups, returns_to_go
from tests.support.groups import group, sample

Advantages = Callable[[SampleGroup], NDArray[np.float64]]
"""A group → (rollouts, turns)."""


def one_number(own: SampleGroup) -> NDArray[np.float64]:
    totals = np.array([sum(sample.turn_rewards) for sample in own.samples])
    return np.repeat((totals - totals.mean())[:, None], len(own.samples[0].turns), axis=1)


def to_go(discount: float) -> Advantages:
    return lambda own: np.array(list(returns_to_go([own], discount).values()))


def by_state(own: SampleGroup) -> NDArray[np.float64]:
    """Each turn is compared with the same turn of the others, and with nothing else."""
    whole = np.array(list(anchor_groups([own], discount=0.0, weight=1.0).values()))
    return np.asarray(whole - one_number(own))


def rolled(rights: Sequence[Sequence[bool]]) -> SampleGroup:
    """Return a group, given for each rollout and turn whether the action was right."""

    def one(index: int, turns: Sequence[bool]) -> Sample:
        spans = tuple(TurnTokens(n, 0, 2 * n + 1, 2 * n + 2, state=f"turn {n}") for n in range(len(turns)))
        rewards = {f"turn.{n}": float(right) for n, right in enumerate(turns)}
        return sample("t/p", index, 0.0, turns=spans, rewards=rewards, tokens=len(turns))

    return group([]).only(tuple(one(index, turns) for index, turns in enumerate(rights)))


@pytest.mark.parametrize(
    ("advantages", "variances"),
    [
        # A group of two rollouts, each action right with probability 1/2. The gradient of turn t is the mean of
        # A (right − 1/2) = (difference of the returns) (difference of right) / 4. With d = ±1 or 0 (half the time) the
        # difference in turn t and e that in the other turn, one number gives (d + e) d / 4:
        # mean E d² / 4 = 1/8, second moment (E d⁴ + E e² E d²) / 16 = (1/2 + 1/4) / 16, variance 3/64 − 1/64.
        (one_number, (1 / 32, 1 / 32)),
        # The last turn's return has no e: d² / 4, second moment (1/2) / 16, variance 1/32 − 1/64.
        (to_go(1.0), (1 / 32, 1 / 64)),
        (to_go(0.0), (1 / 64, 1 / 64)),
        (by_state, (1 / 64, 1 / 64)),
    ],
)
def test_credit_for_turns_has_no_bias_and_less_variance(advantages: Advantages, variances: tuple[float, float]) -> None:
    gradients = []
    for outcome in itertools.product((False, True), repeat=4):
        rights = np.reshape(outcome, (2, 2))
        gradients.append(np.mean(advantages(rolled(rights.tolist())) * (rights - 0.5), axis=0))
    # The exact gradient is p (1 − p) = 1/4; comparing within a group of n shrinks it by (n − 1) / n.
    assert np.mean(gradients, axis=0) == pytest.approx([1 / 8, 1 / 8])
    assert np.var(gradients, axis=0) == pytest.approx(list(variances))


def steps_to(goal: float, advantages: Advantages, seed: int, turns: int = 32, actions: int = 4) -> int:
    """Return the number of updates until right actions have this mean probability."""
    random = np.random.default_rng(seed)
    logits = np.zeros((turns, actions))
    for step in range(1000):
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        if chances[:, 0].mean() >= goal:
            return step
        taken = (random.random((4, turns, 1)) > chances.cumsum(axis=1)[None, :, :-1]).sum(axis=2)
        values = advantages(rolled((taken == 0).tolist()))
        logits += np.mean(values[:, :, None] * (np.eye(actions)[taken] - chances), axis=0)
    return 1000


def test_a_long_task_is_learned_in_fewer_steps_with_credit_for_turns() -> None:
    plain = [steps_to(0.8, one_number, seed) for seed in range(5)]
    turns = [steps_to(0.8, to_go(0.0), seed) for seed in range(5)]
    print(f"steps to 0.8: one number {plain}, credit for turns {turns}")
    assert median(turns) <= 0.6 * median(plain)
