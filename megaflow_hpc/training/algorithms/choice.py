"""Chooses the groups of one training step. Applies the ``data`` operations in order and records the reason for every
drop.

A step *settles* ``want`` groups, which means that it trains on them or drops them. Exactly this number is requested for
each step. So dropped groups make a step smaller, but no later step waits for groups that were never requested. With
``refill``, the planner settles more groups until the step is full.

================  ==================================================================================================
always            drops samples that failed, were cancelled, have no reward or no sampled token, and samples whose
                  oldest token is too old (AstraFlow, ``rollout_buffer.py``, ``_pop_one``); drops a group with fewer
                  than two remaining samples
``zero_variance`` drops groups whose samples all got the same rewards: AstraFlow, ``FilterZeroAdvFilter``; also
                  DAPO's dynamic sampling
``pass_rate``     drops groups outside a range of pass rates: MegaFlow, appendix D.1, table 2 (before training)
``over_length``   drops samples with a sequence of more than ``longest`` tokens, prompts included
``method``        drops samples that the user's function omits; adds past samples that it returns
``replay``        adds the newest groups of the last two steps again: AstraFlow, ``replay_selectors.py``, which does
                  not bound their age
================  ==================================================================================================

A drop is recorded under the group's id if the whole group is dropped, otherwise under the sample's id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaflow_hpc.config.sections import Method
from megaflow_hpc.config.training import AdvantageConfig, Range, TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.algorithms.rewards import (
    columns,
    own_rewards,
    plain,
    players,
    reward,
    role_config,
    shaped,
)
from megaflow_hpc.training.algorithms.samples import Earlier, RoleRewards, Sample, SampleGroup
from megaflow_hpc.training.methods import call, numbers, takes, wrong

ALONE = "fewer than two samples"
ZERO_VARIANCE = "zero variance"
PASS_RATE = "pass rate"
STALE = "stale"
NOTHING_SAMPLED = "nothing sampled"
NO_REWARD = "no reward"
OVER_LENGTH = "over length"

MIN_SAMPLES = 2
"""Minimum number of samples in a group. A single sample has nothing to be compared with."""
REPLAYED_STEPS = 2
"""Number of recent full steps whose groups may be replayed."""

Drops = dict[str, str]
"""Maps the id of each dropped sample or group to the reason."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of choosing the groups of a step."""

    taken: tuple[SampleGroup, ...]
    """Groups to train on, in order, with only the samples that were kept. Penalties and weights are applied."""
    drops: Drops
    left: tuple[SampleGroup, ...]
    """Groups deferred to a later step."""
    replayed: tuple[SampleGroup, ...]
    """Groups from earlier steps to train on again."""
    state: dict[str, Any]
    """State to pass to the next call of :func:`choose`."""


def choose(
    config: TrainingConfig,
    groups: Iterable[SampleGroup],
    *,
    version: int,
    want: int,
    replayed: Sequence[SampleGroup] = (),
    state: Mapping[str, Any] | None = None,
    random: np.random.Generator | None = None,
    advantage: AdvantageConfig | None = None,
    pass_threshold: float = 1.0,
    bound: int | None = None,
    due: Collection[str] = (),
    earlier: Earlier | None = None,
    roles: RoleRewards | None = None,
) -> Choice:
    """Chooses the groups that one step trains on.

    Args:
        config: the section ``training``. Only ``data`` is used.
        groups: complete groups in any order, without duplicates.
        version: index of the policy's newest weights. Staleness is measured relative to it.
        want: maximum number of groups to train on or drop.
        replayed: groups that earlier steps trained on, newest last, with their rewards from before those steps. Only
            the groups of the last :data:`REPLAYED_STEPS` steps are needed.
        state: the state returned by the previous call, or ``None`` on the first call.
        random: random generator for user functions.
        advantage: the policy's advantage settings. They name the rewards that must be present and must differ within a
            group.
        pass_threshold: minimum reward with which a rollout, or each of the ``roles`` in it, passes.
        bound: maximum age of a token, in weight versions. Rollouts with older tokens are dropped. Replayed groups are
            exempt.
        due: ids of groups to take first, regardless of age.
        earlier: passed samples from earlier steps. User functions may add them to groups.
        roles: the policy's roles in its team. Their rewards must be present too.

    Raises:
        ConfigError: a reward is infinite, no rollout has a reward with a required name, or a user function returned an
            invalid result.
    """
    compared = advantage or AdvantageConfig()
    share = next((step.replay for step in config.data if step.replay), None)
    random = random or np.random.default_rng(0)
    queue = sorted(ordered(groups), key=lambda group: group.id not in due)
    drops: Drops = {}
    taken = survivors(plain(queue[:want]), compared, drops, roles)
    if bound is not None:
        taken = fresh(taken, bound, version, drops)
    for step in config.data:
        if step.pass_rate is not None:
            taken = within_pass_rates(taken, step.pass_rate, pass_threshold, drops, roles)
        elif step.method is not None:
            taken = by_method(taken, step.method, version, random, drops, earlier)
        elif step.over_length is not None and step.over_length.how == "drop":
            taken = short(taken, step.over_length.longest, drops)
        elif step.zero_variance is not None:
            taken = varied(taken, compared, drops, roles)
        else:
            taken = shaped(taken, step)
    again: list[SampleGroup] = []
    times = dict((state or {}).get("times", {}))
    if share is not None:
        candidates = survivors(plain(replayable(replayed, config.batch, times)), compared, {})
        for step in config.data:
            candidates = shaped(candidates, step)
            if step.method is not None:
                candidates = by_method(candidates, step.method, version, random, {})
        added = {sample.id for group in taken for sample in group.samples}  # a step may contain a rollout only once
        candidates = [group for group in candidates if added.isdisjoint(sample.id for sample in group.samples)]
        again = newest(candidates, len(taken), share)
        replayed_ids = {group.id for group in replayed}
        times = {group: count for group, count in times.items() if group in replayed_ids}
        times |= {group.id: times.get(group.id, 0) + 1 for group in again}
    return Choice(tuple(taken), drops, tuple(queue[want:]), tuple(again), {"times": times} if times else {})


def ordered(groups: Iterable[SampleGroup]) -> list[SampleGroup]:
    """Sorts groups by the oldest weights that sampled their tokens. Groups without sampled tokens come first, because
    they can only be dropped."""
    return sorted(groups, key=lambda group: (group.oldest, group.time_ns, group.id))


def replayable(replayed: Sequence[SampleGroup], batch: int, times: Mapping[str, int]) -> list[SampleGroup]:
    """Returns the recent groups that have not been replayed yet.

    Args:
        replayed: groups that earlier steps trained on, newest last.
        batch: number of groups in a full step.
        times: maps group ids to the number of times that the group was replayed.
    """
    return [group for group in replayed[-REPLAYED_STEPS * batch :] if not times.get(group.id, 0)]


def newest(candidates: Sequence[SampleGroup], taken: int, share: float) -> list[SampleGroup]:
    """Returns the newest candidates, at most the fraction ``share`` of the ``taken`` new groups in a step."""
    count = min(int(taken * share / (1 - share) + 1e-9), len(candidates))
    return list(candidates[len(candidates) - count :])


def survivors(
    groups: Iterable[SampleGroup], advantage: AdvantageConfig, drops: Drops, roles: RoleRewards | None = None
) -> list[SampleGroup]:
    """Keeps the samples that were verified and have at least one sampled token.

    Raises:
        ConfigError: a reward is infinite, or no sample has a reward that ``advantage.rewards`` or a role names.
    """
    groups = list(groups)
    verified = [sample for group in groups for sample in group.samples if sample.verified]
    _check_names(verified, advantage.rewards, "training: advantage.rewards")
    for role, name in (roles or {}).items():  # only rollouts with the role need its reward
        own = [sample for sample in verified if role in sample.roles]
        _check_names(own, [name] if name else [], f"team.{role}.reward")
    return _keep_samples(groups, _drop_reason, drops)


def _drop_reason(sample: Sample) -> str:
    """Returns the reason to drop a sample, or an empty string to keep it."""
    if sample.status == "failed":
        return f"failed: {sample.error_kind}" if sample.error_kind else "failed"
    if sample.status == "cancelled":
        return "cancelled"
    if math.isnan(reward(sample)):
        return NO_REWARD
    return "" if sample.tokens else NOTHING_SAMPLED


def _check_names(verified: list[Sample], expected: Iterable[str], key: str) -> None:
    for name in expected:
        if verified and all(name not in sample.rewards for sample in verified):
            names = ", ".join(sorted({name for sample in verified for name in sample.rewards})) or "none"
            raise ConfigError(f"{key}: no rollout has a reward {name!r}; agents and verifiers gave: {names}")


def varied(
    groups: Iterable[SampleGroup], advantage: AdvantageConfig, drops: Drops, roles: RoleRewards | None = None
) -> list[SampleGroup]:
    """Keeps the groups whose samples differ in at least one of the compared rewards and penalties."""
    compared = {role: role_config(advantage, name) for role, name in (roles or {"": None}).items()}

    def reason(group: SampleGroup) -> str:
        return "" if any(varies(group, config, role) for role, config in compared.items()) else ZERO_VARIANCE

    return _keep_groups(groups, reason, drops)


def varies(group: SampleGroup, advantage: AdvantageConfig, role: str = "") -> bool:
    """Returns whether the samples of a group differ in any reward or penalty with non-zero weight.

    Args:
        role: consider only samples in which the policy played this role. If empty, consider all samples.
    """
    values, weights = columns([sample for sample, _ in players([group], role)], advantage)
    values = values[:, weights != 0]
    return bool(len(values) and (values != values[0]).any())


def within_pass_rates(
    groups: Iterable[SampleGroup],
    bounds: Range,
    pass_threshold: float,
    drops: Drops,
    roles: RoleRewards | None = None,
) -> list[SampleGroup]:
    """Keeps groups whose pass rate is within the bounds. In a team, a rollout passes if every role that the policy
    played passes."""

    def reason(group: SampleGroup) -> str:
        passed = sum(min(own_rewards(sample, roles), default=-math.inf) >= pass_threshold for sample in group.samples)
        return "" if inside(passed / len(group.samples), bounds) else PASS_RATE

    return _keep_groups(groups, reason, drops)


def inside(rate: float, bounds: Range) -> bool:
    """Returns whether a pass rate is within the bounds."""
    lower, upper, kind = bounds
    return lower < rate < upper if kind == "exclusive" else lower <= rate <= upper


def fresh(groups: Iterable[SampleGroup], most: int, version: int, drops: Drops) -> list[SampleGroup]:
    """Keeps samples whose oldest token is at most ``most`` versions behind ``version``."""

    def reason(sample: Sample) -> str:
        return STALE if sample.oldest >= 0 and version - sample.oldest > most else ""

    return _keep_samples(groups, reason, drops)


def by_method(
    groups: Sequence[SampleGroup],
    method: Method,
    version: int,
    random: np.random.Generator,
    drops: Drops,
    earlier: Earlier | None = None,
) -> list[SampleGroup]:
    """Calls a user's function on the groups.

    The function is called as ``function(groups, version, random, **args)``. ``version`` is the index of the newest
    weights among the policy's versions, and ``random`` a seeded random generator. The function returns the groups to
    keep, in any order. It may omit samples and groups, and may change the rewards, penalties and weights of samples
    with ``dataclasses.replace``. A function with a parameter ``earlier`` also receives passed samples from earlier
    steps. It may add each of them to one group of the same task.

    Raises:
        ConfigError: the function raised an exception, or returned anything else.
    """
    named = {"earlier": earlier or {}} if takes(method, "earlier") else {}
    returned = call(method, list(groups), version, random, **named)
    if not isinstance(returned, list | tuple) or not all(isinstance(group, SampleGroup) for group in returned):
        raise wrong(method, f"returned {type(returned).__name__}", "a list of SampleGroup")
    before = {(group.id, sample.id): sample for group in groups for sample in group.samples}
    own = {sample.id for group in groups for sample in group.samples}
    if named:
        for group in groups:
            for sample in named["earlier"].get(group.task, ()):
                if sample.id not in own:
                    before[group.id, sample.id] = replace(sample, group=group.id)
    kept: dict[str, Sample] = {}
    for group in returned:
        for sample in group.samples:
            old = before.get((group.id, sample.id))
            if old is None or sample.id in kept:
                raise wrong(method, f"returned {sample.id} in group {group.id}", "each sample once, in its own group")
            values = [sample.reward, sample.penalty, sample.weight, *sample.rewards.values()]
            numbers(method, values, [(len(values),)], f"reward, penalty or weight of {sample.id}")
            numbers(method, sample.weight, [()], f"the weight of {sample.id}", least=0.0)
            new = {name: getattr(sample, name) for name in ("reward", "rewards", "penalty", "weight")}
            kept[sample.id] = replace(old, **new)
    changed = []
    for group in groups:
        added = [s for s in kept.values() if s.group == group.id and s.id not in own]
        changed.append(group.only((*(kept.get(s.id, s) for s in group.samples), *added)))
    return _keep_samples(changed, lambda sample: "" if sample.id in kept else method.name, drops)


def short(groups: Iterable[SampleGroup], longest: int, drops: Drops) -> list[SampleGroup]:
    """Drops samples with a sequence longer than ``longest`` tokens."""
    return _keep_samples(groups, lambda sample: OVER_LENGTH if sample.longest > longest else "", drops)


def _keep_groups(
    groups: Iterable[SampleGroup], reason: Callable[[SampleGroup], str], drops: Drops
) -> list[SampleGroup]:
    kept = []
    for group in groups:
        if cause := reason(group):
            drops[group.id] = cause
        else:
            kept.append(group)
    return kept


def _keep_samples(groups: Iterable[SampleGroup], reason: Callable[[Sample], str], drops: Drops) -> list[SampleGroup]:
    kept = []
    for group in groups:
        remaining = []
        for sample in group.samples:
            if cause := reason(sample):
                drops[sample.id] = cause
            else:
                remaining.append(sample)
        kept.append(group.only(tuple(remaining)))
    return _keep_groups(kept, lambda group: ALONE if len(group.samples) < MIN_SAMPLES else "", drops)
