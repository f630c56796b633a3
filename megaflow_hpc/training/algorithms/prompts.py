"""Chooses the tasks that are asked for next, and learns about tasks from groups that are complete.

=================  =================================================================================================
``uniform``        in random order, each task once before any comes again: MegaFlow, appendix D.1 (no curriculum). With
                   nothing else it is AstraFlow's ``accept_all``
``curriculum``     drawn without replacement, with a weight of p (1 - p) + 0.05 by the task's moving pass rate p, a half
                   before it was tried; p (1 - p) is the learnability of Foster et al. 2025, arXiv 2502.12272
``filter_solved``  not while the moving average of the pass rate is this number or more: AstraFlow,
                   ``dataflow/prompt_curators.py``, ``FilterSolvedCurator``
``greso``          with the probability p^z, z being how many groups in a row had equal rewards, and p one number for
                   tasks that always pass and one for those that never do; each is lowered at a step in which more than
                   its target share of groups was so, else raised: Zheng et al. 2025, arXiv 2506.02177, section 4, with
                   the floors, targets and warm-up of ``GRESOCurator`` there
``pass_rate``      while the share that passed, of all its samples so far, is in a range: MegaFlow, appendix D.1
=================  =================================================================================================

A state is JSON, and small: five numbers for each task that was tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megaflow_hpc.config.data_algorithms import PromptsConfig
from megaflow_hpc.training.algorithms.filters import MIN_SAMPLES, inside
from megaflow_hpc.training.algorithms.rewards import reward
from megaflow_hpc.training.algorithms.samples import SampleGroup

RECENT = 0.5
"""Weight of the latest group in the pass rate that ``curriculum`` goes by: a model changes within a few rounds."""
EXPLORED = 0.05
"""Weight in ``curriculum`` of a task that always passes, or never: a fifth of 0.25 + 0.05, so that it is seen again."""
DECAY = 0.9
"""Weight of the average so far in the pass rate that ``filter_solved`` compares; the latest group has the rest."""
LOWEST, HIGHEST = 0.01, 0.99
"""Bounds of GRESO's two bases (AstraFlow: ``p_min``, ``p_max``)."""
FIRST_BASE = 0.5
"""Base of the probability at which a task without a signal is asked for, before it is steered."""
STEP = 0.01
"""Change of a base at each step of the trainer."""
TARGET_EASY, TARGET_HARD = 0.083, 0.167
"""Shares of always and never solved groups to which the bases are steered."""
FLOOR_EASY, FLOOR_HARD = 0.1, 0.4
"""Least probabilities of tasks that always pass, and that never do."""


class Known(NamedTuple):
    """What is known of one task."""

    passed: int = 0
    """Samples that passed, of all groups."""
    tried: int = 0
    """Samples that were verified."""
    average: float = 0.0
    """Of the pass rate, as ``filter_solved`` keeps it."""
    recent: float = 0.5
    """The same, as ``curriculum`` keeps it."""
    streak: int = 0
    """Groups in a row with equal rewards; negative where they did not pass."""


class Prompts:
    """Chooses tasks.

    Args:
        config: The section ``training.prompts``.
        pass_threshold: Reward from which a rollout has passed.
    """

    def __init__(self, config: PromptsConfig, pass_threshold: float = 1.0) -> None:
        self._config = config
        self._pass_threshold = pass_threshold

    def choose(
        self, tasks: Sequence[str], count: int, state: Mapping[str, Any], random: np.random.Generator
    ) -> tuple[list[str], dict[str, Any]]:
        """Chooses the next tasks to ask for.

        Args:
            tasks: all ids, in any order.
            count: how many to choose; a task comes more than once where too few others may come, or are passed over.
            state: what the last call returned, with what :meth:`learn` has returned since; empty at first.
            random: from which every choice is drawn.

        Returns:
            Ids, fewer than ``count`` only where no task is left that may be asked for; and the state.
        """
        known = {task: Known(*row) for task, row in state.get("tasks", {}).items()}
        eligible = [task for task in sorted(set(tasks)) if self._eligible(known.get(task))]
        if not eligible or count <= 0:
            return [], dict(state)
        if self._config.order == "curriculum":
            return self._drawn(eligible, known, count, state, random), dict(state)
        return self._in_turn(sorted(set(tasks)), set(eligible), known, count, state, random)

    def _eligible(self, known: Known | None) -> bool:
        solved, rates = self._config.filter_solved, self._config.pass_rate
        if solved and known and known.average >= solved:
            return False
        return not (rates and known and known.tried and not inside(known.passed / known.tried, rates))

    def _in_turn(
        self,
        tasks: list[str],
        eligible: set[str],
        known: Mapping[str, Known],
        count: int,
        state: Mapping[str, Any],
        random: np.random.Generator,
    ) -> tuple[list[str], dict[str, Any]]:
        """Goes through all tasks in an order of its own each time, passing over those that may not come."""
        chosen: list[str] = []
        seed, position, of, late = state.get("turn", (0, 0, 0, []))
        while len(chosen) < count:
            if of != len(tasks) or position >= of:  # those of this very batch come last
                seed, position, of, late = int(random.integers(2**32)), 0, len(tasks), sorted(set(chosen))
            order = [tasks[i] for i in np.random.default_rng(seed).permutation(of)]
            last = set(late)
            order = [*(task for task in order if task not in last), *(task for task in order if task in last)]
            while position < of and len(chosen) < count:
                task = order[position]
                position += 1
                if task in eligible and self._wanted(known.get(task), state, random):
                    chosen.append(task)
        return chosen, {**state, "turn": [seed, position, of, late]}

    def _drawn(
        self,
        eligible: list[str],
        known: Mapping[str, Known],
        count: int,
        state: Mapping[str, Any],
        random: np.random.Generator,
    ) -> list[str]:
        """Draws by weight; all eligible tasks as often as they fit into ``count``, then some."""
        rates = np.array([known.get(task, Known()).recent for task in eligible])
        chance = np.array([self._chance(known.get(task), state) for task in eligible])
        weights = (rates * (1 - rates) + EXPLORED) * chance
        chosen: list[str] = []
        while len(chosen) < count:
            some = min(count - len(chosen), len(eligible))
            drawn = random.choice(len(eligible), size=some, replace=False, p=weights / weights.sum())
            chosen += [eligible[i] for i in drawn]
        return chosen

    def _wanted(self, known: Known | None, state: Mapping[str, Any], random: np.random.Generator) -> bool:
        chance = self._chance(known, state)
        return chance >= 1 or bool(random.random() < chance)

    def _chance(self, known: Known | None, state: Mapping[str, Any]) -> float:
        """Probability at which GRESO asks for a task that is offered."""
        if not self._config.greso or not known or not known.streak:
            return 1.0
        name, floor = ("easy", FLOOR_EASY) if known.streak > 0 else ("hard", FLOOR_HARD)
        base = state.get(name, FIRST_BASE)
        return float(max(base ** abs(known.streak), floor))

    def learn(self, state: Mapping[str, Any], groups: Iterable[SampleGroup]) -> dict[str, Any]:
        """Learns from groups that are over; called once a step, as GRESO counts.

        Args:
            state: what the last call returned; empty at first.
            groups: all that were settled since, those that were dropped among them, as they came.

        Returns:
            The state, with what only :meth:`choose` keeps left out.
        """
        known = {task: Known(*row) for task, row in state.get("tasks", {}).items()}
        came_again = bool(state.get("again"))
        easy = hard = total = 0
        for group in sorted(groups, key=lambda group: (group.time_ns, group.id)):
            rewards = [reward(sample) for sample in group.samples if sample.verified]
            if not rewards:
                continue
            came_again = came_again or group.task in known
            found = self._updated(known.get(group.task), rewards)
            known[group.task] = found
            if len(rewards) >= MIN_SAMPLES:
                total, easy, hard = total + 1, easy + (found.streak > 0), hard + (found.streak < 0)
        learned: dict[str, Any] = {"tasks": {task: list(row) for task, row in known.items()}, "again": came_again}
        if self._config.greso:
            easy_base, hard_base = state.get("easy", FIRST_BASE), state.get("hard", FIRST_BASE)
            if state.get("again") and total:  # the first time through all tasks is over
                easy_base = _steered(easy_base, easy / total, TARGET_EASY)
                hard_base = _steered(hard_base, hard / total, TARGET_HARD)
            learned |= {"easy": easy_base, "hard": hard_base}
        return learned

    def _updated(self, known: Known | None, rewards: Sequence[float]) -> Known:
        passed = sum(value >= self._pass_threshold for value in rewards)
        rate = passed / len(rewards)
        before = known or Known(recent=rate)
        streak = before.streak
        if len(rewards) >= MIN_SAMPLES:
            sign = 0 if len(set(rewards)) > 1 else 1 if passed else -1
            streak = sign * (abs(streak) + 1 if streak * sign > 0 else 1)
        return Known(
            before.passed + passed,
            before.tried + len(rewards),
            DECAY * before.average + (1 - DECAY) * rate,
            (1 - RECENT) * before.recent + RECENT * rate,
            streak,
        )


def _steered(base: float, share: float, target: float) -> float:
    return max(LOWEST, base - STEP) if share >= target else min(HIGHEST, base + STEP)
