"""The order in which waiting groups are trained on (AstraFlow, ``dataflow/rollout_buffer.py``, ``RolloutBuffer``).

Earliest deadline first: the group with the oldest version is the first to be too old. In the order of completion, long
rollouts, which start earliest, would wait behind short ones and be dropped. Equal groups come in the order of
completion, then by id, so that the order in which groups are handed in has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaflow_hpc.training.algorithms.samples import SampleGroup


def ordered(groups: Iterable[SampleGroup]) -> list[SampleGroup]:
    """Sorts groups. A group in which nothing was sampled comes first, since it is only settled."""
    return sorted(groups, key=lambda group: (group.oldest, group.time_ns, group.id))
