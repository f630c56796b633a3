"""Joins several sources of rows into one: the shards and journals of a running campaign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.hdf5.columns import text
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS
from megaflow_hpc.trajectories.journal.records import Entry
from megaflow_hpc.trajectories.journal.shards import open_shard, shard_path
from megaflow_hpc.trajectories.journal.winners import Index
from megaflow_hpc.trajectories.reading.journal_source import JournalSource
from megaflow_hpc.trajectories.reading.sources import Flat, Hdf5Source, SequenceView, Source, offsets_of
from megaflow_hpc.trajectory import Attempt, Turn
from megaflow_hpc.types import Artifact

MAX_SHARDS = 256
"""Number of shards kept open at once, with a descriptor each; beyond it journals are read instead."""


def source_of(run: RunDir, found: Index) -> Source:
    """Returns the rows of a running campaign as a source, from shards where possible, else from journals.

    Args:
        run: the run directory.
        found: its winners, which become the rows in order.
    """
    parts: list[Source] = []
    numbers: dict[str, int | None] = {}
    from_journals: list[Entry] = []
    part, row = np.empty(len(found.winners), np.int64), np.empty(len(found.winners), np.int64)
    for place, entry in enumerate(found.winners):
        number = None
        if found.in_shard(entry):
            if entry.journal not in numbers:
                file = open_shard(run, run.journal / entry.journal) if len(parts) < MAX_SHARDS else None
                numbers[entry.journal] = None if file is None else len(parts)
                if file is not None:
                    parts.append(Hdf5Source(shard_path(run, entry.journal), file))
            number = numbers[entry.journal]
        if number is None:
            part[place], row[place] = -1, len(from_journals)
            from_journals.append(entry)
        else:
            part[place], row[place] = number, entry.shard_row
    journals = JournalSource(Index(found.root, from_journals, found.losers))
    if not parts:
        return journals
    part[part < 0] = len(parts)
    return JoinedSource([*parts, journals], part, row)


class JoinedSource:
    """Rows of several sources in any order.

    Args:
        parts: the sources, which are closed with this one.
        part: (n), the number of the source that each row comes from.
        row: (n), its row number there.
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
        """Returns the sequences of rows; each part is read once."""
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
        return Flat.of([view for of_row in views for view in of_row])

    def ids(self) -> list[str]:
        return list(text(self.column("trajectories/id")))

    def scalar(self, name: str, row: int) -> Any:
        return self._of(row).scalar(name, int(self._row[row]))

    def rewards(self, row: int) -> dict[str, float]:
        return self._of(row).rewards(int(self._row[row]))

    def messages(self, row: int) -> list[dict[str, Any]]:
        return self._of(row).messages(int(self._row[row]))

    def parents(self, row: int) -> list[int]:
        return self._of(row).parents(int(self._row[row]))

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
        """Returns the number of sequences of each of these rows of a part."""
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
            return offsets_of(sizes)
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
        """Joins a column of sequences or turns row by row, with references renumbered."""
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
            return offsets_of(joined)
        return joined
