"""Which of the groups that wait are trained on first (AstraFlow, ``dataflow/rollout_buffer.py``, ``RolloutBuffer``).

``edf``, earliest deadline first: by the oldest version in the group, which is the first to be too old. In the order of
completion (``fifo``) long rollouts, which were begun earliest, would wait behind short ones and be dropped, and the
trainer would see mostly short ones. Equals come in the order of completion, then by id, so that the order in which
groups are handed in says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megaflow_hpc.training.algorithms.samples import SampleGroup


def ordered(groups: Iterable[SampleGroup], order: Literal["edf", "fifo"]) -> list[SampleGroup]:
    """Sorts groups; for ``edf`` one in which nothing was sampled comes first, since it is only settled."""
    return sorted(groups, key=lambda group: (group.oldest if order == "edf" else 0, group.time_ns, group.id))
