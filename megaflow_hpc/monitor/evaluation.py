"""What an evaluation says: mean reward and pass@k of each policy, with 95 % confidence intervals.

Tasks are what is drawn, and a task's samples are not independent of one another: every figure is made per task first,
and its interval is that of the mean over tasks. pass@k is the unbiased estimator of Chen et al. (2021), *Evaluating
Large Language Models Trained on Code*: with c of n samples passed it is ``1 - C(n - c, k) / C(n, k)``. Rollouts without
a reward (infrastructure that failed) are left out, and counted.

Intervals of shares, and of rewards between 0 and 1, are Wilson's (1927): unlike mean ± 1.96 standard errors they stay
within 0 and 1, and do not close where everything or nothing passed. How much the samples of a task resemble one another
is in the number of trials for which the interval is made, as in surveys of clusters (Korn and Graubard 1998; Franco et
al. 2019): that of independent trials which would have the standard error found over tasks, but no fewer than there are
tasks (samples of a task that are all alike say no more than one) and no more than there are samples. Other rewards have
Student's interval of the mean over tasks, if two tasks differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Z = 1.959964
"""Of a 95 % interval: the 97.5 % quantile of the normal distribution."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The same quantile of Student's distribution with 1 to 9 degrees of freedom."""

Interval = tuple[float, float]


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


def wilson(share: float, trials: float) -> Interval:
    """The 95 % interval of a share of independent trials (Wilson 1927, without correction for continuity).

    Args:
        share: from 0 to 1.
        trials: at least 1; need not be whole.
    """
    middle = (share + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z * math.sqrt(share * (1 - share) / trials + (Z / (2 * trials)) ** 2) / (1 + Z * Z / trials)
    return (max(0.0, middle - half) if share > 0 else 0.0), (min(1.0, middle + half) if share < 1 else 1.0)


def share_interval(values: Sequence[float], samples: int) -> Interval:
    """The 95 % interval of the mean of tasks' values that lie between 0 and 1.

    Args:
        values: one of each task, at least one.
        samples: independent samples that they were made of, over all tasks.
    """
    mean, error = _mean_and_error(values)
    spread = mean * (1 - mean)
    trials = spread / error**2 if error else math.inf if spread else 0.0
    return wilson(min(1.0, max(0.0, mean)), max(len(values), min(samples, trials)))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The 95 % interval of the mean of values (Student); ``None`` where fewer than two differ."""
    mean, error = _mean_and_error(values)
    if not error:
        return None
    half = _student(len(values) - 1) * error
    return mean - half, mean + half


def interval(values: Sequence[float], samples: int, share: bool) -> Interval | None:
    """:func:`share_interval` of a ``share``, else :func:`mean_interval`."""
    return share_interval(values, samples) if share else mean_interval(values)


def evaluate(
    rewards: Mapping[str, Sequence[float | None]], ks: Sequence[int] = (), threshold: float = 1.0
) -> dict[str, Any] | None:
    """Figures of one policy.

    Args:
        rewards: by task, one of each rollout; ``None`` where there is none. One without bounds is as good as none.
        ks: of pass@k; without any 1 and the most samples that any task has.
        threshold: reward from which a rollout has passed.

    Returns:
        ``tasks``, ``samples``, ``passed`` (so many of the samples), ``unrated``, ``mean``, ``low`` and ``high`` (its
        95 % interval; ``None`` where nothing can be said), and ``pass_at``: k → ``value``, ``low``, ``high`` and
        ``tasks`` (those with at least k samples). ``None`` where no rollout has a reward.
    """
    rated = {task: [r for r in given if r is not None and math.isfinite(r)] for task, given in rewards.items()}
    rated = {task: given for task, given in rated.items() if given}
    if not rated:
        return None
    samples = sum(map(len, rated.values()))
    unrated = sum(map(len, rewards.values())) - samples
    share = all(0.0 <= r <= 1.0 for given in rated.values() for r in given)
    means = [math.fsum(given) / len(given) for given in rated.values()]
    found: dict[str, Any] = {
        "tasks": len(rated),
        "samples": samples,
        "passed": sum(r >= threshold for given in rated.values() for r in given),
        "unrated": unrated,
        "mean": _rounded(math.fsum(means) / len(means)),
        **_bounds(interval(means, samples, share)),
        "pass_at": {},
    }
    for k in sorted(set(ks or (1, max(map(len, rated.values()))))):
        enough = [given for given in rated.values() if len(given) >= k]
        each = [pass_at_k(len(given), sum(r >= threshold for r in given), k) for given in enough]
        if each:
            found["pass_at"][str(k)] = {
                "value": _rounded(math.fsum(each) / len(each)),
                **_bounds(share_interval(each, sum(len(given) // k for given in enough))),
                "tasks": len(each),
            }
    return found


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error; 0 of a single value, and of values that do not differ."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2 or min(values) == max(values):
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution; from 10 degrees of freedom on by Abramowitz and Stegun 26.7.5."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    return Z + (Z**3 + Z) / (4 * freedom) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)


def _bounds(found: Interval | None) -> dict[str, float | None]:
    low, high = found or (None, None)
    return {"low": _rounded(low), "high": _rounded(high)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
