"""Compares campaigns with the first one, policy by policy and task by task.

Policies with the same name are compared. If two runs have one policy each, these are compared whatever their names.
A difference is the mean over the tasks that both runs have rated, each task counting once. Its 95 % interval is that
of paired differences (Student over tasks). If all tasks differ by the same amount, the sample says nothing about the
spread. The interval is then as wide as Wilson's interval for tasks that differ otherwise, of which none was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from megaflow_hpc.monitor.evaluation import mean_interval, wilson
from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.series import significant


class Difference(msgspec.Struct, kw_only=True):
    """Mean rewards of one policy compared with those of the first run, over the tasks that both have rated."""

    run: str
    policy: str
    against_run: str
    against_policy: str
    tasks: int
    """Number of tasks that both have rated; 0 if there is nothing to compare."""
    tasks_only_here: int = 0
    tasks_only_there: int = 0
    mean: float | None = None
    """Mean reward of this run over those tasks."""
    against_mean: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    better: int = 0
    """Tasks whose mean reward is higher in this run."""
    worse: int = 0
    changed: list[str] = []
    """The tasks that changed most, best first: ``task +1``."""


CHANGED = 12


def labels_of(runs: Sequence[RunFigures]) -> list[str]:
    """Returns a short name for each run; no two are equal."""
    names = [run.campaign or run.run for run in runs]
    if len(set(names)) == len(names):
        return names
    names = [run.run for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def compare(runs: Sequence[RunFigures]) -> list[Difference]:
    """Returns the differences of every run from the first."""
    labels = labels_of(runs)
    found = []
    for run, label in list(zip(runs, labels, strict=True))[1:]:
        theirs = {policy.policy for policy in runs[0].policies}
        for policy in run.policies:
            other = policy.policy
            if other not in theirs and len(theirs) == len(run.policies) == 1:
                (other,) = theirs
            if other in theirs:
                here, there = _means(run, policy.policy), _means(runs[0], other)
                found.append(_difference(label, policy.policy, labels[0], other, here, there))
    return found


def _means(run: RunFigures, policy: str) -> dict[str, float]:
    return {task.task: task.mean for task in run.tasks if task.policy == policy and task.mean is not None}


def _difference(
    run: str, policy: str, against: str, other: str, here: Mapping[str, float], there: Mapping[str, float]
) -> Difference:
    both = sorted(here.keys() & there.keys())
    found = Difference(
        run=run,
        policy=policy,
        against_run=against,
        against_policy=other,
        tasks=len(both),
        tasks_only_here=len(here.keys() - there.keys()),
        tasks_only_there=len(there.keys() - here.keys()),
    )
    if not both:
        return found
    by_task = {task: here[task] - there[task] for task in both}
    differences = list(by_task.values())
    mean = sum(differences) / len(differences)
    low, high = paired_interval(differences)
    found.mean = significant(sum(here[task] for task in both) / len(both))
    found.against_mean = significant(sum(there[task] for task in both) / len(both))
    found.difference, found.low, found.high = (round(value, 6) for value in (mean, low, high))
    found.better = sum(d > 0 for d in differences)
    found.worse = sum(d < 0 for d in differences)
    most = sorted((task for task in both if by_task[task]), key=lambda task: -abs(by_task[task]))[:CHANGED]
    found.changed = [f"{task} {by_task[task]:+.3g}" for task in sorted(most, key=lambda task: -by_task[task])]
    return found


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of at least one paired difference, as the module describes it."""
    known = mean_interval(differences)
    if known is not None:
        return known
    unseen = wilson(0.0, len(differences))[1]
    return differences[0] - unseen, differences[0] + unseen
