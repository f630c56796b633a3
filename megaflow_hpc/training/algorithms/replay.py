"""Chooses groups to train on again (AstraFlow, ``dataflow/replay_selectors.py`` and ``data_serving.py``).

AstraFlow replays without limit and supports only ``latest``. Here ``times`` limits the replays of a group, and the
staleness filter also applies to replayed groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megaflow_hpc.config.data_algorithms import ReplayConfig
from megaflow_hpc.training.algorithms.samples import SampleGroup


def replayable(replayed: Sequence[SampleGroup], config: ReplayConfig, times: Mapping[str, int]) -> list[SampleGroup]:
    """Returns the groups of ``replayed`` (the latest last) that may be replayed again."""
    latest = replayed[max(len(replayed) - config.size, 0) :]
    return [group for group in latest if times.get(group.id, 0) < config.times]


def replay(
    candidates: Sequence[SampleGroup], fresh: int, config: ReplayConfig, random: np.random.Generator
) -> list[SampleGroup]:
    """Returns the groups to add to ``fresh`` new ones, so that their share of the step is at most ``ratio``."""
    count = min(int(fresh * config.ratio / (1 - config.ratio) + 1e-9), len(candidates))
    if config.select == "latest":
        return list(candidates[len(candidates) - count :])
    return [candidates[i] for i in sorted(random.choice(len(candidates), size=count, replace=False))]
