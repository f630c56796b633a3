"""The advantage of each sample, and its weight in the loss.

The kinds are those of :mod:`megaflow_hpc.trajectories.reading.advantages`, which computes them: ``grpo``, ``dr_grpo``,
``rloo`` and ``median``, each over the samples of a group that are left. Where several rewards are compared ``apart``,
their advantages are added up by weight. ``whiten``, which goes with ``apart`` (Liu et al. 2026, GDPO, arXiv
2601.05242), then brings the tokens of the batch to mean 0 and standard deviation 1, as ``adv_norm`` with level
``batch`` does in AstraFlow (``dataflow/utils.py``, ``Normalization``): there, too, over tokens and not over samples.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.algorithms.rewards import columns
from megaflow_hpc.training.algorithms.samples import SampleGroup
from megaflow_hpc.trajectories.reading.advantages import Kind
from megaflow_hpc.trajectories.reading.advantages import advantages as relative

KINDS: dict[str, Kind] = {"grpo": "grpo", "dr_grpo": "drgrpo", "rloo": "rloo", "median": "median"}
EPSILON = 1e-6
"""What ``whiten`` adds to the divisor."""


def advantages(config: PolicyTraining, groups: Iterable[SampleGroup]) -> dict[str, tuple[float, float]]:
    """Computes advantages.

    Args:
        config: the policy's; its ``advantage`` counts.
        groups: those that a step trains on, as :func:`~megaflow_hpc.training.algorithms.choose` takes them.

    Returns:
        Sample id → advantage and weight. A sample that lacks a reward is in no group, and not here.

    Raises:
        ConfigError: a reward is infinite, or too large for an advantage in float32.
    """
    found = [(sample, number) for number, group in enumerate(groups) for sample in group.samples]
    if not found:
        return {}
    values, weights = columns([sample for sample, _ in found], config.advantage)
    there: NDArray[np.bool_] = np.asarray(~np.isnan(values).any(axis=1))
    samples = [sample for (sample, _), is_there in zip(found, there, strict=True) if is_there]
    number = np.array([number for _, number in found])[there]
    kind = KINDS[config.advantage.kind]
    with np.errstate(over="ignore", invalid="ignore"):  # told below
        parts = [relative(column, number, kind).astype(np.float64) for column in values[there].T]
        advantage = np.stack(parts, axis=1) @ weights if samples else np.zeros(0)
    if not np.isfinite(advantage).all():
        worst = samples[int(np.argmin(np.isfinite(advantage)))]
        raise ConfigError(f"{worst.id}: reward {worst.reward} is too large to be compared; correct the task's verifier")
    if config.advantage.whiten or (config.advantage.rewards and config.advantage.normalise == "apart"):
        tokens = np.array([sample.tokens * (sample.weight > 0) for sample in samples], dtype=np.float64)
        advantage = whitened(advantage, tokens)
    return {
        sample.id: (float(np.float32(value)), sample.weight) for sample, value in zip(samples, advantage, strict=True)
    }


def whitened(values: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shifts and scales values (n), each of so many tokens (n), to mean 0 and standard deviation 1 of all tokens."""
    if not tokens.sum():
        return values
    centred = values - np.average(values, weights=tokens)
    spread = np.sqrt(np.average(centred**2, weights=tokens))
    return np.asarray(centred / (spread + EPSILON), dtype=np.float64)
