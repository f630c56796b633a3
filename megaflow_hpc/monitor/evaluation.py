"""What an evaluation says: mean reward and pass@k of each policy, with confidence intervals.

Tasks are what is drawn, and a task's samples are not independent of one another: every figure is made per task first,
and its interval is that of the mean over tasks (1.96 standard errors, clustered by task). pass@k is the unbiased
estimator of Chen et al. (2021), *Evaluating Large Language Models Trained on Code*: with c of n samples passed it is
``1 - C(n - c, k) / C(n, k)``. Rollouts without a reward (infrastructure that failed) are left out, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Z = 1.96


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The chance that one of ``k`` samples passes, estimated from ``samples`` >= ``k`` of which ``passed`` did.

    Raises:
        ValueError: there are fewer samples than ``k``, or more passed than there are.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed among {samples} samples")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(samples - passed + 1, samples + 1))


def mean_of(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and half the width of its 95 % interval; ``None`` for that of a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, Z * math.sqrt(variance / len(values))


def evaluate(
    rewards: Mapping[str, Sequence[float | None]], ks: Sequence[int] = (), threshold: float = 1.0
) -> dict[str, Any] | None:
    """Figures of one policy.

    Args:
        rewards: by task, one of each rollout; ``None`` where there is none.
        ks: of pass@k; without any 1 and the most samples that any task has.
        threshold: reward from which a rollout has passed.

    Returns:
        ``tasks``, ``samples``, ``unrated``, ``mean``, ``ci95`` (half the width) and ``pass_at`` (k → ``value``,
        ``ci95``, ``tasks``: those with at least k samples); ``None`` where no rollout has a reward.
    """
    rated = {task: [r for r in given if r is not None] for task, given in rewards.items()}
    unrated = sum(r is None for given in rewards.values() for r in given)
    rated = {task: given for task, given in rated.items() if given}
    if not rated:
        return None
    mean, half = mean_of([math.fsum(given) / len(given) for given in rated.values()])
    most = max(map(len, rated.values()))
    found: dict[str, Any] = {
        "tasks": len(rated),
        "samples": sum(map(len, rated.values())),
        "unrated": unrated,
        "mean": _rounded(mean),
        "ci95": _rounded(half),
        "pass_at": {},
    }
    for k in sorted(set(ks or (1, most))):
        each = [
            pass_at_k(len(given), sum(r >= threshold for r in given), k) for given in rated.values() if len(given) >= k
        ]
        if each:
            value, half = mean_of(each)
            found["pass_at"][str(k)] = {"value": _rounded(value), "ci95": _rounded(half), "tasks": len(each)}
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
