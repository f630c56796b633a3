"""Stragglers are told by what rollouts of their kind usually take."""

from __future__ import annotations

from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.stragglers import Stragglers
from megaflow_hpc.pod.scheduling.work import Work
from megaflow_hpc.types import Rollout


def test_the_longest_overdue_comes_first_and_what_runs_twice_not_at_all() -> None:
    estimates = Estimates()
    stragglers = Stragglers(estimates, at_least_s=5.0)
    running = [Work(Rollout(name, "p", 0, "a"), 0, 0) for name in ("old", "older", "young", "twice", "twice")]
    for name, since in (("old", 20.0), ("older", 10.0), ("young", 95.0), ("twice", 0.0)):
        stragglers.started(f"{name}/p/0", since)
    assert stragglers.overdue(running, 100.0) == [], "nothing is known of durations yet"
    for _ in range(50):
        estimates.observe("old", "p", 3.0)
    assert stragglers.overdue(running, 100.0) == ["older/p/0", "old/p/0"]
    assert stragglers.overdue(running, 22.0) == ["older/p/0"]
