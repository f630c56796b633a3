"""Computes the advantage of each sample and its weight in the loss.

:mod:`megaflow_hpc.trajectories.reading.advantages` computes the kinds ``grpo``, ``dr_grpo``, ``rloo`` and ``median``,
each over the remaining samples of a group. If several rewards are normalised ``apart``, their advantages are added by
weight. Then the tokens of the batch are whitened to mean 0 and standard deviation 1 (Liu et al. 2026, GDPO, arXiv
2601.05242). ``whiten`` does the same without ``apart``. AstraFlow's ``adv_norm`` with level ``batch`` counts tokens too
(``dataflow/utils.py``, ``Normalization``), not samples.
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
WHITEN_EPSILON = 1e-6
"""Added to the divisor when advantages are whitened."""


def advantages(config: PolicyTraining, groups: Iterable[SampleGroup]) -> dict[str, tuple[float, float]]:
    """Computes the advantage and the weight of each sample.

    Args:
        config: training of the policy; only ``advantage`` is used.
        groups: the groups that a step trains on, as returned by :func:`~megaflow_hpc.training.algorithms.choose`.

    Returns:
        Sample id → advantage and weight. Samples without a reward are left out.

    Raises:
        ConfigError: a reward is infinite, or too large for an advantage in float32.
    """
    numbered = [(sample, number) for number, group in enumerate(groups) for sample in group.samples]
    if not numbered:
        return {}
    values, weights = columns([sample for sample, _ in numbered], config.advantage)
    there: NDArray[np.bool_] = np.asarray(~np.isnan(values).any(axis=1))
    samples = [sample for (sample, _), is_there in zip(numbered, there, strict=True) if is_there]
    number = np.array([number for _, number in numbered])[there]
    kind = KINDS[config.advantage.kind]
    with np.errstate(over="ignore", invalid="ignore"):  # the check below reports it
        parts = [relative(column, number, kind).astype(np.float64) for column in values[there].T]
        advantage = np.stack(parts, axis=1) @ weights if samples else np.zeros(0)
    if not np.isfinite(advantage).all():
        worst = samples[int(np.argmin(np.isfinite(advantage)))]
        raise ConfigError(
            f"{worst.id}: reward {worst.reward} is too large for an advantage; correct the task's verifier"
        )
    if config.advantage.whiten or (config.advantage.rewards and config.advantage.normalise == "apart"):
        tokens = np.array([sample.tokens * (sample.weight > 0) for sample in samples], dtype=np.float64)
        advantage = whitened(advantage, tokens)
    return {
        sample.id: (float(np.float32(value)), sample.weight) for sample, value in zip(samples, advantage, strict=True)
    }


def whitened(values: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shifts and scales values (n) to mean 0 and standard deviation 1; each value counts once per token (n)."""
    if not tokens.sum():
        return values
    centred = values - np.average(values, weights=tokens)
    spread = np.sqrt(np.average(centred**2, weights=tokens))
    return np.asarray(centred / (spread + WHITEN_EPSILON), dtype=np.float64)
