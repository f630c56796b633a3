"""Failures grouped by similar error, and the slowest rollouts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from megaflow_hpc.report.rollouts import RolloutColumns
from megaflow_hpc.report.series import Integers, significant

MAX_STRAGGLERS = 25
MAX_FAILURES = 40
"""Maximum number of failures, causes or nodes to list."""


class Failure(msgspec.Struct, kw_only=True):
    """Rollouts that failed with the same error. Numbers in the error are ignored."""

    kind: str
    error: str
    """Error of the first rollout in the group."""
    rollouts: int
    example: str
    """Id of the first rollout in the group."""
    nodes: int


class Straggler(msgspec.Struct, kw_only=True):
    """An unusually slow rollout."""

    rollout: str
    seconds: float
    usual: float
    """Median duration in seconds of the task if at least three samples ran, otherwise of the policy."""
    phase: str
    """The longest phase. Empty if unknown."""
    node: str


def failures_of(rows: RolloutColumns) -> list[Failure]:
    """Groups rollouts by kind and text of their error, ignoring numbers. Largest group first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for row in range(len(rows)):
        kind = rows.error_kind.of(row)
        if kind:
            pattern = re.sub(r"\d", "0", rows.error[row])
            groups.setdefault((kind, pattern), []).append(row)
    largest = sorted(groups.items(), key=lambda item: -len(item[1]))[:MAX_FAILURES]
    return [
        Failure(
            kind=kind,
            error=rows.error[own[0]],
            rollouts=len(own),
            example=rows.ids[own[0]],
            nodes=len({int(rows.node.codes[row]) for row in own}),
        )
        for (kind, _), own in largest
    ]


def stragglers_of(rows: RolloutColumns) -> list[Straggler]:
    """Returns the slowest completed or truncated rollouts, slowest first, with the usual duration for comparison."""
    seconds = rows.seconds
    carried_out = np.flatnonzero(rows.carried_out)
    slowest = carried_out[np.argsort(-seconds[carried_out], kind="stable")][:MAX_STRAGGLERS]
    stragglers = []
    for row in slowest.tolist():
        of_policy = rows.carried_out & (rows.policy.codes == rows.policy.codes[row])
        of_task = of_policy & (rows.task.codes == rows.task.codes[row])
        alike = of_task if of_task.sum() >= 3 else of_policy
        phases = {name: float(values[row]) for name, values in rows.phases.items() if not np.isnan(values[row])}
        stragglers.append(
            Straggler(
                rollout=rows.ids[row],
                seconds=significant(float(seconds[row])),
                usual=significant(float(np.median(seconds[alike]))),
                phase=max(phases, key=lambda name: phases[name]) if any(phases.values()) else "",
                node=rows.node.of(row),
            )
        )
    return stragglers


def counted(names: Sequence[str], codes: Integers) -> dict[str, int]:
    """Counts the occurrences of each name, most frequent first."""
    counts = Counter(names[code] for code in codes.tolist())
    return dict(counts.most_common(MAX_FAILURES))
