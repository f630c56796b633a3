from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.monitor.evaluation import evaluate, mean_of, pass_at_k


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


def test_figures_are_made_by_task_and_their_interval_is_over_tasks() -> None:
    found = evaluate({"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0], "c": [0.0, None], "d": [None]})
    assert found is not None
    assert (found["tasks"], found["samples"], found["unrated"]) == (3, 7, 2)
    assert found["mean"] == pytest.approx((0.25 + 1 + 0) / 3, abs=1e-4)
    each = [0.25, 1.0, 0.0]
    mean = sum(each) / 3
    error = math.sqrt(sum((x - mean) ** 2 for x in each) / 2 / 3)
    assert found["ci95"] == pytest.approx(1.96 * error, abs=1e-4)
    assert found["pass_at"]["1"] == {"value": found["mean"], "ci95": found["ci95"], "tasks": 3}
    assert found["pass_at"]["4"] == {"value": 1.0, "ci95": None, "tasks": 1}


def test_the_threshold_says_what_passed_and_nothing_rated_is_nothing_said() -> None:
    assert evaluate({"a": [None]}) is None
    found = evaluate({"a": [0.5, 0.4], "b": [0.5, 0.5]}, ks=[2], threshold=0.5)
    assert found is not None
    assert found["pass_at"] == {"2": {"value": 1.0, "ci95": 0.0, "tasks": 2}}


def test_the_interval_holds_the_truth_about_nineteen_times_in_twenty() -> None:
    import random

    chance, held = random.Random(7), 0
    for _ in range(400):
        tasks = [chance.random() for _ in range(60)]  # each task's own chance; their mean over all tasks is 0.5
        mean, half = mean_of([sum(chance.random() < p for _ in range(4)) / 4 for p in tasks])
        assert half is not None
        held += abs(mean - 0.5) <= half
    assert 0.91 <= held / 400 <= 0.98
