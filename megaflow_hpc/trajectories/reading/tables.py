"""Makes Arrow tables of a store: rollouts, turns, sequences. The tables have the ids of their rollouts in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories.hdf5.columns import Array, Integers, text
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, ROW_COLUMNS
from megaflow_hpc.trajectories.reading.sources import Source, items_of

Table = Literal["rollouts", "turns", "sequences"]
Column = Callable[[str], Array]

_ROLLOUT_COLUMNS = (*(column.name for column in ROW_COLUMNS), "tokens", "sampled_tokens", "duration_s")
_TURN_COLUMNS = tuple(column.name for column in COLUMNS.values() if column.group == "turns")


def table(source: Source, column: Column, rewards: Sequence[str], name: Table, rows: Integers) -> Any:
    """Returns a ``pyarrow.Table``. :meth:`TrajectoryStore.to_arrow` describes it.

    Args:
        column: Returns a column of the store by name.
        rewards: Names of the rewards.
        rows: Row numbers, in the order of the table.

    Raises:
        ConfigError: The name is unknown, or pyarrow is not installed.
    """
    if name not in get_args(Table):
        raise ConfigError(f"table {name!r}: expected one of {', '.join(get_args(Table))}")
    pa = installed("pyarrow")
    if name == "rollouts":
        return pa.table({one: column(one)[rows] for one in (*_ROLLOUT_COLUMNS, *(f"rewards/{r}" for r in rewards))})
    return (_turns if name == "turns" else _sequences)(pa, source, column("id"), rows)


def installed(package: str) -> Any:
    """Imports and returns an optional package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return __import__(package)
    except ImportError:
        raise ConfigError(f"{package}: not installed; pip install {package}") from None


def _turns(pa: Any, source: Source, ids: Array, rows: Integers) -> Any:
    column = source.column
    turns, counts = items_of(column("trajectories/turn_offset"), rows)
    columns: dict[str, Any] = {"rollout": ids[np.repeat(rows, counts)]}
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    columns["turn"] = np.arange(len(turns)) - starts
    for name in _TURN_COLUMNS:
        values = column(f"turns/{name}")[turns]
        columns[name] = text(values) if values.dtype.kind in "SO" else values
    # The file numbers sequences and tokens throughout; the table numbers them within the rollout and the sequence.
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
