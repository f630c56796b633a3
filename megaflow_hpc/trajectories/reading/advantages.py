"""Computes group-relative advantages: how much better a rollout did than the other samples of its task.

All estimators compare the rewards of the rows in a group. Rows without a reward (NaN, not verified) belong to no group
and get the advantage NaN. A row that is alone in its group gets the advantage 0.

=========  ==========================================  =============================================================
``grpo``   (r - mean) / (std + epsilon)                Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1
``drgrpo`` r - mean                                    Liu et al. 2025, Understanding R1-Zero-like training,
                                                       arXiv 2503.20783 (without the bias by difficulty)
``rloo``   r - mean of the others                      Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740
``median`` r - median                                  Kim 2026, MC-GRPO, arXiv 2601.22582 (only its centring)
=========  ==========================================  =============================================================
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError

Kind = Literal["grpo", "drgrpo", "rloo", "median"]
KINDS: tuple[str, ...] = get_args(Kind)


def advantages(
    rewards: NDArray[Any], groups: NDArray[Any], kind: Kind = "grpo", *, epsilon: float = 1e-6, ddof: int = 1
) -> NDArray[np.float32]:
    """Computes the advantage of each row.

    Args:
        rewards: Shape (n,). NaN for rows without a reward.
        groups: The group of each row, of any hashable type, shape (n,).
        kind: An estimator from the table above.
        epsilon: Added to the divisor of ``grpo``.
        ddof: Delta degrees of freedom of ``grpo``'s standard deviation: 1 (sample, as in verl and TRL) or 0
            (population).

    Returns:
        Advantages of shape (n,). NaN for rows without a reward.

    Raises:
        ConfigError: ``kind`` is unknown.
    """
    if kind not in KINDS:
        raise ConfigError(f"advantage {kind!r}: there are {', '.join(KINDS)}")
    result = np.full(len(rewards), np.nan)
    rated = np.flatnonzero(~np.isnan(rewards))
    if not len(rated):
        return result.astype(np.float32)
    r = rewards[rated].astype(np.float64)
    group = codes(groups[rated])
    size = np.bincount(group)
    first = np.zeros(len(size))
    first[group] = r
    relative = r - first[group]  # exactly 0 for equal rewards, regardless of rounding in their sum
    centred = relative - (np.bincount(group, relative) / size)[group]
    if kind == "grpo":
        spread = np.sqrt(np.bincount(group, centred**2) / np.maximum(size - ddof, 1))
        divisor = spread[group] + epsilon  # if 0 (equal rewards, no epsilon), the advantage is 0, not NaN
        value = np.divide(centred, divisor, out=np.zeros_like(centred), where=divisor > 0)
    elif kind == "drgrpo":
        value = centred
    elif kind == "rloo":
        value = centred * (size / np.maximum(size - 1, 1))[group]  # r - (sum - r) / (size - 1)
    else:
        value = r - medians(r, group, size)[group]
    result[rated] = np.where(size[group] > 1, value, 0.0)
    return result.astype(np.float32)


def codes(values: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers the distinct values from 0 in order of first appearance. Faster than sorting a million strings.

    Args:
        values: Array of shape (n,).

    Returns:
        The number of each value, shape (n,).
    """
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()], np.int64)


def medians(values: NDArray[np.float64], group: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the median of each of G groups.

    Args:
        values: Array of shape (n,).
        group: Group number of each value, from 0 to G - 1, shape (n,).
        size: Number of values in each group, shape (G,).
    """
    ordered = values[np.lexsort((values, group))]
    first = np.cumsum(size) - size
    middle: NDArray[np.float64] = (ordered[first + (size - 1) // 2] + ordered[first + size // 2]) / 2
    return middle
