"""Converts rows of a store to padded or packed batches of token sequences, and to Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.resources import imported
from megaflow_hpc.trajectories.hdf5.columns import Array, Integers, text
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, ROW_COLUMNS
from megaflow_hpc.trajectories.reading.sources import Source, items_of, offsets_of

Oversize = Literal["error", "skip"]

POOL = 4096
"""Number of rows to pack together. Higher values fill batches better. Lower values keep more of the rows' order."""


def make_batch(source: Source, rows: Integers, pad: int | None) -> dict[str, Array]:
    """Builds a batch from row numbers. See :meth:`~megaflow_hpc.trajectories.reading.store.TrajectoryStore.batch`."""
    flat = source.flat(rows)
    tokens: dict[str, tuple[Array, Any]] = {
        "tokens": (flat.tokens, pad),
        "loss_mask": (flat.loss_mask, 0),
        "logprobs": (np.where(np.isnan(flat.logprobs), np.float32(0), flat.logprobs), 0),  # NaN × 0 is NaN
        "weight_version": (flat.weight_versions, -1),
    }
    batch: dict[str, Array] = {}
    for name, (column, fill) in tokens.items():
        batch[name] = column if pad is None else padded(column, flat.offsets, fill)
    batch["offsets"] = flat.offsets
    batch["trajectory"] = flat.row
    batch["group"] = text(source.column("trajectories/group_id")[flat.row]).astype(np.str_)
    batch["reward"] = source.column("trajectories/reward")[flat.row]
    batch["policy"] = flat.policy.astype(np.str_)
    return batch


def padded(values: Array, offsets: Integers, fill: Any, *, left: bool = False) -> Array:
    """Converts ragged values to a padded matrix.

    Args:
        values: The concatenated lines, shape (T,).
        offsets: Offsets of the S lines in ``values``, shape (S+1,).
        fill: Padding value.
        left: Whether to pad at the start of each line instead of the end.

    Returns:
        Matrix of shape (S, longest), with the dtype of ``values``.
    """
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    matrix = np.full((len(lengths), width), fill, values.dtype)
    position = np.arange(width)
    is_value = position >= (width - lengths)[:, None] if left else position < lengths[:, None]
    matrix[is_value] = values
    return matrix


def padded_lines(lines: Sequence[Any], dtype: Any, fill: Any, *, left: bool = False) -> Array:
    """Pads sequences of numbers to a matrix of shape (lines, longest), like :func:`padded`."""
    parts = [np.asarray(line, dtype) for line in lines]
    values = np.concatenate([np.empty(0, dtype), *parts])
    return padded(values, offsets_of([len(part) for part in parts]), fill, left=left)


def plan_batches(
    source: Source, rows: Integers, budget: int, is_padded: bool, seed: int | None, oversize: Oversize
) -> list[Integers]:
    """Divides rows into batches. Each row is used exactly once, and the result is deterministic.

    Packs :data:`POOL` rows at a time by best-fit decreasing, which needs a few per cent more batches than the minimum.
    The size of a padded batch is its number of sequences times the length of the longest sequence.

    Args:
        source: Source of the row lengths.
        rows: Row numbers, shape (n,). Rows without tokens are skipped.
        budget: Maximum number of entries of each token column per batch, including padding.
        is_padded: Whether the sequences of a batch will be padded to the longest sequence.
        seed: Seed for shuffling rows and batches. If ``None``, rows keep their order as far as packing allows.
        oversize: How to handle a row that exceeds the budget on its own: ``error`` or ``skip``.

    Returns:
        The row numbers of each batch.

    Raises:
        ConfigError: A row exceeds the budget, with ``oversize="error"``.
    """
    sequences, counts = items_of(source.column("trajectories/sequence_offset"), rows)
    sequence_lengths = np.diff(source.column("sequences/token_offset"))[sequences]
    owners = np.repeat(np.arange(len(rows)), counts)
    tokens = np.zeros(len(rows), np.int64)
    np.add.at(tokens, owners, sequence_lengths)
    longest = np.zeros(len(rows), np.int64)
    np.maximum.at(longest, owners, sequence_lengths)
    cost = longest * counts if is_padded else tokens
    too_large = np.flatnonzero(cost > budget)
    if oversize == "error" and len(too_large):
        first = too_large[0]
        raise ConfigError(
            f"trajectory {source.scalar('id', int(rows[first]))}: {cost[first]} tokens do not fit a batch of {budget}; "
            "raise token_budget, or leave such trajectories out with oversize='skip'"
        )
    usable = np.flatnonzero((tokens > 0) & (cost <= budget))
    random = np.random.default_rng(seed)
    if seed is not None:
        random.shuffle(usable)
    plan: list[Integers] = []
    for start in range(0, len(usable), POOL):
        pool = usable[start : start + POOL]
        packed = _pack_padded(pool, longest, counts, budget) if is_padded else _pack(pool, tokens, budget)
        plan += [rows[numbers] for numbers in packed]
    if seed is not None:
        random.shuffle(plan)
    return plan


def _pack(pool: Integers, tokens: Integers, budget: int) -> list[Integers]:
    """Packs by best-fit decreasing. Each row goes to the batch with the least remaining space into which it fits."""
    bins: list[list[int]] = []
    space = np.empty(len(pool), np.int64)
    for item in _longest_first(pool, tokens):
        remaining = space[: len(bins)] - tokens[item]
        fitting = np.flatnonzero(remaining >= 0)
        if len(fitting):
            best = int(fitting[np.argmin(remaining[fitting])])
            bins[best].append(item)
            space[best] = remaining[best]
        else:
            space[len(bins)] = budget - tokens[item]
            bins.append([item])
    position = {item: number for number, item in enumerate(pool.tolist())}
    return [np.array(sorted(items, key=lambda item: position[item]), np.int64) for items in bins]


def _pack_padded(pool: Integers, longest: Integers, counts: Integers, budget: int) -> list[Integers]:
    """Groups rows of similar length, to minimise padding."""
    bins: list[list[int]] = []
    width = lines = 0
    for item in _longest_first(pool, longest):
        lines += int(counts[item])
        if not bins or width * lines > budget:
            bins.append([])
            width = int(longest[item])  # the longest row of the batch, because rows are sorted longest first
            lines = int(counts[item])
        bins[-1].append(item)
    return [np.array(items, np.int64) for items in bins]


def _longest_first(pool: Integers, lengths: Integers) -> list[int]:
    order: list[int] = pool[np.argsort(-lengths[pool], kind="stable")].tolist()
    return order


# --- Arrow tables of rollouts, turns and sequences, which share the ids of rollouts -----------------------------------

Table = Literal["rollouts", "turns", "sequences"]
Column = Callable[[str], Array]

_ROLLOUT_COLUMNS = (*(column.name for column in ROW_COLUMNS), "tokens", "sampled_tokens", "duration_s")
_TURN_COLUMNS = tuple(column.name for column in COLUMNS.values() if column.group == "turns")


def arrow_table(source: Source, column: Column, rewards: Sequence[str], name: Table, rows: Integers) -> Any:
    """Builds a ``pyarrow.Table``. See :meth:`TrajectoryStore.to_arrow`.

    Args:
        column: Returns a column of the store by name.
        rewards: Names of the rewards.
        rows: Row numbers, in the order of the table.

    Raises:
        ConfigError: The name is unknown, or pyarrow is not installed.
    """
    if name not in get_args(Table):
        raise ConfigError(f"table {name!r}: expected one of {', '.join(get_args(Table))}")
    pa = imported("pyarrow")
    if name == "rollouts":
        return pa.table({one: column(one)[rows] for one in (*_ROLLOUT_COLUMNS, *(f"rewards/{r}" for r in rewards))})
    return (_turns if name == "turns" else _sequences)(pa, source, column("id"), rows)


def _turns(pa: Any, source: Source, ids: Array, rows: Integers) -> Any:
    column = source.column
    turns, counts = items_of(column("trajectories/turn_offset"), rows)
    columns: dict[str, Any] = {"rollout": ids[np.repeat(rows, counts)]}
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    columns["turn"] = np.arange(len(turns)) - starts
    for name in _TURN_COLUMNS:
        values = column(f"turns/{name}")[turns]
        columns[name] = text(values) if values.dtype.kind in "SO" else values
    # Sequences and tokens are numbered across the whole file, but in the table within their rollout and sequence.
    sequence = columns["sequence"]
    known = sequence >= 0
    firsts = np.repeat(column("trajectories/sequence_offset")[rows], counts)
    tokens = np.where(known, column("sequences/token_offset")[np.where(known, sequence, 0)], 0)
    columns["sequence"] = np.where(known, sequence - firsts, -1)
    for name in ("token_start", "token_end"):
        columns[name] = np.where(known, columns[name] - tokens, 0)
    return pa.table(columns)


def _sequences(pa: Any, source: Source, ids: Array, rows: Integers) -> Any:
    flat = source.flat(rows)
    offsets = pa.array(flat.offsets, pa.int64())
    columns: dict[str, Any] = {"rollout": ids[flat.row], "policy": flat.policy}
    for name in ("tokens", "logprobs", "loss_mask", "weight_versions"):
        columns[name] = pa.LargeListArray.from_arrays(offsets, pa.array(getattr(flat, name)))
    return pa.table(columns)
