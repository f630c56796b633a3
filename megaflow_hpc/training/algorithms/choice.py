"""Chooses the groups of one step: applies the steps of ``data`` in order.

A step settles ``want`` groups, whether it trains on them or drops them. This is also the number of groups requested
for each step. So dropped groups make a step smaller, but no later step waits for groups that were never requested. With
``refill``, the planner settles more groups until the step is full.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaflow_hpc.config.objective import AdvantageConfig
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.training.algorithms import filters, rewards
from megaflow_hpc.training.algorithms.samples import Earlier, SampleGroup

REPLAYED_STEPS = 2
"""Number of recent full steps whose groups may be replayed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of choosing the groups of a step."""

    taken: tuple[SampleGroup, ...]
    """Groups to train on, in order. Each has its remaining samples, with penalties and weights applied."""
    drops: dict[str, str]
    """Id of each dropped sample or group → reason."""
    left: tuple[SampleGroup, ...]
    """Groups deferred to a later step."""
    replayed: tuple[SampleGroup, ...]
    """Replayed groups, which an earlier step already trained on."""
    state: dict[str, Any]
    """State for the next call."""


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
) -> Choice:
    """Chooses the groups that one step trains on.

    Args:
        config: the section ``training``; ``data`` is used.
        groups: complete groups in any order, without duplicates.
        version: ordinal of the policy's newest weights. Staleness is relative to it.
        want: maximum number of groups to settle.
        replayed: groups that earlier steps trained on, newest last. Those of the last :data:`REPLAYED_STEPS` steps
            are enough.
        state: the state that the last call returned; ``None`` on the first call.
        random: generator for ``shuffle`` and functions.
        advantage: the policy's advantage settings, which name the rewards that must be present and must differ.
        pass_threshold: minimum reward of a passed rollout.
        bound: maximum age of a token, in weight versions; older rollouts are dropped. Replayed groups are exempt.
        due: ids of the groups to settle before others, whatever their age.
        earlier: passed samples of earlier steps, for functions that add them to groups.

    Raises:
        ConfigError: a reward is infinite, no rollout has a reward of a given name, or a function returned something
            else than its contract says.
    """
    compared = advantage or AdvantageConfig()
    staleness = next((step.staleness for step in config.data if step.staleness is not None), None)
    share = next((step.replay for step in config.data if step.replay), None)
    random = random or np.random.default_rng(0)
    queue = sorted(ordered(groups), key=lambda group: group.id not in due)
    drops: filters.Drops = {}
    taken = filters.survivors(rewards.plain(queue[:want]), compared, drops)
    if bound is not None:
        taken = filters.fresh(taken, bound, version, drops)
    for step in config.data:
        if step.pass_rate is not None:
            taken = filters.within_pass_rates(taken, step.pass_rate, pass_threshold, drops)
        elif step.staleness is not None:
            taken = filters.fresh(taken, step.staleness, version, drops)
        elif step.shuffle is not None:
            taken = rewards.shuffled(taken, random)
        elif step.method is not None:
            taken = filters.by_method(taken, step.method, version, random, drops, earlier)
        elif step.over_length is not None and step.over_length.how == "drop":
            taken = filters.short(taken, step.over_length.longest, drops)
        elif step.zero_variance is not None:
            taken = filters.varied(taken, compared, drops)
        else:
            taken = rewards.shaped(taken, step)
    again: list[SampleGroup] = []
    times = dict((state or {}).get("times", {}))
    if share is not None:
        candidates = filters.survivors(rewards.plain(replayable(replayed, config.batch, times)), compared, {})
        for step in config.data:
            candidates = rewards.shaped(candidates, step)
            if step.method is not None:
                candidates = filters.by_method(candidates, step.method, version, random, {})
        if staleness is not None:
            candidates = filters.fresh(candidates, staleness, version, {})
        added = {sample.id for group in taken for sample in group.samples}  # a rollout may be in a step only once
        candidates = [group for group in candidates if added.isdisjoint(sample.id for sample in group.samples)]
        again = replay(candidates, len(taken), share)
        replayed_ids = {group.id for group in replayed}
        times = {group: count for group, count in times.items() if group in replayed_ids}
        times |= {group.id: times.get(group.id, 0) + 1 for group in again}
    return Choice(tuple(taken), drops, tuple(queue[want:]), tuple(again), {"times": times} if times else {})


def ordered(groups: Iterable[SampleGroup]) -> list[SampleGroup]:
    """Sorts groups by their oldest version. Groups without sampled tokens come first, because they are only settled."""
    return sorted(groups, key=lambda group: (group.oldest, group.time_ns, group.id))


def replayable(replayed: Sequence[SampleGroup], batch: int, times: Mapping[str, int]) -> list[SampleGroup]:
    """Returns the groups of ``replayed`` that may be replayed again.

    Args:
        replayed: groups that earlier steps trained on, newest last.
        batch: number of groups in a full step.
        times: group id → number of times it was replayed.
    """
    return [group for group in replayed[-REPLAYED_STEPS * batch :] if not times.get(group.id, 0)]


def replay(candidates: Sequence[SampleGroup], fresh: int, share: float) -> list[SampleGroup]:
    """Returns the newest ``candidates`` to add to ``fresh`` new groups: at most ``share`` of the step's groups."""
    count = min(int(fresh * share / (1 - share) + 1e-9), len(candidates))
    return list(candidates[len(candidates) - count :])
