"""Estimates durations of rollouts from those that have ended. This module does no I/O and reads no clock.

Durations of agents are roughly log-normal: many are short, and a few are very long. :class:`Estimates` tracks the mean
and variance of the logarithm (Welford) on three levels: all rollouts, each arm (:attr:`.Rollout.arm`), and each task of
an arm. If a level has few observations, its estimate is pulled towards the level above, which counts as ``PRIOR``
observations. So the first sample of a new task is estimated from its arm, and the eighth mostly from the previous
seven.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

PRIOR = 2.0
"""Weight of the level above, in observations."""
PRIOR_DEVIATION = 1.0
"""Standard deviation of the logarithm before any observation. 1 corresponds to a factor of 2.7 in either direction."""
SHORTEST_S = 1e-3
MAX_TASKS = 16_384
"""Maximum number of tasks to keep in memory (about 7 MB). The oldest are dropped first."""


@dataclass(slots=True)
class _Moments:
    n: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations of the observations from their mean."""

    def add(self, value: float) -> None:
        self.n += 1
        off = value - self.mean
        self.mean += off / self.n
        self.squares += off * (value - self.mean)


class Estimates:
    """Estimates of rollout durations in seconds, by task and arm."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, ...], _Moments] = {}
        """Statistics for the keys ``()``, which means all rollouts, and ``(arm,)``."""
        self._tasks: dict[tuple[str, ...], _Moments] = {}
        """Statistics for the keys ``(arm, task)``."""

    def observe(self, task: str, arm: str, seconds: float) -> None:
        """Records that a rollout of ``task`` in ``arm`` took ``seconds``."""
        value = math.log(max(seconds, SHORTEST_S))
        for key in ((), (arm,)):
            self._levels.setdefault(key, _Moments()).add(value)
        of_task = self._tasks.get((arm, task))
        if of_task is None:
            of_task = self._tasks[arm, task] = _Moments()
            if len(self._tasks) > MAX_TASKS:
                del self._tasks[next(iter(self._tasks))]
        of_task.add(value)

    def expect(self, task: str, arm: str, quantile: float = 0.5) -> float | None:
        """Returns a quantile of the expected duration of a rollout, in seconds. Returns ``None`` before any rollout has
        ended."""
        every = self._levels.get(())
        if every is None:
            return None
        mean = every.mean
        variance = (every.squares + PRIOR * PRIOR_DEVIATION**2) / (every.n + PRIOR)
        for level in (self._levels.get((arm,)), self._tasks.get((arm, task))):
            if level is None:
                break
            weight = level.n + PRIOR
            shift = level.mean - mean
            variance = (level.squares + PRIOR * variance + shift**2 * level.n * PRIOR / weight) / weight
            mean += shift * level.n / weight
        return math.exp(mean + NormalDist().inv_cdf(quantile) * math.sqrt(variance))
