"""Columns from rows: sources that know their rows one by one, and sources put together from others.

A journal has no columns. Its rows are decoded once, the first time a column is asked for, and what then is kept are the
small columns: of rows, sequences and turns, never tokens or messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OPTIONAL, STRING, TEXT
from megaflow_hpc.trajectories.reading.sources import Flat, SequenceView, Source, text
from megaflow_hpc.types import Artifact, Attempt, Turn

_COUNTS = ("sequence_offset", "turn_offset", "message_offset", "attempt_offset")


def flat_of(views: Sequence[tuple[int, SequenceView]]) -> Flat:
    """Sequences with their row numbers, as one."""

    def joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)

    lengths = [len(view.tokens) for _, view in views]
    return Flat(
        np.array([row for row, _ in views], np.int64),
        np.array([view.policy for _, view in views], object),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        joined([view.tokens for _, view in views], np.int32),
        joined([view.logprobs for _, view in views], np.float32),
        joined([view.loss_mask for _, view in views], np.uint8),
        joined([view.weight_versions for _, view in views], np.int32),
    )


class Rowwise:
    """Gives a source that has the row methods of :class:`~megaflow_hpc.trajectories.reading.sources.Source` the
    others."""

    def column(self: Any, path: str) -> NDArray[Any]:
        group, _, name = path.partition("/")
        if group == "rewards":
            return self.reward_column(name)
        if path not in self._built:
            raise KeyError(f"{path}: no column of rows")
        found: NDArray[Any] = self._built[path]
        return found

    def reward_names(self: Any) -> list[str]:
        return sorted(self._built_rewards)

    def reward_column(self: Any, name: str) -> NDArray[np.float32]:
        found = np.full(len(self), np.nan, np.float32)
        for row, value in self._built_rewards[name].items():
            found[row] = value
        return found

    def flat(self: Any, rows: NDArray[np.int64]) -> Flat:
        return flat_of([(row, view) for row in rows.tolist() for view in self.sequences(row)])

    @cached_property
    def _both(self: Any) -> tuple[dict[str, NDArray[Any]], dict[str, dict[int, float]]]:
        scalars = [c for c in COLUMNS.values() if c.group == "trajectories" and c.extent == "n" and c.name != "turns"]
        values: dict[str, list[Any]] = {c.path: [] for c in scalars}
        rewards: dict[str, dict[int, float]] = {}
        counts: dict[str, array[int]] = {name: array("q", [0]) for name in (*_COUNTS, "token_offset")}
        sequences: dict[str, list[Any]] = {
            n: [] for n in ("trajectory", "policy", "weight_version_min", "weight_version_max")
        }
        turns: dict[str, list[Any]] = {name: [] for name in ("sequence", "token_start", "token_end")}
        for row in range(len(self)):
            for column in scalars:
                values[column.path].append(_scalar(self, column.name, row, OPTIONAL.get(column.path)))
            for name, value in self.rewards(row).items():
                rewards.setdefault(name, {})[row] = value
            base, tokens = counts["sequence_offset"][-1], counts["token_offset"][-1]
            views, calls = self.sequences(row), self.turns(row)
            bases = [tokens]
            for view in views:
                bases.append(bases[-1] + len(view.tokens))
                counts["token_offset"].append(bases[-1])
                sampled = view.weight_versions[view.loss_mask == 1]
                low, high = (int(sampled.min()), int(sampled.max())) if len(sampled) else (-1, -1)
                for name, value in zip(sequences, (row, view.policy, low, high), strict=True):
                    sequences[name].append(value)
            for turn in calls:
                known = turn.sequence >= 0
                turns["sequence"].append(base + turn.sequence if known else -1)
                turns["token_start"].append(bases[turn.sequence] + turn.token_start if known else 0)
                turns["token_end"].append(bases[turn.sequence] + turn.token_end if known else 0)
            sizes = (len(views), len(calls), len(self.messages(row)), len(self.attempts(row)))
            for name, size in zip(_COUNTS, sizes, strict=True):
                counts[name].append(counts[name][-1] + size)
        built = {path: _array(path, found) for path, found in values.items()}
        for name in _COUNTS:
            built[f"trajectories/{name}"] = np.array(counts[name], np.int64)
        built["trajectories/turns"] = np.diff(built["trajectories/turn_offset"]).astype(np.int32)
        built["sequences/token_offset"] = np.array(counts["token_offset"], np.int64)
        built |= {f"sequences/{name}": _array(f"sequences/{name}", found) for name, found in sequences.items()}
        built |= {f"turns/{name}": _array(f"turns/{name}", found) for name, found in turns.items()}
        return built, rewards

    @property
    def _built(self) -> dict[str, NDArray[Any]]:
        return self._both[0]

    @property
    def _built_rewards(self) -> dict[str, dict[int, float]]:
        return self._both[1]


def _scalar(source: Source, name: str, row: int, default: Any) -> Any:
    try:
        return source.scalar(name, row)
    except AttributeError:
        return default


def _array(path: str, values: list[Any]) -> NDArray[Any]:
    dtype = COLUMNS[path].dtype if path in COLUMNS else "int32"
    if dtype in (STRING, TEXT):
        found = np.empty(len(values), object)
        found[:] = values
        return found
    return np.array(values, dtype)


class Joined:
    """Rows of several sources in an order of their own: shards and journals as one campaign.

    Args:
        parts: the sources; closed with this one.
        part: (n) which source row i comes from.
        row: (n) its number there.
    """

    def __init__(self, parts: Sequence[Source], part: NDArray[np.int64], row: NDArray[np.int64]) -> None:
        self._parts = list(parts)
        self._part = part
        self._row = row
        self._columns: dict[str, NDArray[Any]] = {}

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def __len__(self) -> int:
        return len(self._part)

    def column(self, path: str) -> NDArray[Any]:
        if path not in self._columns:
            self._columns[path] = self._join(path)
        return self._columns[path]

    def reward_names(self) -> list[str]:
        return sorted({name for part in self._parts for name in part.reward_names()})

    def reward_column(self, name: str) -> NDArray[np.float32]:
        return self.column(f"rewards/{name}")

    def flat(self, rows: NDArray[np.int64]) -> Flat:
        """Each part is asked once; its sequences then go to their places."""
        asked = self._part[rows]
        if len(rows) and (asked == asked[0]).all():
            found = self._parts[asked[0]].flat(self._row[rows])
            return found._replace(row=np.repeat(rows, self._counts(asked[0], self._row[rows])))
        views: list[list[tuple[int, SequenceView]]] = [[] for _ in range(len(rows))]
        for number in np.unique(asked).tolist():
            places = np.flatnonzero(asked == number)
            found = self._parts[number].flat(self._row[rows[places]])
            last = 0
            for place, count in zip(
                places.tolist(), self._counts(number, self._row[rows[places]]).tolist(), strict=True
            ):
                first, last = last, last + count
                for s in range(first, last):
                    cut = slice(found.offsets[s], found.offsets[s + 1])
                    view = SequenceView(found.policy[s], *(column[cut] for column in found[3:]))
                    views[place].append((int(rows[place]), view))
        return flat_of([view for of_row in views for view in of_row])

    def ids(self) -> list[str]:
        return list(text(self.column("trajectories/id")))

    def scalar(self, name: str, row: int) -> Any:
        return self._of(row).scalar(name, int(self._row[row]))

    def rewards(self, row: int) -> dict[str, float]:
        return self._of(row).rewards(int(self._row[row]))

    def messages(self, row: int) -> list[dict[str, Any]]:
        return self._of(row).messages(int(self._row[row]))

    def sequences(self, row: int) -> list[SequenceView]:
        return self._of(row).sequences(int(self._row[row]))

    def turns(self, row: int) -> list[Turn]:
        return self._of(row).turns(int(self._row[row]))

    def attempts(self, row: int) -> list[Attempt]:
        return self._of(row).attempts(int(self._row[row]))

    def artifacts(self, row: int) -> list[Artifact]:
        return self._of(row).artifacts(int(self._row[row]))

    def _of(self, row: int) -> Source:
        return self._parts[self._part[row]]

    def _counts(self, part: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sequences of each of these rows of a part."""
        offsets = self._parts[part].column("trajectories/sequence_offset")
        counts: NDArray[np.int64] = offsets[rows + 1] - offsets[rows]
        return counts

    def _join(self, path: str) -> NDArray[Any]:
        group, _, name = path.partition("/")
        if group == "rewards":
            return self._rows(
                [p.reward_column(name) if name in p.reward_names() else None for p in self._parts], np.nan
            )
        column = COLUMNS[path]
        if group == "trajectories" and column.extent == "n":
            return self._rows([part.column(path) for part in self._parts], None)
        if group == "trajectories":
            sizes = self._rows([np.diff(part.column(path)) for part in self._parts], None)
            return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return self._items(path, group)

    def _rows(self, columns: list[NDArray[Any] | None], default: Any) -> NDArray[Any]:
        given = [c for c in columns if c is not None]
        if any(c.dtype.kind in "SO" for c in given):
            given = [text(c) for c in given]
            columns = [None if c is None else text(c) for c in columns]
        dtype = given[0].dtype if given else np.dtype(np.float32)
        found = np.empty(len(self), dtype) if default is None else np.full(len(self), default, dtype)
        for number, values in enumerate(columns):
            if values is not None:
                here = self._part == number
                found[here] = values[self._row[here]]
        return found

    def _items(self, path: str, group: str) -> NDArray[Any]:
        """A column of sequences or turns: the spans of the rows one behind another, references counted anew."""
        offset = "trajectories/sequence_offset" if group == "sequences" else "trajectories/turn_offset"
        found: list[NDArray[Any]] = []
        sequence_base, token_base = self.column("trajectories/sequence_offset"), None
        for row in range(len(self)):
            part, at = self._of(row), int(self._row[row])
            first, last = part.column(offset)[at : at + 2]
            if path == "sequences/token_offset":
                found.append(np.diff(part.column(path)[first : last + 1]))
                continue
            values = part.column(path)[first:last]
            if path == "sequences/trajectory":
                values = np.full(len(values), row, np.int64)
            elif path.startswith("turns/") and path.split("/")[1] in ("sequence", "token_start", "token_end"):
                first_sequence = part.column("trajectories/sequence_offset")[at]
                known = part.column("turns/sequence")[first:last] >= 0
                if path == "turns/sequence":
                    values = np.where(known, values - first_sequence + sequence_base[row], -1)
                else:
                    token_base = self.column("sequences/token_offset") if token_base is None else token_base
                    here = part.column("sequences/token_offset")[first_sequence]
                    values = np.where(known, values - here + token_base[sequence_base[row]], 0)
            found.append(text(values) if values.dtype.kind in "SO" else values)
        joined = np.concatenate(found) if found else np.empty(0, np.int64)
        if path == "sequences/token_offset":
            return np.concatenate([[0], np.cumsum(joined)]).astype(np.int64)
        return joined
