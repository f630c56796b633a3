"""Figures of an evaluation: pass@k, and intervals that agree with published ones."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.monitor.evaluation import evaluate, mean_interval, pass_at_k, share_interval, wilson


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_one_that_passed(
    n: int, data: st.DataObject
) -> None:
    passed, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    samples = [True] * passed + [False] * (n - passed)
    choices = list(combinations(samples, k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_what_cannot_be_estimated_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(samples, passed, k)


@pytest.mark.parametrize(
    ("passed", "trials", "low", "high"),
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3; then all of two, and none of fifteen.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (2, 2, 0.3424, 1.0),
        (0, 15, 0.0, 0.2039),
    ],
)
def test_shares_have_the_intervals_that_are_published(passed: int, trials: int, low: float, high: float) -> None:
    assert wilson(passed / trials, trials) == pytest.approx((low, high), abs=5e-5)
    found = evaluate({str(task): [float(task < passed)] for task in range(trials)})
    assert found is not None
    assert (found["passed"], found["samples"]) == (passed, trials)
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=5e-4)


def test_figures_are_made_by_task_and_their_interval_is_over_tasks() -> None:
    found = evaluate({"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0], "c": [0.0, None], "d": [None]})
    assert found is not None
    assert (found["tasks"], found["samples"], found["passed"], found["unrated"]) == (3, 7, 3, 2)
    assert found["mean"] == pytest.approx((0.25 + 1 + 0) / 3, abs=1e-4)
    low, high = wilson(5 / 12, 3)  # tasks differ so much that their samples say no more than one each
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=1e-4)
    assert found["pass_at"]["1"] == {"value": found["mean"], "low": found["low"], "high": found["high"], "tasks": 3}
    low, high = wilson(1.0, 1)
    assert found["pass_at"]["4"] == {"value": 1.0, "low": pytest.approx(low, abs=1e-4), "high": high, "tasks": 1}


def test_tasks_that_do_not_differ_count_by_their_samples_and_no_interval_is_closed() -> None:
    alike = evaluate({task: [1.0, 0.0, 1.0, 0.0] for task in "abc"})
    assert alike is not None
    assert (alike["low"], alike["high"]) == pytest.approx(wilson(0.5, 12), abs=1e-4)
    solved = evaluate({task: [1.0] * 8 for task in "abc"})
    assert solved is not None
    assert (solved["low"], solved["high"]) == pytest.approx(wilson(1.0, 3), abs=1e-4)


def test_rewards_beyond_0_and_1_have_students_interval_where_there_is_one() -> None:
    found = evaluate({"a": [-2.0], "b": [4.0]})
    assert found is not None
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((1.0, 1 - 3 * 12.706, 1 + 3 * 12.706))
    assert found["pass_at"]["1"]["low"] == pytest.approx(wilson(0.5, 2)[0], abs=1e-4)
    alone = evaluate({"a": [7.0]})
    assert alone is not None
    assert (alone["low"], alone["high"]) == (None, None)
    values = [float(v) for v in range(21)]  # with 20 degrees of freedom the quantile is 2.0860
    mean_error = math.sqrt(sum((v - 10) ** 2 for v in values) / 20 / 21)
    assert mean_interval(values) == pytest.approx((10 - 2.086 * mean_error, 10 + 2.086 * mean_error), abs=2e-3)


def test_the_threshold_says_what_passed_and_nothing_rated_is_nothing_said() -> None:
    assert evaluate({"a": [None]}) is None
    assert evaluate({"a": [math.inf, -math.inf, math.nan]}) is None
    found = evaluate({"a": [0.5, 0.4], "b": [0.5, 0.5]}, ks=[2], threshold=0.5)
    assert found is not None
    assert found["pass_at"] == {"2": {"value": 1.0, "low": pytest.approx(0.3424), "high": 1.0, "tasks": 2}}


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5), min_size=1, max_size=6))
def test_an_interval_lies_around_its_mean_and_within_what_is_possible(tasks: list[list[float]]) -> None:
    found = evaluate({str(number): given for number, given in enumerate(tasks)})
    assert found is not None
    for figure in (found, *found["pass_at"].values()):
        value = figure.get("mean", figure.get("value"))
        assert 0.0 <= figure["low"] <= value <= figure["high"] <= 1.0
        assert figure["high"] - figure["low"] > 0.2


@pytest.mark.parametrize("often", [0.5, 0.97])
def test_the_interval_holds_the_truth_about_nineteen_times_in_twenty(often: float) -> None:
    import random

    chance, held = random.Random(7), 0
    for _ in range(400):
        tasks = [chance.random() ** (1 / often - 1) for _ in range(60)]  # each task's own; their mean over all: often
        values = [sum(chance.random() < p for _ in range(4)) / 4 for p in tasks]
        low, high = share_interval(values, 240)
        held += low <= often <= high
    assert 0.91 <= held / 400 <= 0.98
