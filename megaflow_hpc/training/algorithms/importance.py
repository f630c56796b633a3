"""Truncated importance weights: what corrects for an engine that samples from slightly other probabilities.

An engine computes in other kernels and a lower precision than the trainer, so that its tokens come from a slightly
other distribution than the proximal one, whose log-probabilities the trainer computes. The weight of a token is the
ratio of the two, cut at ``truncate``, that of a sequence the product over its tokens, cut as well (Yao et al. 2025,
Your Efficient RL Framework Secretly Brings You Off-Policy RL Training; the cut is that of IMPALA, Espeholt et al. 2018,
arXiv 1802.01561). The cut bounds the variance, for some bias.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.config.objective import ImportanceConfig
from megaflow_hpc.errors import ConfigError


def importance_weights(
    config: ImportanceConfig,
    proximal: NDArray[Any],
    engine: NDArray[Any],
    mask: NDArray[Any],
    sequence: NDArray[np.integer[Any]],
) -> NDArray[np.float32]:
    """Computes the weight of each token.

    Args:
        config: level and largest weight.
        proximal: (T), log-probabilities of the trainer before the step.
        engine: (T), those of the engine when it sampled; NaN where the mask is 0.
        mask: (T), whether a token was sampled.
        sequence: (T), which tokens belong together at level ``sequence``, from 0.

    Returns:
        (T), 1 where the mask is 0.

    Raises:
        ConfigError: a log-probability of a sampled token is missing.
    """
    sampled = np.asarray(mask, dtype=bool)
    weights = np.ones(len(sampled), dtype=np.float32)
    if config.level == "none" or not sampled.any():
        return weights
    difference = np.asarray(proximal, dtype=np.float64)[sampled] - np.asarray(engine, dtype=np.float64)[sampled]
    if np.isnan(difference).any():
        at = int(np.flatnonzero(sampled)[np.flatnonzero(np.isnan(difference))[0]])
        raise ConfigError(
            f"token {at} was sampled without a log-probability; the engine must give them, or set importance: "
            "{level: none}"
        )
    if config.level == "sequence":
        belongs = sequence[sampled]
        difference = np.bincount(belongs, difference)[belongs]
    weights[sampled] = np.exp(np.minimum(difference, math.log(config.truncate)))
    return weights
