"""Computes the advantage of each sample and its weight in the loss.

:mod:`megaflow_hpc.trajectories.reading.advantages` computes the kinds ``grpo``, ``dr_grpo``, ``rloo`` and ``median``,
each over the remaining samples of a group. If several rewards are normalised ``apart``, their advantages are added by
weight. Then the tokens of the batch are whitened to mean 0 and standard deviation 1 (Liu et al. 2026, GDPO, arXiv
2601.05242). ``whiten`` does the same without ``apart``. AstraFlow's ``adv_norm`` with level ``batch`` counts tokens too
(``dataflow/utils.py``, ``Normalization``), not samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.config.sections import Method
from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.algorithms.rewards import columns
from megaflow_hpc.training.algorithms.samples import Sample, SampleGroup
from megaflow_hpc.training.methods import call, mapping, numbers
from megaflow_hpc.trajectories.reading.advantages import Kind
from megaflow_hpc.trajectories.reading.advantages import advantages as relative

KINDS: dict[str, Kind] = {"grpo": "grpo", "dr_grpo": "drgrpo", "rloo": "rloo", "median": "median"}
WHITEN_EPSILON = 1e-6
"""Added to the divisor when advantages are whitened."""


Values = float | NDArray[np.float32]
"""Advantages of a sample: one for all its tokens, or an array with one for each sequence or each turn."""


def advantages(config: PolicyTraining, groups: Iterable[SampleGroup]) -> dict[str, tuple[Values, float]]:
    """Computes the advantage and the weight of each sample.

    Args:
        config: training of the policy; only ``advantage`` is used.
        groups: the groups that a step trains on, as returned by :func:`~megaflow_hpc.training.algorithms.choose`.

    Returns:
        Sample id → advantage and weight. Samples without a reward are left out.

    Raises:
        ConfigError: a reward is infinite, or too large for an advantage in float32; or a function returned something
            else than its contract says.
    """
    if isinstance(config.advantage.kind, Method):
        return _of_method(config, config.advantage.kind, list(groups))
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


def _of_method(config: PolicyTraining, method: Method, groups: list[SampleGroup]) -> dict[str, tuple[Values, float]]:
    """Calls a function for the advantages.

    It is called as ``function(groups, **args)``. The groups have only verified samples; ``sample.reward`` includes
    penalties and the weights of ``advantage.rewards``. It returns a mapping from the id of each sample to a number, or
    to an array with one number for each of its sequences (``sample.sequences``) or turns (``sample.turns``).
    """
    compared = []
    for group in groups:
        values, weights = columns(group.samples, config.advantage)
        totals = zip(group.samples, (values @ weights).tolist(), strict=True)
        compared.append(group.only(tuple(replace(s, reward=r, penalty=0.0) for s, r in totals if r == r)))
    samples = [sample for group in compared for sample in group.samples]
    returned = mapping(method, call(method, compared), {sample.id for sample in samples}, "sample")
    arrays = [_checked(method, sample, returned[sample.id]) for sample in samples]
    if config.advantage.whiten and samples:
        tokens = [_tokens(s, len(a)) for s, a in zip(samples, arrays, strict=True)]
        flat = whitened(np.concatenate(arrays).astype(np.float64), np.concatenate(tokens)).astype(np.float32)
        arrays = np.split(flat, np.cumsum([len(array) for array in arrays])[:-1])
    return {
        sample.id: (float(array[0]) if len(array) == 1 else array, sample.weight)
        for sample, array in zip(samples, arrays, strict=True)
    }


def _checked(method: Method, sample: Sample, value: object) -> NDArray[np.float32]:
    shapes = [(), (sample.sequences,), (len(sample.turns),)]
    return np.atleast_1d(numbers(method, value, shapes, f"the advantage of {sample.id}"))


def _tokens(sample: Sample, count: int) -> NDArray[np.float64]:
    """Returns the number of tokens that each of a sample's ``count`` advantages applies to."""
    if not sample.weight:
        return np.zeros(count)
    if count == 1:
        return np.array([sample.tokens], np.float64)
    each = np.zeros(count)
    for number, turn in enumerate(sample.turns):
        each[number if count == len(sample.turns) else turn.sequence] += turn.end - turn.start
    return each


def whitened(values: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shifts and scales values (n) to mean 0 and standard deviation 1; each value counts once per token (n)."""
    if not tokens.sum():
        return values
    centred = values - np.average(values, weights=tokens)
    spread = np.sqrt(np.average(centred**2, weights=tokens))
    return np.asarray(centred / (spread + WHITEN_EPSILON), dtype=np.float64)
