"""Compares runs, policies, agents and the roles of a team, task by task.

An *arm* is a run, policy, agent and role. Arms that differ only along one axis are compared with the first of them::

    compare([figures_of("runs/old"), figures_of("runs/new")])        # runs, and the policies and agents within each
    compare([figures_of("runs/new")], "agent", against="terminus-2")

The other axes are held fixed if they have several values. Two runs with a single policy each are therefore compared
even if the names of their policies differ.

A difference is the mean over the tasks rated in both arms, and each task counts once. Its 95 % interval is computed
from paired differences (Student's t over tasks). If all tasks differ by the same amount, the sample contains no
information about the spread. The interval then uses Wilson's upper bound for the proportion of an event that was never
observed.

The p-value comes from the two-sided sign-flip permutation test (Fisher). It is the probability of a mean at least as
large if the sign of each task's difference were random. It assumes nothing about the distribution of rewards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.monitor.evaluation import mean_interval, wilson
from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.series import significant

Axis = Literal["run", "policy", "agent", "role"]
AXES: tuple[Axis, ...] = get_args(Axis)

MAX_CHANGED = 12
EXACT_TASKS = 14
"""Maximum number of changed tasks for which the sign-flip test tries all combinations of signs."""
FLIPS = 20_000
"""Number of random combinations of signs that the sign-flip test tries if there are more tasks."""


class Difference(msgspec.Struct, kw_only=True):
    """Difference between the mean rewards of two arms, over the tasks rated in both."""

    axis: Axis
    name: str
    """Value of the axis: the label of a run, or the name of a policy, agent or role."""
    against: str
    """Value of the axis in the arm with which the other is compared."""
    where: dict[Axis, str] = {}
    """Values of the other axes, the same in both arms."""
    tasks: int
    """Number of tasks rated in both arms. 0 if there is nothing to compare."""
    tasks_only_here: int = 0
    tasks_only_there: int = 0
    mean: float | None = None
    """Mean reward over the common tasks."""
    against_mean: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Two-sided p-value of the sign-flip test, not corrected for the number of comparisons."""
    better: int = 0
    """Number of common tasks with a higher mean reward than ``against``."""
    worse: int = 0
    changed: list[str] = []
    """The tasks whose rewards changed most, such as ``task +1``. Improvements come first."""

    @property
    def label(self) -> str:
        """Name of the arm, followed by the fixed values of other axes in brackets."""
        return f"{self.name} ({', '.join(self.where.values())})" if self.where else self.name


class Matrix(msgspec.Struct, kw_only=True):
    """Mean reward of every task in every arm. Tasks that differ most come first."""

    arms: list[str]
    tasks: list[str]
    means: list[list[float | None]]
    """For each task, the mean reward in each arm. ``None`` if no sample has a reward."""


class _Arm(NamedTuple):
    """Values of the axes. ``role`` is empty for the reward of the whole rollout."""

    run: str
    policy: str
    agent: str
    role: str


def labels_of(runs: Sequence[RunFigures]) -> list[str]:
    """Returns a short unique label for each run."""
    names = [run.campaign or run.run for run in runs]
    if len(set(names)) == len(names):
        return names
    names = [run.run for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def compare(runs: Sequence[RunFigures], by: Axis | None = None, against: str | None = None) -> list[Difference]:
    """Compares arms along one axis, or along each axis with several values.

    Args:
        runs: Figures of at least one run.
        by: The axis. Default: all.
        against: Baseline value of the axis. Default: the first run, and the first policy, agent or role by name.

    Raises:
        ConfigError: ``against`` is not a value of the axis.
    """
    rewards = _rewards_of(runs)
    bases: dict[Axis, list[str]] = {}
    for axis in AXES:
        values = (_value(arm, axis) for arm in rewards if _on(arm, axis))
        bases[axis] = list(dict.fromkeys(values))
    axes = [axis for axis in AXES if by in (None, axis) and bases[axis]]
    if against is not None:
        there = "; ".join(f"{axis}: {', '.join(bases[axis])}" for axis in axes)
        axes = [axis for axis in axes if against in bases[axis]]
        if not axes:
            raise ConfigError(f"--against {against}: expected one of {there or 'no value'}")
    seen = set()
    differences = []
    for axis in axes:
        base = bases[axis][0] if against is None else against
        for where, arm, other in _pairs([arm for arm in rewards if _on(arm, axis)], axis, base):
            if (arm, other) not in seen:  # with one agent per run, comparing runs already compares agents
                seen.add((arm, other))
                pair = rewards[arm], rewards[other]
                differences.append(_difference(axis, _value(arm, axis), _value(other, axis), where, *pair))
    return differences


def matrix_of(runs: Sequence[RunFigures]) -> Matrix:
    """Returns the mean reward of every task in every arm, excluding rewards of single roles."""
    rewards = {arm: means for arm, means in _rewards_of(runs).items() if not arm.role}
    varying = _varying(list(rewards), AXES[:3]) or ["policy"]
    names = sorted({task for means in rewards.values() for task in means})
    tasks = {task: [means.get(task) for means in rewards.values()] for task in names}

    def distance(task: str) -> float:
        means = [mean for mean in tasks[task] if mean is not None]
        return max(means) - min(means) if means else -1.0

    order = sorted(tasks, key=lambda task: -distance(task))
    return Matrix(
        arms=[" · ".join(_value(arm, axis) for axis in varying) for arm in rewards],
        tasks=order,
        means=[tasks[task] for task in order],
    )


def _value(arm: _Arm, axis: Axis) -> str:
    value: str = getattr(arm, axis)
    return value


def _varying(arms: Sequence[_Arm], axes: Sequence[Axis]) -> list[Axis]:
    """Returns the axes on which arms differ."""
    return [axis for axis in axes if len({_value(arm, axis) for arm in arms}) > 1]


def _on(arm: _Arm, axis: Axis) -> bool:
    """Returns whether an arm takes part in comparisons along an axis."""
    return bool(arm.role) == (axis == "role")


def _rewards_of(runs: Sequence[RunFigures]) -> dict[_Arm, dict[str, float]]:
    """Returns the mean reward of each task, by arm and task."""
    return {
        _Arm(label, arm.policy, arm.agent, arm.role): arm.rewards
        for label, run in zip(labels_of(runs), runs, strict=True)
        for arm in run.arms
    }


def _pairs(arms: Sequence[_Arm], axis: Axis, base: str) -> Iterator[tuple[dict[Axis, str], _Arm, _Arm]]:
    """Yields the pairs of arms to compare, as (fixed values of the other axes, arm, arm with the value ``base``)."""
    by_value: dict[str, list[_Arm]] = {}
    for arm in arms:
        by_value.setdefault(_value(arm, axis), []).append(arm)
    vary = {other for same in by_value.values() for other in _varying(same, AXES)}
    fixed = [other for other in AXES if other in vary]

    def place(arm: _Arm) -> tuple[str, ...]:
        return tuple(_value(arm, other) for other in fixed)

    against = {place(arm): arm for arm in by_value.get(base, ())}
    for arm in arms:
        where = place(arm)
        if _value(arm, axis) != base and where in against:
            yield dict(zip(fixed, where, strict=True)), arm, against[where]


def _difference(
    axis: Axis,
    name: str,
    against: str,
    where: dict[Axis, str],
    rewards: Mapping[str, float],
    against_rewards: Mapping[str, float],
) -> Difference:
    both = sorted(rewards.keys() & against_rewards.keys())
    result = Difference(
        axis=axis,
        name=name,
        against=against,
        where=where,
        tasks=len(both),
        tasks_only_here=len(rewards.keys() - against_rewards.keys()),
        tasks_only_there=len(against_rewards.keys() - rewards.keys()),
    )
    if not both:
        return result
    # Rounded, because equal differences of means may differ in their last bits.
    by_task = {task: significant(rewards[task] - against_rewards[task]) for task in both}
    low, high = paired_interval(list(by_task.values()))
    result.mean = significant(sum(rewards[task] for task in both) / len(both))
    result.against_mean = significant(sum(against_rewards[task] for task in both) / len(both))
    result.difference = round(sum(by_task.values()) / len(both), 6)
    result.low = round(low, 6)
    result.high = round(high, 6)
    result.p = significant(sign_flip_test(list(by_task.values())))
    changed = [task for task in both if by_task[task]]
    result.better = sum(by_task[task] > 0 for task in changed)
    result.worse = len(changed) - result.better
    most = sorted(changed, key=lambda task: -abs(by_task[task]))[:MAX_CHANGED]
    result.changed = [f"{task} {by_task[task]:+.3g}" for task in sorted(most, key=lambda task: -by_task[task])]
    return result


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of paired differences, of which there is at least one."""
    interval = mean_interval(differences)
    if interval is not None:
        return interval
    _, unseen = wilson(0.0, len(differences))
    return differences[0] - unseen, differences[0] + unseen


def sign_flip_test(differences: Sequence[float]) -> float:
    """Returns the two-sided p-value of the sign-flip permutation test.

    Exact for at most :data:`EXACT_TASKS` differences other than 0. Otherwise estimated from :data:`FLIPS` random
    combinations of signs, with a fixed seed.
    """
    changed = np.array([value for value in differences if value], np.float64)
    if not len(changed):
        return 1.0
    observed = abs(float(changed.sum())) * (1 - 1e-9)  # sums differ in their last bits
    if len(changed) <= EXACT_TASKS:
        bits = np.arange(2 ** len(changed))[:, None] >> np.arange(len(changed)) & 1
        return float((np.abs((1 - 2 * bits) @ changed) >= observed).mean())
    random = np.random.default_rng(0)
    as_large = 0
    for _ in range(FLIPS // 100):
        flips = np.unpackbits(random.integers(0, 256, (100, -(-len(changed) // 8)), np.uint8), axis=1)
        sums = changed.sum() - 2 * (flips[:, : len(changed)].astype(np.float64) @ changed)
        as_large += int((np.abs(sums) >= observed).sum())
    return (1 + as_large) / (1 + FLIPS)
