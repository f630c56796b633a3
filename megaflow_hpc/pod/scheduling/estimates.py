"""Expected durations of rollouts, learned as rollouts end. This module does no I/O and reads no clock.

Durations of agents are roughly log-normal: many are short, and a few are very long. :class:`Estimates` tracks the mean
and variance of the logarithm (Welford) on three levels: all rollouts, each policy, and each task of a policy. A level
with few observations is shrunk towards the level above it, which counts as ``PRIOR`` observations. So the first sample
of a new task is estimated from its policy, and the eighth mostly from the previous seven. Earlier campaigns can provide
initial estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

PRIOR = 2.0
"""Weight of the next higher level, in observations."""
PRIOR_DEVIATION = 1.0
"""Prior standard deviation of the logarithm. 1 corresponds to a factor of 2.7 in either direction."""
MAX_LEARNED = 8
"""Maximum weight of all earlier campaigns together for a task or a policy, in observations."""
SHORTEST_S = 1e-3
MAX_TASKS = 16_384
"""Maximum number of this campaign's tasks to keep in memory (about 7 MB). The oldest are dropped first."""


@dataclass(slots=True)
class _Moments:
    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    def add(self, n: int, mean: float, variance: float) -> None:
        """Adds ``n`` values with the given mean and variance (Chan, Golub and LeVeque 1979)."""
        off, total = mean - self.mean, self.n + n
        self.squares += variance * n + off * off * self.n * n / total
        self.mean += off * n / total
        self.n = total

    def fade(self, most: int) -> None:
        """Reduces the weight of the values to that of at most ``most`` values."""
        if self.n > most:
            self.squares *= most / self.n
            self.n = most


class Estimates:
    """Estimates of rollout durations in seconds, by task and policy."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, ...], _Moments] = {}
        """Moments for the keys ``()`` (all rollouts), ``(policy,)``, and ``(policy, task)`` for tasks of earlier
        campaigns."""
        self._tasks: dict[tuple[str, ...], _Moments] = {}
        """Moments for the keys ``(policy, task)``, for tasks that occur only in this campaign."""

    def observe(self, task: str, policy: str, seconds: float) -> None:
        """Records that a rollout of ``task`` under ``policy`` took ``seconds``."""
        value = math.log(max(seconds, SHORTEST_S))
        for key in ((), (policy,)):
            self._levels.setdefault(key, _Moments()).add(1, value, 0.0)
        of_task = self._of_task((policy, task))
        if of_task is None:
            of_task = self._tasks[policy, task] = _Moments()
            if len(self._tasks) > MAX_TASKS:
                del self._tasks[next(iter(self._tasks))]
        of_task.add(1, value, 0.0)

    def expect(self, task: str, policy: str, quantile: float = 0.5) -> float | None:
        """Returns a quantile of the expected duration of a rollout, in seconds. Returns ``None`` before any rollout has
        ended."""
        every = self._levels.get(())
        if every is None:
            return None
        mean = every.mean
        variance = (every.squares + PRIOR * PRIOR_DEVIATION**2) / (every.n + PRIOR)
        for level in (self._levels.get((policy,)), self._of_task((policy, task))):
            if level is None:
                break
            weight = level.n + PRIOR
            shift = level.mean - mean
            variance = (level.squares + PRIOR * variance + shift**2 * level.n * PRIOR / weight) / weight
            mean += shift * level.n / weight
        return math.exp(mean + NormalDist().inv_cdf(quantile) * math.sqrt(variance))

    def _of_task(self, key: tuple[str, str]) -> _Moments | None:
        return self._levels.get(key) or self._tasks.get(key)

    def learn(self, rows: Iterable[Sequence[Any]]) -> None:
        """Adds durations from earlier campaigns.

        They count as at most :data:`MAX_LEARNED` observations, so that the estimates adapt quickly to a faster model or
        machine.

        Args:
            rows: One row per task and policy: task, policy, number of rollouts, and mean and variance of the logarithm
                of the duration in seconds.
        """
        for task, policy, n, mean, variance in rows:
            for key in ((), (policy,), (policy, task)):
                self._levels.setdefault(key, _Moments()).add(n, mean, variance)
        for level in self._levels.values():
            level.fade(MAX_LEARNED)
