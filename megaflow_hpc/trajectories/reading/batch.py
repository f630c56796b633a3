"""Build batches of token sequences, and pack trajectories into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories.hdf5.columns import text
from megaflow_hpc.trajectories.reading.sources import Source, offsets_of

Oversize = Literal["error", "skip"]

POOL = 4096
"""Number of rows packed together. More rows make fuller batches, fewer keep more of the order."""


def make_batch(source: Source, rows: NDArray[np.int64], pad: int | None) -> dict[str, NDArray[Any]]:
    """Implements :meth:`~megaflow_hpc.trajectories.reading.store.TrajectoryStore.batch` for row numbers."""
    flat = source.flat(rows)
    tokens: dict[str, tuple[NDArray[Any], Any]] = {
        "tokens": (flat.tokens, pad),
        "loss_mask": (flat.loss_mask, 0),
        "logprobs": (np.where(np.isnan(flat.logprobs), np.float32(0), flat.logprobs), 0),  # NaN × 0 is NaN
        "weight_version": (flat.weight_versions, -1),
    }
    group, reward = source.column("trajectories/group_id"), source.column("trajectories/reward")
    batch = {
        name: column if pad is None else padded(column, flat.offsets, fill) for name, (column, fill) in tokens.items()
    }
    return {
        **batch,
        "offsets": flat.offsets,
        "trajectory": flat.row,
        "group": text(group[flat.row]).astype(np.str_),
        "reward": reward[flat.row],
        "policy": flat.policy.astype(np.str_),
    }


def padded(values: NDArray[Any], offsets: NDArray[np.int64], fill: Any, *, left: bool = False) -> NDArray[Any]:
    """Returns ragged values as a matrix. Each line is filled at its end.

    Args:
        values: (T), the concatenated lines.
        offsets: (S+1), the start of each of S lines in ``values``.
        fill: Value of the padding.
        left: Pad at the start of each line instead.

    Returns:
        (S, longest), of the type of ``values``.
    """
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    found = np.full((len(lengths), width), fill, values.dtype)
    place = np.arange(width)
    inside = place >= (width - lengths)[:, None] if left else place < lengths[:, None]
    found[inside] = values
    return found


def padded_lines(lines: Sequence[Any], dtype: Any, fill: Any, *, left: bool = False) -> NDArray[Any]:
    """Returns sequences of numbers as a matrix (lines, longest), padded in the same way as by :func:`padded`."""
    parts = [np.asarray(line, dtype) for line in lines]
    values = np.concatenate([np.empty(0, dtype), *parts])
    return padded(values, offsets_of([len(part) for part in parts]), fill, left=left)


def plan_batches(
    source: Source, rows: NDArray[np.int64], budget: int, is_padded: bool, seed: int | None, oversize: Oversize
) -> list[NDArray[np.int64]]:
    """Divides rows into batches, each row once. Equal arguments give equal plans.

    Some thousands of rows are packed at a time, best fit, longest first. The result has a few per cent more batches
    than the minimum. The cost of a padded batch is its number of sequences times the length of the longest.

    Args:
        source: Source of the rows' lengths.
        rows: (n), row numbers. Rows without tokens are left out.
        budget: Maximum number of entries of each token column per batch, including padding.
        is_padded: Whether the sequences of a batch will be padded to the longest.
        seed: Shuffles rows and batches. ``None`` keeps the order, except for the packing.
        oversize: ``error`` or ``skip`` for a row that alone exceeds the budget.

    Returns:
        The row numbers of each batch.

    Raises:
        ConfigError: A row exceeds the budget, with ``oversize="error"``.
    """
    first = source.column("trajectories/sequence_offset")
    bounds = source.column("sequences/token_offset")
    tokens, count = bounds[first[rows + 1]] - bounds[first[rows]], first[rows + 1] - first[rows]
    if is_padded:
        longest = np.zeros(len(rows), np.int64)
        owner = np.repeat(np.arange(len(rows)), count)
        sequence = np.repeat(first[rows] - np.cumsum(count) + count, count) + np.arange(int(count.sum()))
        np.maximum.at(longest, owner, bounds[sequence + 1] - bounds[sequence])
        cost = longest * count
    else:
        longest, cost = np.zeros(len(rows), np.int64), tokens
    if oversize == "error" and (cost > budget).any():
        row, size = int(rows[cost > budget][0]), int(cost[cost > budget][0])
        raise ConfigError(
            f"trajectory {source.scalar('id', row)}: {size} tokens do not fit a batch of {budget}; "
            "raise token_budget, or leave such trajectories out with oversize='skip'"
        )
    usable = np.flatnonzero((tokens > 0) & (cost <= budget))
    random = np.random.default_rng(seed)
    if seed is not None:
        random.shuffle(usable)
    plan: list[NDArray[np.int64]] = []
    for start in range(0, len(usable), POOL):
        pool = usable[start : start + POOL]
        packed = _pack_padded(pool, longest, count, budget) if is_padded else _pack(pool, tokens, budget)
        plan += [rows[numbers] for numbers in packed]
    if seed is not None:
        random.shuffle(plan)
    return plan


def _pack(pool: NDArray[np.int64], tokens: NDArray[np.int64], budget: int) -> list[NDArray[np.int64]]:
    """Pack by best fit decreasing: each row goes to the batch where it leaves the least space."""
    bins: list[list[int]] = []
    room = np.empty(len(pool), np.int64)
    for item in pool[np.argsort(-tokens[pool], kind="stable")].tolist():
        left = room[: len(bins)] - tokens[item]
        fitting = np.flatnonzero(left >= 0)
        if len(fitting):
            best = int(fitting[np.argmin(left[fitting])])
            bins[best].append(item)
            room[best] = left[best]
        else:
            room[len(bins)] = budget - tokens[item]
            bins.append([item])
    place = {item: number for number, item in enumerate(pool.tolist())}
    return [np.array(sorted(numbers, key=place.__getitem__), np.int64) for numbers in bins]


def _pack_padded(
    pool: NDArray[np.int64], longest: NDArray[np.int64], count: NDArray[np.int64], budget: int
) -> list[NDArray[np.int64]]:
    """Group rows of similar length, so that there is little padding."""
    bins: list[NDArray[np.int64]] = []
    current: list[int] = []
    width = lines = 0
    for item in pool[np.argsort(-longest[pool], kind="stable")].tolist():
        if current and max(width, int(longest[item])) * (lines + int(count[item])) > budget:
            bins.append(np.array(current, np.int64))
            current, width, lines = [], 0, 0
        current.append(item)
        width, lines = max(width, int(longest[item])), lines + int(count[item])
    return [*bins, np.array(current, np.int64)] if current else bins
