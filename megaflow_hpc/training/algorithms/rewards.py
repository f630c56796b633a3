"""Applies the ``data`` operations that change rewards, calls scorers, and computes each sample's advantage and weight.

===================  ===============================================================================================
``penalty``          adds an amount to the reward of truncated rollouts: MegaFlow, appendix D.1 (-0.5)
``over_length``      with ``penalise``, lowers the reward by 1 if a sequence is longer than ``longest``
``rewards``          compares a single column: the weighted sum of the named rewards (or the only reward) plus
                     penalties
``whiten: apart``    compares one column per named reward, and one column of weight 1 for penalties: Liu et al.
                     2026, GDPO, arXiv 2601.05242
===================  ===============================================================================================

:mod:`megaflow_hpc.trajectories.reading.advantages` computes the advantage kinds ``grpo``, ``dr_grpo``, ``rloo`` and
``median`` over the remaining samples of each group. With ``whiten: apart``, a sample's advantage is the weighted sum of
its advantages per column. ``whiten`` scales the result to mean 0 and standard deviation 1 over the tokens of the batch.
AstraFlow's ``adv_norm`` with level ``batch`` also averages over tokens instead of samples (``dataflow/utils.py``,
``Normalization``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.config.sections import Method
from megaflow_hpc.config.training import AdvantageConfig, DataStep, PolicyTraining
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.algorithms.samples import (
    SCORE,
    RoleRewards,
    Sample,
    SampleGroup,
    StoredRollout,
)
from megaflow_hpc.training.methods import call, mapping, numbers
from megaflow_hpc.trajectories.reading.advantages import Kind
from megaflow_hpc.trajectories.reading.advantages import advantages as relative
from megaflow_hpc.types import SEQUENCE_REWARD, TURN_REWARD

KINDS: dict[str, Kind] = {"grpo": "grpo", "dr_grpo": "drgrpo", "rloo": "rloo", "median": "median"}
WHITEN_EPSILON = 1e-6
"""Constant added to the standard deviation when advantages are whitened."""


Values = float | NDArray[np.float32]
"""Advantage of a sample: one number for all tokens, or one number for each sequence or turn."""


def plain(groups: Iterable[SampleGroup]) -> list[SampleGroup]:
    """Resets the penalties and weights of all samples to their defaults."""
    return [_each(group, _plain) for group in groups]


def shaped(groups: Iterable[SampleGroup], step: DataStep) -> list[SampleGroup]:
    """Applies a ``data`` operation that sets penalties, such as ``penalty``."""
    return [_each(group, lambda sample: _shaped(sample, step)) for group in groups]


def _plain(sample: Sample) -> Sample:
    return sample if sample.penalty == 0 and sample.weight == 1 else replace(sample, penalty=0.0, weight=1.0)


def _shaped(sample: Sample, step: DataStep) -> Sample:
    if step.penalty is not None and sample.status == "truncated":
        return replace(sample, penalty=sample.penalty + step.penalty)
    limit = step.over_length
    if limit is not None and limit.how == "penalise" and sample.longest > limit.longest:
        return replace(sample, penalty=sample.penalty - 1.0)
    return sample


def _each(group: SampleGroup, change: Callable[[Sample], Sample]) -> SampleGroup:
    return SampleGroup(group.id, group.task, tuple(map(change, group.samples)))


def columns(samples: Sequence[Sample], config: AdvantageConfig) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the reward columns on which samples are compared.

    Returns:
        Values of shape (n samples, k columns), NaN if missing, and the weights (k) of the columns.

    Raises:
        ConfigError: a reward is infinite.
    """
    added = np.array([sample.penalty for sample in samples], dtype=np.float64)
    if not config.rewards:
        return (np.array([reward(sample) for sample in samples], dtype=np.float64) + added)[:, None], np.ones(1)
    named = np.array([[reward(s, name) for name in config.rewards] for s in samples], dtype=np.float64)
    named = named.reshape(len(samples), len(config.rewards))
    weights = np.array(list(config.rewards.values()), dtype=np.float64)
    if config.whiten != "apart":
        return (named @ weights + added)[:, None], np.ones(1)
    return np.column_stack([named, added]), np.append(weights, 1.0)


def scores(method: Method, rollouts: Sequence[StoredRollout]) -> dict[str, dict[str, float] | None]:
    """Calls a user's function to score stored rollouts.

    The function is called as ``function(rollouts, **args)``. It returns a mapping from sample ids to scores. A score is
    one number, one number per sequence or per turn of the sample, or ``None`` if the function cannot score the rollout.

    Returns:
        Named rewards by sample id. The names are ``score``, ``sequence.N`` for each sequence, or ``turn.N`` for each
        model call.

    Raises:
        ConfigError: the function raised an exception, or returned anything else.
    """
    returned = mapping(method, call(method, list(rollouts)), {r.sample.id for r in rollouts}, "rollout")
    named: dict[str, dict[str, float] | None] = {}
    for sample, _ in rollouts:
        value = returned[sample.id]
        if value is None:
            named[sample.id] = None
            continue
        shapes = [(), (sample.sequences,), (len(sample.turns),)]
        array = numbers(method, value, shapes, f"the score of {sample.id}")
        if array.shape == ():
            names = [SCORE]
        elif len(array) == len(sample.turns):
            names = [f"{TURN_REWARD}{turn.call}" for turn in sample.turns]
        else:
            names = [f"{SEQUENCE_REWARD}{number}" for number in range(sample.sequences)]
        named[sample.id] = dict(zip(names, array.reshape(-1).tolist(), strict=True))
    return named


def scored(sample: Sample, own: Mapping[str, float] | None) -> Sample:
    """Returns a copy of a sample with the scorer's rewards. They replace the verifier's rewards of the same names. The
    reward ``score`` replaces the sample's reward.

    Args:
        sample: the sample with the verifier's rewards.
        own: the sample's entry in the result of :func:`scores`. ``None`` means that the sample has no reward.
    """
    if own is None:
        return replace(sample, reward=math.nan, verdict=sample.reward)
    changed = own.get(SCORE, sample.reward)
    return replace(sample, reward=changed, rewards={**sample.rewards, **own}, verdict=sample.reward, scores=own)


def reward(sample: Sample, name: str | None = None) -> float:
    """Returns a sample's reward, or its reward called ``name``. NaN if the sample was not verified.

    A named reward that the verifier did not write is 0. Otherwise the tested code could remove a sample from its group
    by preventing the verifier from writing all rewards.

    Raises:
        ConfigError: the reward is infinite.
    """
    value = sample.reward if name is None else sample.rewards.get(name, 0.0)
    if name is not None and not sample.verified:
        value = math.nan
    if math.isinf(value):
        what = "reward" if name is None else f"reward {name!r}"
        raise ConfigError(f"{sample.id}: {what} is {value}, expected a finite number; correct the task's verifier")
    return value


def role_config(config: AdvantageConfig, name: str | None) -> AdvantageConfig:
    """Returns the advantage settings for a role. If the role has its own reward, ``name``, only this reward counts."""
    return config.model_copy(update={"rewards": {name: 1.0}, "whiten": bool(config.whiten)}) if name else config


def role_rewards(sample: Sample, roles: RoleRewards) -> dict[str, float]:
    """Returns the rewards of the roles that the policy played, without penalties. They are NaN if the rollout was not
    verified."""
    return {role: reward(sample, roles[role]) for role in dict.fromkeys(sample.roles) if role in roles}


def own_rewards(sample: Sample, roles: RoleRewards | None) -> tuple[float, ...]:
    """Returns the rewards on which the policy is trained.

    In a team, these are the rewards of the roles that the policy played, sorted by role. The tuple is empty if it
    played none. Without a team, it is the rollout's reward.
    """
    if not roles:
        return (reward(sample),)
    return tuple(value for _, value in sorted(role_rewards(sample, roles).items()))


def players(groups: Iterable[SampleGroup], role: str) -> list[tuple[Sample, int]]:
    """Returns the samples in which the policy played a role, as (sample, index of its group). An empty role matches all
    samples."""
    return [
        (sample, number)
        for number, group in enumerate(groups)
        for sample in group.samples
        if not role or role in sample.roles
    ]


def advantages(
    config: PolicyTraining, groups: Iterable[SampleGroup], roles: RoleRewards | None = None
) -> dict[str, tuple[Values, float]]:
    """Computes the advantage and the weight of each sample.

    Args:
        config: training settings of the policy. Only ``advantage`` is used.
        groups: the groups that a step trains on, as returned by :func:`~megaflow_hpc.training.algorithms.choose`.
        roles: the policy's roles in its team. Each role is compared with the same role in the other rollouts of the
            group, so a sample gets one advantage per sequence.

    Returns:
        (advantage, weight) by the id of each sample with a reward.

    Raises:
        ConfigError: a reward is infinite, an advantage is too large for float32, or a function returned an invalid
            result.
    """
    groups = list(groups)
    if isinstance(config.advantage.kind, Method):
        return _of_method(config, config.advantage.kind, groups, roles or {})
    parts = [
        (role, *_compared(role_config(config.advantage, name), players(groups, role)))
        for role, name in (roles or {"": None}).items()
    ]
    if config.advantage.whiten:
        tokens = [_tokens_of(sample, role) for role, samples, _ in parts for sample in samples]
        flat = whitened(np.concatenate([values for *_, values in parts]), np.array(tokens, np.float64))
        ends = np.cumsum([len(samples) for _, samples, _ in parts])[:-1]
        parts = [(role, samples, own) for (role, samples, _), own in zip(parts, np.split(flat, ends), strict=True)]
    by_sample: dict[str, tuple[Sample, dict[str, float]]] = {}
    for role, samples, values in parts:
        for sample, value in zip(samples, values.tolist(), strict=True):
            by_sample.setdefault(sample.id, (sample, {}))[1][role] = float(np.float32(value))
    return {id: (_by_sequence(sample, own), sample.weight) for id, (sample, own) in by_sample.items()}


def _by_sequence(sample: Sample, own: Mapping[str, float]) -> Values:
    """Combines the advantages of a sample's roles. Returns one number if all sequences have the same role. Otherwise,
    returns one number per sequence."""
    if len(own) == 1 and ("" in own or len({*sample.roles}) == 1):
        return next(iter(own.values()))
    return np.array([own.get(role, 0.0) for role in sample.roles], np.float32)


def _tokens_of(sample: Sample, role: str) -> float:
    """Returns the number of tokens sampled by the role, or 0 if the sample does not count in the loss."""
    if not sample.weight:
        return 0.0
    if not role or {*sample.roles} == {role}:
        return float(sample.tokens)
    return float(sum(turn.end - turn.start for turn in sample.turns if sample.roles[turn.sequence] == role))


def _compared(
    config: AdvantageConfig, numbered: Sequence[tuple[Sample, int]]
) -> tuple[list[Sample], NDArray[np.float64]]:
    """Returns the samples that have a reward, with their advantages relative to their groups."""
    values, weights = columns([sample for sample, _ in numbered], config)
    has_reward: NDArray[np.bool_] = np.asarray(~np.isnan(values).any(axis=1))
    samples = [sample for (sample, _), present in zip(numbered, has_reward, strict=True) if present]
    if not samples:
        return [], np.zeros(0)
    number = np.array([number for _, number in numbered])[has_reward]
    kind = KINDS[str(config.kind)]
    with np.errstate(over="ignore", invalid="ignore"):  # the check below reports overflow
        parts = [relative(column, number, kind).astype(np.float64) for column in values[has_reward].T]
        advantage = np.stack(parts, axis=1) @ weights
    if not np.isfinite(advantage).all():
        worst = samples[int(np.argmin(np.isfinite(advantage)))]
        raise ConfigError(
            f"{worst.id}: reward {worst.reward} is too large for an advantage; correct the task's verifier"
        )
    return samples, np.asarray(advantage, np.float64)


def _of_method(
    config: PolicyTraining, method: Method, groups: list[SampleGroup], roles: RoleRewards
) -> dict[str, tuple[Values, float]]:
    """Calls a user's function to compute the advantages.

    The function is called as ``function(groups, **args)``. The groups contain only verified samples. ``sample.reward``
    includes penalties and the weights of ``advantage.rewards``. If the policy has a single role in its team,
    ``sample.reward`` is that role's reward. If it has several roles, ``sample.role_rewards`` has the reward of each
    role, also with penalties and weights. The function returns a mapping from the id of each sample to a number, or to
    an array with one number per sequence (``sample.sequences``) or per turn (``sample.turns``).
    """
    compared, only = [], next(iter(roles.values())) if len(roles) == 1 else None
    for group in groups:
        values, weights = columns(group.samples, role_config(config.advantage, only))
        valued = []
        for sample, total in zip(group.samples, (values @ weights).tolist(), strict=True):
            if not math.isnan(total):
                valued.append(_valued(sample, total, config.advantage, roles))
        compared.append(group.only(tuple(valued)))
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


def _valued(sample: Sample, total: float, config: AdvantageConfig, roles: RoleRewards) -> Sample:
    of_roles = {}
    for role in dict.fromkeys(sample.roles):
        if role in roles:
            values, weights = columns([sample], role_config(config, roles[role]))
            of_roles[role] = float((values @ weights)[0])
    return replace(sample, reward=total, penalty=0.0, role_rewards=of_roles)


def _checked(method: Method, sample: Sample, value: object) -> NDArray[np.float32]:
    shapes = [(), (sample.sequences,), (len(sample.turns),)]
    return np.atleast_1d(numbers(method, value, shapes, f"the advantage of {sample.id}"))


def _tokens(sample: Sample, count: int) -> NDArray[np.float64]:
    """Returns the number of tokens to which each of a sample's ``count`` advantages applies."""
    if not sample.weight:
        return np.zeros(count)
    if count == 1:
        return np.array([sample.tokens], np.float64)
    each = np.zeros(count)
    for number, turn in enumerate(sample.turns):
        each[number if count == len(sample.turns) else turn.sequence] += turn.end - turn.start
    return each


def whitened(values: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scales values (n) to mean 0 and standard deviation 1. Each value is weighted by its number of tokens, ``tokens``
    (n)."""
    if not tokens.sum():
        return values
    centred = values - np.average(values, weights=tokens)
    spread = np.sqrt(np.average(centred**2, weights=tokens))
    return np.asarray(centred / (spread + WHITEN_EPSILON), dtype=np.float64)
