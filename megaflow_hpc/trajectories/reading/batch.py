"""Batches of token sequences, and how trajectories are packed into them; and the table that selections read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS
from megaflow_hpc.trajectories.reading.selection import Table
from megaflow_hpc.trajectories.reading.sources import Hdf5Source, Source, text

Oversize = Literal["error", "skip"]

POOL = 4096
"""Rows that are packed together: a longer look finds fuller batches, a shorter one keeps more of the order."""

_WINDOW = 1 << 20
"""Tokens read at a time where a whole token column must be looked through."""


def make_batch(source: Source, rows: NDArray[np.int64], pad: int | None) -> dict[str, NDArray[Any]]:
    """See :meth:`~megaflow_hpc.trajectories.reading.store.TrajectoryStore.batch`."""
    flat = source.flat(rows)
    tokens: dict[str, tuple[NDArray[Any], Any]] = {
        "tokens": (flat.tokens, pad),
        "loss_mask": (flat.loss_mask, 0),
        "logprobs": (flat.logprobs, np.nan),
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
    """Ragged values as (S, longest), filled behind each line's end, or before it."""
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    found = np.full((len(lengths), width), fill, values.dtype)
    place = np.arange(width)
    inside = place >= (width - lengths)[:, None] if left else place < lengths[:, None]
    found[inside] = values
    return found


def plan_batches(
    source: Source, rows: NDArray[np.int64], budget: int, is_padded: bool, seed: int | None, oversize: Oversize
) -> list[NDArray[np.int64]]:
    """Which rows make which batch: each row once, the same for the same arguments.

    Rows are taken some thousands at a time and packed best fit first, the longest rows first (within a few per cent of
    the fewest batches there can be). Padded, a batch costs its sequences times the longest of them.
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
    """Best fit decreasing: each row goes where the least room is left behind it."""
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
    """Neighbours in length together, so that little is padding."""
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


# --- what a selection may name ---------------------------------------------------------------------------------------


def table_of(source: Source) -> Table:
    """The columns of rows, with a few that follow from them."""

    def read(path: str) -> Callable[[], NDArray[Any]]:
        return lambda: source.column(path)

    def spans(path: str) -> Callable[[], NDArray[Any]]:
        return lambda: np.diff(source.column(f"trajectories/{path}"))

    def once(make: Callable[[], NDArray[Any]]) -> Callable[[], NDArray[Any]]:
        kept: list[NDArray[Any]] = []

        def value() -> NDArray[Any]:
            if not kept:
                kept.append(make())
            return kept[0]

        return value

    def tokens() -> NDArray[Any]:
        return np.diff(source.column("sequences/token_offset")[source.column("trajectories/sequence_offset")])

    def duration() -> NDArray[Any]:
        return source.column("trajectories/finished_at") - source.column("trajectories/started_at")

    found = {c.name: read(c.path) for c in COLUMNS.values() if c.group == "trajectories" and c.extent == "n"}
    found |= {"task": found["task_id"], "group": found["group_id"], "sample": found["sample_index"]}
    found |= {
        "tokens": once(tokens),
        "sampled_tokens": once(lambda: _of_turns(source)),
        "duration_s": once(duration),
        "sequences": spans("sequence_offset"),
        "messages": spans("message_offset"),
        "attempts": spans("attempt_offset"),
        "weight_version_min": once(lambda: _versions(source, "weight_version_min", np.minimum)),
        "weight_version_max": once(lambda: _versions(source, "weight_version_max", np.maximum)),
    }
    table = Table(found, source.reward_names(), len(source))
    table.reward = source.reward_column
    return table


def _of_turns(source: Source) -> NDArray[Any]:
    """Sampled tokens of each row."""
    sampled = source.column("turns/token_end") - source.column("turns/token_start")
    return np.diff(np.concatenate([[0], np.cumsum(sampled)])[source.column("trajectories/turn_offset")])


def _versions(source: Source, name: str, extreme: np.ufunc) -> NDArray[Any]:
    """The lowest or highest weight version of each row's sampled tokens; -1 where none was sampled."""
    if isinstance(source, Hdf5Source) and f"sequences/{name}" not in source.file:
        of_sequence = _scan(source, extreme)
    else:
        of_sequence = source.column(f"sequences/{name}").astype(np.int64)
    worst = np.iinfo(np.int32).max if extreme is np.minimum else -1
    owner = source.column("sequences/trajectory")
    found = np.full(len(source), worst, np.int64)
    extreme.at(found, owner, np.where(of_sequence < 0, worst, of_sequence))
    return np.where(found == np.iinfo(np.int32).max, -1, found)


def _scan(source: Hdf5Source, extreme: np.ufunc) -> NDArray[np.int64]:
    """The same by sequence, from the tokens: for files that do not have it as a column."""
    bounds = source.column("sequences/token_offset")
    worst = np.iinfo(np.int32).max if extreme is np.minimum else -1
    found = np.full(len(bounds) - 1, worst, np.int64)
    for start in range(0, int(bounds[-1]), _WINDOW):
        values = source.file["tokens/weight_version"][start : start + _WINDOW].astype(np.int64)
        sampled = np.flatnonzero(values >= 0)
        owner = np.searchsorted(bounds, sampled + start, "right") - 1
        extreme.at(found, owner, values[sampled])
    return np.where(found == np.iinfo(np.int32).max, -1, found)
