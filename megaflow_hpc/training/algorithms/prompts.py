"""Chooses the tasks to request next, and updates their statistics from settled groups.

=================  =================================================================================================
``uniform``        chooses tasks in random order, each once before any is repeated: MegaFlow, appendix D.1 (no
                   curriculum). Without other options, it equals AstraFlow's ``accept_all``
``curriculum``     draws tasks without replacement with weight p (1 - p) + 0.05, where p is the moving average of
                   the task's pass rate, initially 0.5. p (1 - p) is the learnability of Foster et al. 2025, arXiv
                   2502.12272
``greso``          requests a task with probability p^z, where z is the number of consecutive groups with equal
                   rewards. There is one p for tasks that always pass and one for tasks that never pass. Each step
                   lowers p if the share of such groups in the step exceeds a target, and raises it otherwise: Zheng
                   et al. 2025, arXiv 2506.02177, section 4, with the floors, targets and warm-up of AstraFlow's
                   ``GRESOCurator``
a function         chooses among the eligible tasks: :meth:`Prompts._chosen`
``pass_rate``      requests a task while the pass rate over all its samples is within a range: MegaFlow, appendix D.1
=================  =================================================================================================

The state is a small JSON object with four numbers for each task that has verified samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megaflow_hpc.config.sections import Method
from megaflow_hpc.config.training import PromptsConfig
from megaflow_hpc.training.algorithms.choice import MIN_SAMPLES, inside
from megaflow_hpc.training.algorithms.rewards import own_rewards
from megaflow_hpc.training.algorithms.samples import RoleRewards, SampleGroup
from megaflow_hpc.training.methods import call, wrong

LATEST_WEIGHT = 0.5
"""Weight of the newest group in ``curriculum``'s moving average of the pass rate. High, because a model changes within
a few rounds."""
MIN_TASK_WEIGHT = 0.05
"""Minimum sampling weight in ``curriculum``, so that tasks that always or never pass are still requested."""
MIN_BASE, MAX_BASE = 0.01, 0.99
"""Bounds of GRESO's two base probabilities (AstraFlow: ``p_min``, ``p_max``)."""
FIRST_BASE = 0.5
"""Initial value of GRESO's two base probabilities."""
BASE_STEP = 0.01
"""Change of a GRESO base probability per training step."""
TARGET_EASY, TARGET_HARD = 0.083, 0.167
"""GRESO's target fractions of groups that always pass and of groups that never pass."""
FLOOR_EASY, FLOOR_HARD = 0.1, 0.4
"""GRESO's minimum request probabilities of tasks that always pass and of tasks that never pass."""


class TaskStatistics(NamedTuple):
    passed: int = 0
    """Number of passed samples in all groups of the task."""
    tried: int = 0
    """Number of verified samples in all groups of the task."""
    recent: float = 0.5
    """Moving average of the task's pass rate, for ``curriculum``."""
    streak: int = 0
    """Number of consecutive groups in which every sample got the same reward. Negative if that reward is a failure."""


class Prompts:
    """Chooses which tasks to request.

    Args:
        config: The section ``training.prompts``.
        pass_threshold: Minimum reward of a passed rollout.
        roles: The policy's roles in its team. If given, the roles' rewards count instead of the rollout's.
    """

    def __init__(self, config: PromptsConfig, pass_threshold: float = 1.0, roles: RoleRewards | None = None) -> None:
        self._config = config
        self._pass_threshold = pass_threshold
        self._roles = roles

    def choose(
        self, tasks: Sequence[str], count: int, state: Mapping[str, Any], random: np.random.Generator
    ) -> tuple[list[str], dict[str, Any]]:
        """Chooses the next tasks to request.

        Args:
            tasks: all task ids, in any order.
            count: number of tasks to choose. Tasks are repeated if too few are eligible or GRESO skips some.
            state: the state returned by the previous call and updated by :meth:`learn`. Initially empty.
            random: random generator for all choices.

        Returns:
            The chosen ids and the new state. There are fewer than ``count`` ids only if no task is eligible.
        """
        statistics = _statistics(state)
        eligible = [task for task in sorted(set(tasks)) if self._eligible(statistics.get(task))]
        if not eligible or count <= 0:
            return [], dict(state)
        if isinstance(self._config.order, Method):
            return self._chosen(self._config.order, eligible, statistics, count, random), dict(state)
        if self._config.order == "curriculum":
            return self._drawn(eligible, statistics, count, random), dict(state)
        return self._in_turn(sorted(set(tasks)), set(eligible), statistics, count, state, random)

    def _chosen(
        self,
        method: Method,
        eligible: list[str],
        statistics: Mapping[str, TaskStatistics],
        count: int,
        random: np.random.Generator,
    ) -> list[str]:
        """Calls a user's function to choose tasks.

        The function is called as ``function(tasks, count, statistics, random, **args)`` with the eligible tasks, the
        number of tasks to choose, the :class:`TaskStatistics` of tasks that were tried, and a seeded random generator.
        It returns a list of ``count`` tasks. Each occurrence of a task requests one group.

        Raises:
            ConfigError: the function raised an exception, or returned anything else.
        """
        returned = call(method, list(eligible), count, dict(statistics), random)
        chosen = list(returned) if isinstance(returned, list | tuple) else None
        if chosen is None or len(chosen) != count or not set(chosen) <= set(eligible):
            raise wrong(method, f"returned {returned!r:.200}", f"a list of {count} of the tasks passed in")
        return chosen

    def _eligible(self, statistics: TaskStatistics | None) -> bool:
        rates = self._config.pass_rate
        if rates and statistics and statistics.tried:
            return inside(statistics.passed / statistics.tried, rates)
        return True

    def _in_turn(
        self,
        tasks: list[str],
        eligible: set[str],
        statistics: Mapping[str, TaskStatistics],
        count: int,
        state: Mapping[str, Any],
        random: np.random.Generator,
    ) -> tuple[list[str], dict[str, Any]]:
        """Returns the next tasks of a cycle through all tasks. Each pass shuffles them anew. Skips ineligible tasks."""
        chosen: list[str] = []
        seed, position, of, late = state.get("turn", (0, 0, 0, []))
        while len(chosen) < count:
            if of != len(tasks) or position >= of:  # a new pass; tasks already chosen now come last
                seed, position, of, late = int(random.integers(2**32)), 0, len(tasks), sorted(set(chosen))
            order = [tasks[i] for i in np.random.default_rng(seed).permutation(of)]
            order.sort(key=set(late).__contains__)  # stable: the late tasks come last
            while position < of and len(chosen) < count:
                task = order[position]
                position += 1
                if task in eligible and self._wanted(statistics.get(task), state, random):
                    chosen.append(task)
        return chosen, {**state, "turn": [seed, position, of, late]}

    def _drawn(
        self,
        eligible: list[str],
        statistics: Mapping[str, TaskStatistics],
        count: int,
        random: np.random.Generator,
    ) -> list[str]:
        """Draws tasks by weight without replacement. Once it has drawn every eligible task, it starts over."""
        rates = np.array([statistics.get(task, TaskStatistics()).recent for task in eligible])
        weights = rates * (1 - rates) + MIN_TASK_WEIGHT
        chosen: list[str] = []
        while len(chosen) < count:
            some = min(count - len(chosen), len(eligible))
            drawn = random.choice(len(eligible), size=some, replace=False, p=weights / weights.sum())
            chosen += [eligible[i] for i in drawn]
        return chosen

    def _wanted(self, statistics: TaskStatistics | None, state: Mapping[str, Any], random: np.random.Generator) -> bool:
        chance = self._chance(statistics, state)
        return chance >= 1 or bool(random.random() < chance)

    def _chance(self, statistics: TaskStatistics | None, state: Mapping[str, Any]) -> float:
        """Returns the probability of requesting the task, which is 1 without GRESO."""
        if self._config.order != "greso" or not statistics or not statistics.streak:
            return 1.0
        name, floor = ("easy", FLOOR_EASY) if statistics.streak > 0 else ("hard", FLOOR_HARD)
        base = state.get(name, FIRST_BASE)
        return float(max(base ** abs(statistics.streak), floor))

    def learn(self, state: Mapping[str, Any], groups: Iterable[SampleGroup]) -> dict[str, Any]:
        """Updates the statistics from settled groups. Call it once per step, because GRESO counts steps.

        Args:
            state: the state returned by the previous call. Initially empty.
            groups: all groups settled since the previous call, including dropped groups.

        Returns:
            The new state, without the keys that only :meth:`choose` uses.
        """
        statistics = _statistics(state)
        came_again = bool(state.get("again"))
        easy = hard = total = 0
        for group in sorted(groups, key=lambda group: (group.time_ns, group.id)):
            verified = [own_rewards(sample, self._roles) for sample in group.samples if sample.verified]
            rewards = [own for own in verified if own]
            if not rewards:
                continue
            came_again = came_again or group.task in statistics
            updated = self._updated(statistics.get(group.task), rewards)
            statistics[group.task] = updated
            if len(rewards) >= MIN_SAMPLES:
                total, easy, hard = total + 1, easy + (updated.streak > 0), hard + (updated.streak < 0)
        learned: dict[str, Any] = {"tasks": {task: list(row) for task, row in statistics.items()}, "again": came_again}
        if self._config.order == "greso":
            easy_base, hard_base = state.get("easy", FIRST_BASE), state.get("hard", FIRST_BASE)
            if state.get("again") and total:  # GRESO's warm-up is over once a task repeats
                easy_base = _steered(easy_base, easy / total, TARGET_EASY)
                hard_base = _steered(hard_base, hard / total, TARGET_HARD)
            learned |= {"easy": easy_base, "hard": hard_base}
        return learned

    def _updated(self, earlier: TaskStatistics | None, rewards: Sequence[tuple[float, ...]]) -> TaskStatistics:
        passed = sum(min(own) >= self._pass_threshold for own in rewards)
        rate = passed / len(rewards)
        before = earlier or TaskStatistics(recent=rate)
        streak = before.streak
        if len(rewards) >= MIN_SAMPLES:
            if len(set(rewards)) > 1:
                streak = 0
            elif passed:
                streak = max(streak, 0) + 1
            else:
                streak = min(streak, 0) - 1
        return TaskStatistics(
            before.passed + passed,
            before.tried + len(rewards),
            (1 - LATEST_WEIGHT) * before.recent + LATEST_WEIGHT * rate,
            streak,
        )


def _steered(base: float, share: float, target: float) -> float:
    return max(MIN_BASE, base - BASE_STEP) if share >= target else min(MAX_BASE, base + BASE_STEP)


def _statistics(state: Mapping[str, Any]) -> dict[str, TaskStatistics]:
    return {task: TaskStatistics(*row) for task, row in state.get("tasks", {}).items()}
