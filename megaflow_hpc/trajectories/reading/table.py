"""Columns that a selection may name: those of the schema, and a few derived from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.columns import read
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS
from megaflow_hpc.trajectories.reading.sources import Hdf5Source, Source, offsets_of

_WINDOW = 1 << 20
"""Number of tokens read at once when a whole token column must be searched."""
_ALIASES = {"task": "task_id", "group": "group_id", "sample": "sample_index"}


class RowTable:
    """Columns with one entry per row, by name. Derived columns are computed on first use and cached."""

    def __init__(self, source: Source) -> None:
        names = {c.name: c.name for c in COLUMNS.values() if c.group == "trajectories" and c.extent == "n"}
        self._source = source
        self._paths = {name: f"trajectories/{column}" for name, column in {**names, **_ALIASES}.items()}
        self._derived: dict[str, Callable[[], NDArray[Any]]] = {
            "tokens": self._tokens,
            "sampled_tokens": self._sampled_tokens,
            "duration_s": lambda: self.column("finished_at") - self.column("started_at"),
            **{f"{item}s": self._counts(item) for item in ("sequence", "message", "attempt")},
            "weight_version_min": lambda: _versions(source, "weight_version_min", np.minimum),
            "weight_version_max": lambda: _versions(source, "weight_version_max", np.maximum),
        }
        self._kept: dict[str, NDArray[Any]] = {}
        self.rows = len(source)
        self.rewards = tuple(source.reward_names())
        """Names of all rewards in any row."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns except the rewards."""
        return (*self._paths, *self._derived)

    def column(self, name: str) -> NDArray[Any]:
        """Returns a column (rows) by one of :attr:`names`; text as ``S`` bytes or objects."""
        if name in self._paths:
            return self._source.column(self._paths[name])
        if name not in self._kept:
            self._kept[name] = self._derived[name]()
        return self._kept[name]

    def reward(self, name: str) -> NDArray[np.float32]:
        """Returns the column (rows) of one of :attr:`rewards`. NaN for rows without it."""
        return self._source.reward_column(name)

    def _counts(self, item: str) -> Callable[[], NDArray[Any]]:
        return lambda: np.diff(self._source.column(f"trajectories/{item}_offset"))

    def _tokens(self) -> NDArray[Any]:
        sequences = self._source.column("trajectories/sequence_offset")
        return np.diff(self._source.column("sequences/token_offset")[sequences])

    def _sampled_tokens(self) -> NDArray[Any]:
        sampled = self._source.column("turns/token_end") - self._source.column("turns/token_start")
        return np.diff(offsets_of(sampled)[self._source.column("trajectories/turn_offset")])


def _versions(source: Source, name: str, extreme: np.ufunc) -> NDArray[Any]:
    """Return the lowest or highest weight version of each row's sampled tokens. -1 if none was sampled."""
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
    """Return the lowest or highest weight version by sequence, from the tokens, for files that lack the column."""
    bounds = source.column("sequences/token_offset")
    worst = np.iinfo(np.int32).max if extreme is np.minimum else -1
    found = np.full(len(bounds) - 1, worst, np.int64)
    for start in range(0, int(bounds[-1]), _WINDOW):
        values = read(source.file["tokens/weight_version"], start, start + _WINDOW).astype(np.int64)
        sampled = np.flatnonzero(values >= 0)
        owner = np.searchsorted(bounds, sampled + start, "right") - 1
        extreme.at(found, owner, values[sampled])
    return np.where(found == np.iinfo(np.int32).max, -1, found)
