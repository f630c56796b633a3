"""Evaluation of a campaign: mean reward and pass@k of each policy, with 95 % confidence intervals.

The samples of a task are not independent. Every figure is therefore computed per task first. The mean and its interval
are taken over tasks.

pass@k is the unbiased estimator of Chen et al. (2021), *Evaluating Large Language Models Trained on Code*. If c of n
samples passed, it is ``1 - C(n - c, k) / C(n, k)``. Rollouts without a reward (infrastructure failures) are excluded
and counted.

Proportions, and rewards between 0 and 1, get Wilson's interval (1927). Unlike mean ± 1.96 standard errors, this
interval stays between 0 and 1. It does not shrink to a point if all samples pass or fail.

Wilson's interval requires a number of trials. To account for the similarity of a task's samples, this module uses the
effective sample size, as in cluster surveys (Korn and Graubard 1998; Franco et al. 2019): the number of independent
trials that would have the standard error observed over tasks. It lies between the number of tasks and the number of
samples.

Other rewards get Student's interval of the mean over tasks, if at least two tasks differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

Z = 1.959964
"""97.5 % quantile of the normal distribution, for a 95 % interval."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t-distribution with 1 to 9 degrees of freedom."""

Interval = tuple[float, float]


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimates the probability that at least one of ``k`` samples passes, if ``passed`` of ``samples`` did.

    Raises:
        ValueError: ``samples`` is less than ``k`` or ``passed``.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed among {samples} samples")
    failed = samples - passed
    return 1.0 - math.comb(failed, k) / math.comb(samples, k)


def wilson(share: float, trials: float) -> Interval:
    """Returns the 95 % Wilson interval of a proportion of independent trials (1927, without continuity correction).

    Args:
        share: The proportion, from 0 to 1.
        trials: A number of at least 1, not necessarily an integer.
    """
    middle = (share + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z * math.sqrt(share * (1 - share) / trials + (Z / (2 * trials)) ** 2) / (1 + Z * Z / trials)
    return (max(0.0, middle - half) if share > 0 else 0.0), (min(1.0, middle + half) if share < 1 else 1.0)


def share_interval(values: Sequence[float], samples: int) -> Interval:
    """Returns the 95 % interval of a mean over tasks, for values between 0 and 1.

    Args:
        values: A value per task. Must not be empty.
        samples: Total number of samples from which the values were computed.
    """
    mean, error = _mean_and_error(values)
    spread = mean * (1 - mean)
    trials = float(samples)
    if error:
        trials = min(trials, spread / error**2)
    elif not spread:
        trials = 0.0  # all samples passed or all failed: count each task as one trial
    return wilson(min(1.0, max(0.0, mean)), max(len(values), trials))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Returns the 95 % interval of a mean (Student's t). ``None`` if all values are equal."""
    mean, error = _mean_and_error(values)
    if not error:
        return None
    half = _student(len(values) - 1) * error
    return mean - half, mean + half


def evaluate(
    rewards: Mapping[str, Sequence[float | None]], ks: Sequence[int] = (), threshold: float = 1.0
) -> dict[str, Any] | None:
    """Computes the figures of a policy.

    Args:
        rewards: Rewards of the rollouts of each task. ``None`` and infinite values count as missing.
        ks: Values of k for pass@k. Default: 1 and the largest number of samples of a task.
        threshold: Minimum reward at which a rollout counts as passed.

    Returns:
        The numbers of rated ``tasks``, rated ``samples``, ``passed`` samples and ``unrated`` samples; the ``mean`` and
        its 95 % interval from ``low`` to ``high``, which are ``None`` if unknown; and ``pass_at``, which contains for
        each k the ``value``, ``low``, ``high`` and the number of ``tasks`` with at least k samples. ``None`` if no
        rollout has a reward.
    """
    rated: dict[str, list[float]] = {}
    for task, given in rewards.items():
        finite = [reward for reward in given if reward is not None and math.isfinite(reward)]
        if finite:
            rated[task] = finite
    if not rated:
        return None
    samples = sum(map(len, rated.values()))
    is_share = all(0.0 <= reward <= 1.0 for given in rated.values() for reward in given)
    means = [fmean(given) for given in rated.values()]
    passed = {task: sum(reward >= threshold for reward in given) for task, given in rated.items()}
    figures: dict[str, Any] = {
        "tasks": len(rated),
        "samples": samples,
        "passed": sum(passed.values()),
        "unrated": sum(map(len, rewards.values())) - samples,
        "mean": _rounded(fmean(means)),
        **_bounds(share_interval(means, samples) if is_share else mean_interval(means)),
        "pass_at": {},
    }
    for k in sorted(set(ks or (1, max(map(len, rated.values()))))):
        enough = [task for task, given in rated.items() if len(given) >= k]
        if enough:
            values = [pass_at_k(len(rated[task]), passed[task], k) for task in enough]
            trials = sum(len(rated[task]) // k for task in enough)
            figures["pass_at"][str(k)] = {
                "value": _rounded(fmean(values)),
                **_bounds(share_interval(values, trials)),
                "tasks": len(enough),
            }
    return figures


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error, which is 0 if all values are equal."""
    if min(values) == max(values):
        return values[0], 0.0
    return fmean(values), stdev(values) / math.sqrt(len(values))


def _student(freedom: int) -> float:
    """Returns the 97.5 % quantile of Student's t-distribution. From 10 degrees of freedom, uses the approximation
    26.7.5 of Abramowitz and Stegun."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    return Z + (Z**3 + Z) / (4 * freedom) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)


def _bounds(interval: Interval | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {"low": _rounded(low), "high": _rounded(high)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
