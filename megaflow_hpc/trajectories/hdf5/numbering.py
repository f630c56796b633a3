"""Numbers of items in a campaign file: which columns hold them, which items rows have, and what becomes of them when
rows move to another file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from megaflow_hpc.trajectories.hdf5.columns import read
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OPTIONAL, STRING

ROWS = {"m": "sequence_offset", "t": "turn_offset", "q": "message_offset", "a": "attempt_offset"}
"""Extents of the items that rows have, and the offset columns of the trajectories that say which."""

NUMBERED = {
    "trajectories/sequence_offset": "m",
    "trajectories/turn_offset": "t",
    "trajectories/message_offset": "q",
    "trajectories/attempt_offset": "a",
    "sequences/trajectory": "n",
    "sequences/token_offset": "k",
    "turns/sequence": "m",
    "turns/token_start": "k",
    "turns/token_end": "k",
    "messages/offset": "qb",
    "artifacts/trajectory": "n",
    "artifacts/offset": "fb",
}
"""Columns that hold numbers of items of the file: they are renumbered when rows move."""


def missing(path: str, count: int, message_offset: Any) -> Any:
    """Returns default values for a column that a file of older software lacks.

    Args:
        path: the column.
        count: number of entries.
        message_offset: (rows + 1), offsets of the rows' messages; only for ``messages/parent``. Each row's messages
            form one conversation.
    """
    if path == "messages/parent":
        return np.arange(count) - np.repeat(message_offset[:-1] - message_offset[0], np.diff(message_offset)) - 1
    dtype = COLUMNS[path].dtype
    return np.full(count, OPTIONAL[path], "S1" if dtype == STRING else dtype)


def spans_of(source: h5py.File, start: int, end: int) -> dict[str, tuple[int, int]]:
    """Returns the first and last item, by extent, that rows ``[start, end)`` have."""

    def bounds(path: str, first: int, last: int) -> tuple[int, int]:
        start, end = (int(read(source[path], place, place + 1)[0]) for place in (first, last))
        return start, end

    spans = {"n": (start, end)}
    for extent, name in ROWS.items():
        spans[extent] = bounds(f"trajectories/{name}", start, end)
    spans["k"] = bounds("sequences/token_offset", *spans["m"])
    spans["qb"] = bounds("messages/offset", *spans["q"])
    first, last = np.searchsorted(read(source["artifacts/trajectory"]), [start, end]).tolist()
    spans["f"] = (first, last)
    spans["fb"] = bounds("artifacts/offset", first, last)
    return spans


def rebased(path: str, values: Any, shift: Mapping[str, int], source: h5py.File, span: tuple[int, int]) -> Any:
    """Returns a column's numbers of items as they are in the other file.

    Args:
        path: the column.
        values: what it holds.
        shift: by extent, what is added to a number.
        source: the file that they come from.
        span: the column's entries that these are.
    """
    moved = values + shift[NUMBERED[path]]
    if not path.startswith("turns/"):
        return moved
    known = read(source["turns/sequence"], span[0], span[1]) >= 0
    return np.where(known, moved, values)
