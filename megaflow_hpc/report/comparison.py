"""Compares campaigns with the first one, policy by policy and task by task.

Policies are matched by name. If two runs have a single policy each, these are compared even if the names differ.

A difference is the mean over the tasks rated in both runs, and each task counts once. Its 95 % interval is that of
paired differences (Student's t over tasks). If all tasks differ by the same amount, the sample contains no
information about the spread. The interval then uses Wilson's upper bound for the proportion of an event that was
never observed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megaflow_hpc.monitor.evaluation import mean_interval, wilson
from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.series import significant


class Difference(msgspec.Struct, kw_only=True):
    """Difference of a policy's mean reward from the first run, over the tasks rated in both runs."""

    run: str
    policy: str
    against_run: str
    against_policy: str
    tasks: int
    """Number of tasks rated in both runs. 0 if there is nothing to compare."""
    tasks_only_here: int = 0
    tasks_only_there: int = 0
    mean: float | None = None
    """Mean reward of this run over the common tasks."""
    against_mean: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    better: int = 0
    """Number of common tasks with a higher mean reward in this run."""
    worse: int = 0
    changed: list[str] = []
    """The tasks that changed most, such as ``task +1``, with improvements first."""


MAX_CHANGED = 12


def labels_of(runs: Sequence[RunFigures]) -> list[str]:
    """Returns a short unique label for each run."""
    names = [run.campaign or run.run for run in runs]
    if len(set(names)) == len(names):
        return names
    names = [run.run for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def compare(runs: Sequence[RunFigures]) -> list[Difference]:
    """Compares every other run with the first."""
    first, *others = zip(labels_of(runs), runs, strict=True)
    differences = []
    for label, run in others:
        names = {policy.policy for policy in first[1].policies}
        for policy in run.policies:
            against = policy.policy
            if against not in names and len(names) == len(run.policies) == 1:
                (against,) = names
            if against in names:
                differences.append(_difference((label, run), policy.policy, first, against))
    return differences


def _means(run: RunFigures, policy: str) -> dict[str, float]:
    return {task.task: task.mean for task in run.tasks if task.policy == policy and task.mean is not None}


def _difference(named: tuple[str, RunFigures], policy: str, first: tuple[str, RunFigures], against: str) -> Difference:
    rewards = _means(named[1], policy)
    first_rewards = _means(first[1], against)
    both = sorted(rewards.keys() & first_rewards.keys())
    result = Difference(
        run=named[0],
        policy=policy,
        against_run=first[0],
        against_policy=against,
        tasks=len(both),
        tasks_only_here=len(rewards.keys() - first_rewards.keys()),
        tasks_only_there=len(first_rewards.keys() - rewards.keys()),
    )
    if not both:
        return result
    by_task = {task: rewards[task] - first_rewards[task] for task in both}
    low, high = paired_interval(list(by_task.values()))
    result.mean = significant(sum(rewards[task] for task in both) / len(both))
    result.against_mean = significant(sum(first_rewards[task] for task in both) / len(both))
    result.difference = round(sum(by_task.values()) / len(both), 6)
    result.low = round(low, 6)
    result.high = round(high, 6)
    changed = [task for task in both if by_task[task]]
    result.better = sum(by_task[task] > 0 for task in changed)
    result.worse = len(changed) - result.better
    most = sorted(changed, key=lambda task: -abs(by_task[task]))[:MAX_CHANGED]
    result.changed = [f"{task} {by_task[task]:+.3g}" for task in sorted(most, key=lambda task: -by_task[task])]
    return result


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of at least one paired difference. The module docstring describes the
    method."""
    interval = mean_interval(differences)
    if interval is not None:
        return interval
    _, unseen = wilson(0.0, len(differences))
    return differences[0] - unseen, differences[0] + unseen
