"""How long rollouts take, learned while they finish: pure, no clock.

Durations of agents are close to log-normal: many short ones, a long tail. For each task and policy, for each policy
and for all together, mean and variance of the logarithm are kept (Welford), and a level that has seen little leans on
the one above it, as if that had been seen ``PRIOR`` times. So the first sample of a new task is guessed from its
policy, and its eighth from the seven before it. A campaign that names earlier ones begins with what they tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

PRIOR = 2.0
"""Observations that the level above is worth."""
WIDE = 1.0
"""Standard deviation of the logarithm while nothing is known of it: a factor of 2.7 either way."""
KEPT = 8
"""Observations that all earlier campaigns together are worth, of a task as of a policy."""
SHORTEST_S = 1e-3
TASKS = 16_384
"""Tasks of which what was seen here is kept, those seen first going first: some 7 MB, however many a pod runs."""


@dataclass(slots=True)
class _Seen:
    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Adds one value."""
        self.n += 1
        off = value - self.mean
        self.mean += off / self.n
        self.squares += off * (value - self.mean)

    def merge(self, n: int, mean: float, variance: float) -> None:
        """Adds ``n`` values of which this is known (Chan, Golub and LeVeque 1979)."""
        off, whole = mean - self.mean, self.n + n
        self.squares += variance * n + off * off * self.n * n / whole
        self.mean += off * n / whole
        self.n = whole

    def fade(self, most: int) -> None:
        """Lets what was seen count as ``most`` values at most."""
        if self.n > most:
            self.squares *= most / self.n
            self.n = most


class Estimates:
    """Expected durations in seconds, by task and policy."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], _Seen] = {}
        """All, each policy, and each task that earlier campaigns tell of."""
        self._tasks: dict[tuple[str, ...], _Seen] = {}
        """Policy and task → what was seen here alone."""

    def observe(self, task: str, policy: str, seconds: float) -> None:
        """Learns that a rollout of ``task`` under ``policy`` took ``seconds``."""
        value, of_task = math.log(max(seconds, SHORTEST_S)), (policy, task)
        for key in ((), (policy,)):
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = _Seen()
            seen.add(value)
        seen = self._of_task(of_task)
        if seen is None:
            seen = self._tasks[of_task] = _Seen()
            if len(self._tasks) > TASKS:
                del self._tasks[next(iter(self._tasks))]
        seen.add(value)

    def expect(self, task: str, policy: str, quantile: float = 0.5) -> float | None:
        """Returns the seconds within which ``quantile`` of such rollouts end; ``None`` before anything has ended."""
        whole = self._seen.get(())
        if whole is None:
            return None
        mean, variance = whole.mean, (whole.squares + PRIOR * WIDE**2) / (whole.n + PRIOR)
        for seen in (self._seen.get((policy,)), self._of_task((policy, task))):
            if seen is None:
                break
            weight = seen.n + PRIOR
            shift = seen.mean - mean
            variance = (seen.squares + PRIOR * variance + shift**2 * seen.n * PRIOR / weight) / weight
            mean += shift * seen.n / weight
        return math.exp(mean + NormalDist().inv_cdf(quantile) * math.sqrt(variance))

    def _of_task(self, key: tuple[str, str]) -> _Seen | None:
        return self._seen.get(key) or self._tasks.get(key)

    def learn(self, rows: Iterable[Sequence[Any]]) -> None:
        """Takes over what earlier campaigns saw: (task, policy, number, mean, variance) of the logarithm of seconds.

        However many there were they count as :data:`KEPT`, so that a model or machine which is faster now is believed.
        """
        levels = self._seen
        for task, policy, n, mean, variance in rows:
            for key in ((), (policy,), (policy, task)):
                levels.setdefault(key, _Seen()).merge(n, mean, variance)
        for seen in levels.values():
            seen.fade(KEPT)
