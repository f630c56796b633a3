"""Batches of token sequences, and how trajectories are packed into them."""

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
"""Number of rows packed together: more make fuller batches, fewer keep more of the order."""


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
    """Returns ragged values as a matrix, each line filled behind its end.

    Args:
        values: (T), all lines end to end.
        offsets: (S+1), where each of S lines begins in ``values``.
        fill: what stands where a line has nothing.
        left: fill before each line instead.

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
    """Returns sequences of numbers as a matrix (lines, longest), filled as by :func:`padded`."""
    parts = [np.asarray(line, dtype) for line in lines]
    values = np.concatenate([np.empty(0, dtype), *parts])
    return padded(values, offsets_of([len(part) for part in parts]), fill, left=left)


def plan_batches(
    source: Source, rows: NDArray[np.int64], budget: int, is_padded: bool, seed: int | None, oversize: Oversize
) -> list[NDArray[np.int64]]:
    """Divides rows into batches, each row once; equal arguments give equal plans.

    Rows are packed some thousands at a time, best fit, the longest first, which comes within a few per cent of the
    fewest batches possible. A padded batch costs its number of sequences times the longest of them.

    Args:
        source: where the lengths of rows are read.
        rows: (n), row numbers; rows without tokens are left out.
        budget: entries of each token column per batch, padding included.
        is_padded: whether the sequences of a batch will be padded to the longest.
        seed: shuffles rows and batches; ``None`` keeps the order, but for the packing.
        oversize: ``error`` or ``skip`` for a row that alone is over the budget.

    Returns:
        The row numbers of each batch.

    Raises:
        ConfigError: a row is over the budget, with ``oversize="error"``.
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
    """Best fit decreasing: each row goes where it leaves the least room."""
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
    """Puts rows of similar length together, so that little is padding."""
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
