"""The dispatch benchmark: a real pod of empty rollouts, and campaigns in virtual time."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from megaflow_hpc.pod.scheduling.groups import GroupRules
from tests.bench import dispatch
from tests.bench.simulation import Shape, pareto, simulate


def measured(*words: str) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.set_defaults(peers=False)
    dispatch.add_arguments(parser)
    return {figure.name: figure.value for figure in dispatch.run(parser.parse_args(words), lambda text: None)}


def test_a_real_pod_hands_out_and_stores_every_empty_rollout() -> None:
    figures = measured("--rollouts", "600")
    assert all(value > 0 for value in figures.values())
    assert figures["journal bytes per empty rollout"] >= 500


def test_slots_are_busy_until_the_last_rollouts_start() -> None:
    durations = [min(900.0, seconds) for seconds in pareto(20_000, 1.5, seed=1)]
    outcome = simulate(Shape(durations, pods=16, slots=2000))
    assert outcome.rollouts == 20_000
    assert 1.0 <= outcome.ratio < 1.5
    assert outcome.busy > 0.98


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_in_one_pod_as_many_slots_as_rollouts_take_as_long_as_one(count: int) -> None:
    outcome = simulate(Shape([100.0] * count, pods=1, slots=count, dispatch_s=1e-4))
    assert 1.0 <= outcome.ratio < 1.05


def test_closing_groups_early_spares_a_campaign_its_hanging_rollouts() -> None:
    durations = [1000.0 if n % 10 == 9 else 10.0 for n in range(400)]
    shape = Shape(durations, pods=2, slots=40, samples=10)
    closed = simulate(replace(shape, rules=GroupRules(wanted={"p": 9})))
    assert closed.makespan_s < 200 < 1000 < simulate(shape).makespan_s
    assert closed.rollouts == 360, "of each group nine ended and the tenth was cancelled"


def test_groups_without_signal_cost_a_fraction_of_their_samples() -> None:
    shape = Shape([10.0] * 800, pods=2, slots=40, samples=20, rewards=[0.0] * 800)
    assert simulate(shape).rollouts == 800
    assert simulate(replace(shape, rules=GroupRules(signal_after=2))).rollouts < 400
