"""Chooses groups to train on again (AstraFlow, ``dataflow/replay_selectors.py`` and ``data_serving.py``).

AstraFlow replays a group without limit. Here a group is replayed once, and the staleness filter applies to it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megaflow_hpc.config.data_algorithms import ReplayConfig
from megaflow_hpc.training.algorithms.samples import SampleGroup


def replayable(replayed: Sequence[SampleGroup], config: ReplayConfig, times: Mapping[str, int]) -> list[SampleGroup]:
    """Returns the groups of ``replayed`` (the latest last) that may be replayed again."""
    latest = replayed[max(len(replayed) - config.size, 0) :]
    return [group for group in latest if not times.get(group.id, 0)]


def replay(candidates: Sequence[SampleGroup], fresh: int, config: ReplayConfig) -> list[SampleGroup]:
    """Returns the latest groups to add to ``fresh`` new ones, so that their share of the step is at most ``ratio``."""
    count = min(int(fresh * config.ratio / (1 - config.ratio) + 1e-9), len(candidates))
    return list(candidates[len(candidates) - count :])
