"""What one step trains on: the steps of ``data``, one after the other, on as many groups as a batch has tasks.

A step settles ``want`` groups, be they trained on or dropped: as many as are asked for at a time. So what is dropped
makes a step smaller, and never makes a later one wait for groups that nobody asks for; or, with ``batch.refill``, who
plans settles more groups until the step is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaflow_hpc.config.objective import AdvantageConfig
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.training.algorithms import filters, rewards
from megaflow_hpc.training.algorithms.order import ordered
from megaflow_hpc.training.algorithms.replay import replay, replayable
from megaflow_hpc.training.algorithms.samples import SampleGroup


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of the groups that were there."""

    taken: tuple[SampleGroup, ...]
    """Trained on, in this order; each with the samples that are left, their penalties and weights."""
    drops: dict[str, str]
    """Id → cause: of a sample that has left its group, of a group that is not taken."""
    left: tuple[SampleGroup, ...]
    """Not looked at yet; they wait for a later step."""
    replayed: tuple[SampleGroup, ...]
    """Trained on again, of those handed in."""
    state: dict[str, Any]
    """For the next call."""


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
) -> Choice:
    """Chooses what one step trains on.

    Args:
        config: the section ``training``, of which ``data`` counts.
        groups: complete ones, in any order, each once.
        version: ordinal of the policy's newest weights, from which staleness counts.
        want: groups that are settled, at most.
        replayed: groups that were taken before, the latest last, as they were handed in or as they were taken; the last
            ``size`` of ``replay`` are enough.
        state: what the last call returned; nothing at first.
        random: for ``shuffle``.
        advantage: the policy's; says which rewards have to be there and have to differ.
        pass_threshold: Reward from which a rollout has passed.

    Raises:
        ConfigError: a reward is infinite, or no rollout has one of the rewards that are named.
    """
    compared = advantage or AdvantageConfig()
    staleness = next((step.staleness for step in config.data if step.staleness is not None), None)
    repeat = next((step.replay for step in config.data if step.replay), None)
    queue = ordered(groups)
    drops: filters.Drops = {}
    taken = filters.survivors(rewards.plain(queue[:want]), compared, drops)
    for step in config.data:
        if step.pass_rate is not None:
            taken = filters.within_pass_rates(taken, step.pass_rate, pass_threshold, drops)
        elif step.staleness is not None:
            taken = filters.fresh(taken, step.staleness, version, drops)
        elif step.shuffle is not None:
            taken = rewards.shuffled(taken, random or np.random.default_rng(0))
        elif step.zero_variance is not None:
            taken = filters.varied(taken, compared, drops)
        else:
            taken = rewards.shaped(taken, step)
    again: list[SampleGroup] = []
    times = dict((state or {}).get("times", {}))
    if repeat is not None:
        candidates = filters.survivors(rewards.plain(replayable(replayed, repeat, times)), compared, {})
        for step in config.data:
            candidates = rewards.shaped(candidates, step)
        if staleness is not None:
            candidates = filters.fresh(candidates, staleness, version, {})
        again = replay(candidates, len(taken), repeat)
        known = {group.id for group in replayed}
        times = {group: count for group, count in times.items() if group in known}
        times |= {group.id: times.get(group.id, 0) + 1 for group in again}
    return Choice(tuple(taken), drops, tuple(queue[want:]), tuple(again), {"times": times} if times else {})
