"""Estimates: what has been seen little of leans on what is alike, and quantiles cover what they say."""

from __future__ import annotations

import math
import random

from megaflow_hpc.pod.scheduling.estimates import MAX_TASKS, Estimates


def test_nothing_is_expected_before_anything_has_ended() -> None:
    assert Estimates().expect("t", "p") is None


def test_a_new_task_is_guessed_from_its_policy_and_an_old_one_from_itself() -> None:
    estimates = Estimates()
    for n in range(50):
        estimates.observe(f"t{n % 10}", "fast", 10.0)
        estimates.observe(f"t{n % 10}", "slow", 1000.0)
    assert 9 < (estimates.expect("new", "fast") or 0) < 13
    assert 800 < (estimates.expect("new", "slow") or 0) < 1100
    for _ in range(20):
        estimates.observe("odd", "fast", 300.0)
    assert 200 < (estimates.expect("odd", "fast") or 0) < 310


def test_the_95_percent_quantile_covers_19_of_20_later_durations() -> None:
    draw = random.Random(3)
    estimates = Estimates()
    for _ in range(400):
        estimates.observe("t", "p", math.exp(draw.gauss(4.0, 0.7)))
    bound = estimates.expect("t", "p", 0.95) or 0.0
    inside = sum(math.exp(draw.gauss(4.0, 0.7)) <= bound for _ in range(4000)) / 4000
    assert 0.92 < inside < 0.975


def test_a_pod_that_runs_ever_new_tasks_forgets_those_it_saw_first() -> None:
    estimates = Estimates()
    for n in range(MAX_TASKS + 1):
        estimates.observe(f"t{n}", "p", 10.0)
    estimates.observe("late", "p", 300.0)
    assert (estimates.expect("late", "p") or 0) > 25
    assert estimates.expect("t0", "p") == estimates.expect("never", "p")
    assert len(estimates._tasks) == MAX_TASKS
