"""Takes rows of several files of the schema in any order, as rows that lie between one another in time need it.

A file's small columns are held in memory; of the large ones, tokens, messages and artifacts, only the chunks that are
needed are read and inflated, each once. Nothing is decoded row by row, so threads do most of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5 import chunks
from megaflow_hpc.trajectories.hdf5.columns import read
from megaflow_hpc.trajectories.hdf5.numbering import missing
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OPTIONAL, TEXT

FLAT = {
    extent: tuple(path for path, column in COLUMNS.items() if column.extent == extent) for extent in ("k", "qb", "fb")
}
"""The large columns by extent: bytes and tokens."""

_OFFSETS = {
    "m": "trajectories/sequence_offset",
    "t": "trajectories/turn_offset",
    "q": "trajectories/message_offset",
    "a": "trajectories/attempt_offset",
}
_FLAT_OFFSETS = {
    "k": ("m", "sequences/token_offset"),
    "qb": ("q", "messages/offset"),
    "fb": ("f", "artifacts/offset"),
}
"""Extents of the large columns: whose items they are of, and the offsets of those."""
_MOVED = {"turns/sequence": "m", "turns/token_start": "k", "turns/token_end": "k"}
"""Columns of turns that hold numbers of other items."""

Array = NDArray[Any]
Numbers = NDArray[np.int64]


class Part:
    """A file of the schema whose rows are taken in any order. It must not change, and stay open.

    Args:
        file: the open file.
        cache: inflated chunks, which parts may share.

    Raises:
        OSError: a column is damaged.
        LookupError, ValueError: columns do not fit one another.
    """

    def __init__(self, file: h5py.File, cache: chunks.ChunkCache) -> None:
        self.file = file
        flat = {path for paths in FLAT.values() for path in paths}
        self.columns: dict[str, Array] = {
            path: read(file[path]) for path in COLUMNS if path in file and path not in flat
        }
        self.rewards: dict[str, Array] = {name: read(dataset) for name, dataset in file.get("rewards", {}).items()}
        rows = len(self.columns["trajectories/id"])
        sizes = {
            "trajectories": rows,
            "sequences": len(self.columns["sequences/trajectory"]),
            "turns": len(self.columns["turns/sequence"]),
            "messages": len(self.columns["messages/offset"]) - 1,
        }
        for path in OPTIONAL.keys() - self.columns.keys():
            size = sizes[COLUMNS[path].group]
            self.columns[path] = missing(path, size, self.columns["trajectories/message_offset"])
        self.first: dict[str, Numbers] = {extent: self.columns[path] for extent, path in _OFFSETS.items()}
        """By extent (rows + 1): the first item of each row."""
        self.first["f"] = np.searchsorted(self.columns["artifacts/trajectory"], np.arange(rows + 1))
        for extent, (of, path) in _FLAT_OFFSETS.items():
            self.first[extent] = self.columns[path][self.first[of]]
        self.flat = {extent: [self._chunked(path, cache) for path in paths] for extent, paths in FLAT.items()}
        self.row_bytes: Numbers = sum(
            np.diff(self.first[extent]) * sum(column.dtype.itemsize for column in columns)
            for extent, columns in self.flat.items()
        )
        """(rows): bytes of each row in the large columns."""
        self.held_bytes = sum(values.nbytes for values in self.columns.values())
        """Memory that the small columns take."""

    def _chunked(self, path: str, cache: chunks.ChunkCache) -> chunks.ChunkedColumn:
        column = chunks.ChunkedColumn(self.file[path], cache)
        column.name = f"{self.file.filename}{column.name}"  # of its own in a cache that is shared
        return column


class Rows(NamedTuple):
    """Rows as columns, with references numbered from 0; offset columns lack their leading 0."""

    columns: dict[str, list[Array]]
    """Pieces of each column of the schema, in order."""
    rewards: dict[str, Array]
    counts: dict[str, int]
    """Number of items by extent."""


class Taken(NamedTuple):
    """Rows of one part: their numbers in it, ascending, and their places among all rows that are taken."""

    part: Part
    rows: Numbers
    places: Numbers


def taken(order: Sequence[tuple[Part, int]]) -> list[Taken]:
    """Returns, by part, which rows are taken where.

    Args:
        order: part and row number of each row; rows of one part in ascending order.
    """
    by_part: dict[int, tuple[Part, list[int], list[int]]] = {}
    for place, (part, row) in enumerate(order):
        _, rows, places = by_part.setdefault(id(part), (part, [], []))
        rows.append(row)
        places.append(place)
    return [Taken(part, np.array(rows), np.array(places)) for part, rows, places in by_part.values()]


def interleaved(found: Sequence[Taken], threads: ThreadPoolExecutor | None = None) -> Rows:
    """Returns rows of several parts in their places.

    Args:
        found: the rows of each part; together their places are 0 to n - 1.
        threads: the pool in which chunks are inflated; by default one is made for each request.

    Raises:
        OSError: a chunk is damaged.
        LookupError, ValueError: columns do not fit one another.
    """
    moves = _Moves(found)
    columns: dict[str, list[Array]] = {}
    for path, spec in COLUMNS.items():
        if spec.extent in FLAT:
            continue
        extent = spec.extent.removesuffix("+1")
        if path in _OFFSETS.values():
            columns[path] = [moves.starts[next(e for e, p in _OFFSETS.items() if p == path)][1:]]
        elif spec.is_offset:
            columns[path] = [np.cumsum(moves.sizes(path, extent))]
        elif path in ("sequences/trajectory", "artifacts/trajectory"):
            columns[path] = [np.repeat(np.arange(moves.count), np.diff(moves.starts[extent]))]
        elif path in _MOVED:
            columns[path] = [moves.references(path, _MOVED[path])]
        else:
            kind = np.dtype(object) if spec.dtype == TEXT else None
            columns[path] = [moves.items(path, extent, kind)]
    for extent, paths in FLAT.items():
        pieces: dict[str, list[Array]] = {path: [np.empty(0)] * moves.count for path in paths}
        for each in found:
            starts, ends = each.part.first[extent][each.rows], each.part.first[extent][each.rows + 1]
            bounds = np.concatenate([[0], np.cumsum(ends - starts)]).tolist()
            values = chunks.gather(each.part.flat[extent], starts, ends, threads)
            for path, whole in zip(paths, values, strict=True):
                for number, place in enumerate(each.places.tolist()):
                    pieces[path][place] = whole[bounds[number] : bounds[number + 1]]
        columns |= pieces
    return Rows(columns, moves.rewards(), {extent: int(starts[-1]) for extent, starts in moves.starts.items()})


class _Moves:
    """Which items of which part go where."""

    def __init__(self, found: Sequence[Taken]) -> None:
        self._found = found
        self.count = sum(len(each.rows) for each in found)
        self.starts: dict[str, Numbers] = {"n": np.arange(self.count + 1)}
        """By extent (n + 1): place of the first item of each row."""
        self._from: dict[str, list[Numbers]] = {"n": [each.rows for each in found]}
        self._to: dict[str, list[Numbers]] = {"n": [each.places for each in found]}
        for extent in (*_OFFSETS, "f", *FLAT):
            sizes = np.zeros(self.count + 1, np.int64)
            for each in found:
                sizes[each.places + 1] = _sizes(each, extent)
            self.starts[extent] = np.cumsum(sizes)
            if extent not in FLAT:
                self._from[extent] = [_ragged(e.part.first[extent][e.rows], _sizes(e, extent)) for e in found]
                self._to[extent] = [_ragged(self.starts[extent][e.places], _sizes(e, extent)) for e in found]

    def items(self, path: str, extent: str, dtype: np.dtype[Any] | None = None) -> Array:
        """Returns a column in its new order; of the parts' widest type by default."""
        return self._put(extent, [column[source] for column, source in self._columns(path, extent)], dtype)

    def sizes(self, path: str, extent: str) -> Array:
        """Returns the sizes of items, in their new order, of the column of their offsets."""
        sizes = [column[source + 1] - column[source] for column, source in self._columns(path, extent)]
        return self._put(extent, sizes, np.dtype(np.int64))

    def references(self, path: str, extent: str) -> Numbers:
        """Returns a column of turns whose values are numbers of items; those of unknown sequences stay as they are."""
        moved = []
        for each, source in zip(self._found, self._from["t"], strict=True):
            by = self.starts[extent][each.places] - each.part.first[extent][each.rows]
            values = each.part.columns[path][source]
            known = each.part.columns["turns/sequence"][source] >= 0
            values += np.where(known, np.repeat(by, _sizes(each, "t")), 0)
            moved.append(values)
        return self._put("t", moved)

    def _columns(self, path: str, extent: str) -> Iterator[tuple[Array, Numbers]]:
        """Each part's own column, and the items of it that are taken."""
        for each, source in zip(self._found, self._from[extent], strict=True):
            yield each.part.columns[path], source

    def _put(self, extent: str, pieces: Sequence[Array], dtype: np.dtype[Any] | None = None) -> Array:
        kind = dtype if dtype is not None else np.result_type(*(piece.dtype for piece in pieces))
        result = np.empty(int(self.starts[extent][-1]), kind)
        for piece, target in zip(pieces, self._to[extent], strict=True):
            result[target] = piece
        return result

    def rewards(self) -> dict[str, Array]:
        """Returns the rewards by name, NaN where a part has none of the name."""
        result: dict[str, Array] = {}
        for each in self._found:
            for name, values in each.part.rewards.items():
                column = result.setdefault(name, np.full(self.count, np.nan, np.float32))
                column[each.places] = values[each.rows]
        return result


def _sizes(each: Taken, extent: str) -> Numbers:
    first = each.part.first[extent]
    return first[each.rows + 1] - first[each.rows]


def _ragged(starts: Numbers, sizes: Numbers) -> Numbers:
    """Returns the numbers ``[starts[i], starts[i] + sizes[i])`` of all i, end to end."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - ends + sizes, sizes) + np.arange(int(ends[-1]) if len(ends) else 0)
