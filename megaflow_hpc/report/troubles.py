"""Failures, grouped by similarity, and the slowest rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.report.rollouts import RolloutColumns
from megaflow_hpc.report.series import significant

SLOWEST = 25
ERRORS = 40
"""Maximum number of distinct failures, or nodes."""


class Failure(msgspec.Struct, kw_only=True):
    """Rollouts that failed with the same error, apart from numbers in it."""

    kind: str
    error: str
    """Error of the first of them."""
    rollouts: int
    example: str
    """Id of the first of them."""
    nodes: int


class Straggler(msgspec.Struct, kw_only=True):
    """One of the slowest rollouts."""

    rollout: str
    seconds: float
    usual: float
    """Median of its task if at least three samples ran, otherwise of its policy."""
    phase: str
    """Its longest phase; empty if unknown."""
    node: str


def failures_of(rows: RolloutColumns) -> list[Failure]:
    """Returns rollouts with an error, grouped by kind and text without numbers, largest group first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for row in np.flatnonzero(rows.error_kind.codes != _code(rows.error_kind.names, "")).tolist():
        text = "".join("0" if c.isdigit() else c for c in rows.error[row])
        groups.setdefault((rows.error_kind.of(row), text), []).append(row)
    most = sorted(groups.items(), key=lambda item: -len(item[1]))[:ERRORS]
    return [
        Failure(
            kind=kind,
            error=rows.error[own[0]],
            rollouts=len(own),
            example=rows.ids[own[0]],
            nodes=len({int(rows.node.codes[row]) for row in own}),
        )
        for (kind, _), own in most
    ]


def stragglers_of(rows: RolloutColumns) -> list[Straggler]:
    """Returns the slowest rollouts that were carried out, slowest first, with the usual duration."""
    seconds, ran = rows.seconds, rows.carried_out
    slowest = [int(row) for row in np.argsort(-np.where(ran, seconds, -1.0), kind="stable")[:SLOWEST] if ran[row]]
    found = []
    for row in slowest:
        own = ran & (rows.policy.codes == rows.policy.codes[row])
        alike = own & (rows.task.codes == rows.task.codes[row])
        parts = {name: float(values[row]) for name, values in rows.phases.items() if values[row] == values[row]}
        found.append(
            Straggler(
                rollout=rows.ids[row],
                seconds=significant(float(seconds[row])),
                usual=significant(float(np.median(seconds[alike if alike.sum() >= 3 else own]))),
                phase=max(parts, key=lambda name: parts[name]) if any(parts.values()) else "",
                node=rows.node.of(row),
            )
        )
    return found


def _code(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -1


def counted(names: Sequence[str], codes: NDArray[np.int64]) -> dict[str, int]:
    """Returns the count of each name, most frequent first."""
    counts = Counter(names[code] for code in codes.tolist())
    return dict(counts.most_common(ERRORS))
