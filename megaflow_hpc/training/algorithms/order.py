"""Orders the waiting groups of a step (AstraFlow, ``dataflow/rollout_buffer.py``, ``RolloutBuffer``).

``edf`` (earliest deadline first) sorts by the oldest version in the group, because that group becomes too stale first.
``fifo`` sorts by completion. Long rollouts start earliest and would then wait behind short ones until they are dropped,
so the trainer would see mostly short rollouts. Ties are broken by completion, then by id, so that the result does not
depend on the order of the input.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megaflow_hpc.training.algorithms.samples import SampleGroup


def ordered(groups: Iterable[SampleGroup], order: Literal["edf", "fifo"]) -> list[SampleGroup]:
    """Sorts groups. With ``edf``, a group without sampled tokens comes first, since it is only settled."""
    return sorted(groups, key=lambda group: (group.oldest if order == "edf" else 0, group.time_ns, group.id))
