"""Orders the waiting groups of a step (AstraFlow, ``dataflow/rollout_buffer.py``, ``RolloutBuffer``).

The order is earliest deadline first: the group with the oldest version becomes too stale first. By completion, long
rollouts, which start earliest, would wait behind short ones until they are dropped. Ties are broken by completion, then
by id, so that the result does not depend on the order of the input.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaflow_hpc.training.algorithms.samples import SampleGroup


def ordered(groups: Iterable[SampleGroup]) -> list[SampleGroup]:
    """Sorts groups. A group without sampled tokens comes first, because it is only settled."""
    return sorted(groups, key=lambda group: (group.oldest, group.time_ns, group.id))
