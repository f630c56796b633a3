"""Sources of rows and columns: the protocol of every source, and a ``trajectories.h5`` as one.

A source knows rows by number only. Columns are read whole and kept, on first use; everything ragged is read row by
row, or for many rows at once by :meth:`Source.flat`. Opening reads nothing, so a campaign of a million opens as fast as
one of ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.texts import parse_object
from megaflow_hpc.trajectories.hdf5.columns import read, read_column, read_slices, text
from megaflow_hpc.trajectories.hdf5.file import open_file
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OFFSETS
from megaflow_hpc.trajectory import Attempt, Turn, linked
from megaflow_hpc.types import Artifact

TOKEN_COLUMNS = tuple(f"tokens/{name}" for name in ("id", "logprob", "loss_mask", "weight_version"))

_WHOLE = 1 << 16
"""Columns up to this many entries are read whole when one entry is needed; of longer ones a window is read."""


@dataclass(frozen=True)
class SequenceView:
    """A token sequence as numpy arrays (T), one entry per token."""

    policy: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """NaN where not sampled."""
    loss_mask: NDArray[np.uint8]
    weight_versions: NDArray[np.int32]
    """-1 where not sampled."""


class Flat(NamedTuple):
    """The token sequences of several rows, end to end, in the order of the request. S sequences, T tokens."""

    row: NDArray[np.int64]
    """(S), row number of each sequence"""
    policy: NDArray[Any]
    """(S), objects of ``str``"""
    offsets: NDArray[np.int64]
    """(S+1), into the token columns"""
    tokens: NDArray[np.int32]
    """(T), as the three columns that follow"""
    logprobs: NDArray[np.float32]
    """NaN where not sampled."""
    loss_mask: NDArray[np.uint8]
    weight_versions: NDArray[np.int32]

    @classmethod
    def of(cls, views: Sequence[tuple[int, SequenceView]]) -> Flat:
        """Joins sequences, each given with its row number."""

        def joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
            return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)

        return cls(
            np.array([row for row, _ in views], np.int64),
            np.array([view.policy for _, view in views], object),
            offsets_of([len(view.tokens) for _, view in views]),
            joined([view.tokens for _, view in views], np.int32),
            joined([view.logprobs for _, view in views], np.float32),
            joined([view.loss_mask for _, view in views], np.uint8),
            joined([view.weight_versions for _, view in views], np.int32),
        )


class Source(Protocol):
    """Rows by number, 0 to ``len - 1``, in commit order."""

    def __len__(self) -> int: ...
    def column(self, path: str) -> NDArray[Any]:
        """Returns a column by its path in the schema; text as ``S`` bytes or objects. Not to be changed."""

    def reward_names(self) -> list[str]:
        """Returns the names of the rewards that any row has, sorted."""

    def reward_column(self, name: str) -> NDArray[np.float32]:
        """Returns one named reward of every row (n), NaN where a row lacks it. Not to be changed."""

    def flat(self, rows: NDArray[np.int64]) -> Flat:
        """Returns the token sequences of many rows at once, in the order of ``rows``."""

    def ids(self) -> list[str]:
        """Returns the rollout ids of all rows."""

    def scalar(self, name: str, row: int) -> Any:
        """Returns one value of ``/trajectories/<name>``, without reading a long column as a whole."""

    def rewards(self, row: int) -> dict[str, float]:
        """Returns the named rewards that a row has."""

    def messages(self, row: int) -> list[dict[str, Any]]:
        """Returns all messages of a row, a tree, in OpenAI form (:class:`~megaflow_hpc.trajectory.Trajectory`)."""

    def parents(self, row: int) -> list[int]:
        """Returns, for each message of a row, the index of the one before it; -1 where a conversation begins."""

    def sequences(self, row: int) -> list[SequenceView]:
        """Returns the token sequences of one row."""

    def turns(self, row: int) -> list[Turn]:
        """Returns the model calls of one row, in their order; their sequences are numbered within the row."""

    def attempts(self, row: int) -> list[Attempt]:
        """Returns every attempt at the rollout, the failed ones included."""

    def artifacts(self, row: int) -> list[Artifact]:
        """Returns the files that were kept of the rollout."""

    def close(self) -> None:
        """Closes what is open; reading afterwards is an error."""


def offsets_of(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    """Returns the (n+1) offsets of n adjacent items of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


class Hdf5Source:
    """A ``trajectories.h5``, or an open file of its schema, that does not change, as published files never do.

    Args:
        path: path of the file.
        file: the file, where it is open already; it is closed with the source.

    Raises:
        ConfigError: ``path`` is not a campaign file.
    """

    def __init__(self, path: Path, file: h5py.File | None = None) -> None:
        self.file = open_file(path) if file is None else file
        self.path = path
        self._columns: dict[str, NDArray[Any]] = {}
        self._windows: dict[str, tuple[int, NDArray[Any]]] = {}
        self._datasets: dict[str, h5py.Dataset] = {}
        self._length: int | None = None

    def close(self) -> None:
        self._datasets.clear()
        self.file.close()

    def __len__(self) -> int:
        if self._length is None:  # asked for with every row, and a look-up takes some hundred microseconds
            self._length = len(self.file["trajectories/id"])
        return self._length

    # --- columns ---

    def column(self, path: str) -> NDArray[Any]:
        if path not in self._columns:
            self._columns[path] = self._read(path, 0, None)
        return self._columns[path]

    def reward_names(self) -> list[str]:
        return sorted(self.file.get("rewards", ()))

    def reward_column(self, name: str) -> NDArray[np.float32]:
        return self.column(f"rewards/{name}")

    def ids(self) -> list[str]:
        return list(text(self.column("trajectories/id")))

    def scalar(self, name: str, row: int) -> Any:
        return self._one(f"trajectories/{name}", row)

    def rewards(self, row: int) -> dict[str, float]:
        found = {name: float(self._one(f"rewards/{name}", row)) for name in self.reward_names()}
        return {name: value for name, value in found.items() if value == value}

    def _read(self, path: str, start: int, end: int | None) -> NDArray[Any]:
        if path.startswith("rewards/"):
            return read(self._dataset(path), start, end)
        values = read_column(self.file, path, start, end)
        if path in OFFSETS or path == "sequences/trajectory":
            self._require_order(path, values)
        return values

    def _dataset(self, path: str) -> h5py.Dataset:
        """Returns a dataset. Opening one takes as long as reading a short slice of it."""
        if path not in self._datasets:
            self._datasets[path] = self.file[path]
        return self._datasets[path]

    def _require_order(self, path: str, values: NDArray[Any]) -> None:
        """Raises ``ConfigError`` unless offsets ascend within what they point to, so that no entry is read twice."""
        if not len(values):
            return
        end = len(self) - 1 if path == "sequences/trajectory" else len(self._dataset(OFFSETS[path]))
        end -= path == "trajectories/message_offset"
        if values[0] < 0 or values[-1] > end or (np.diff(values) < 0).any():
            raise ConfigError(f"{self.path}: /{path}: leads out of its column; run: megaflow-hpc validate {self.path}")

    def _one(self, path: str, index: int) -> Any:
        """Returns one entry of a column, without reading a million others."""
        if path in self._columns or len(self) <= _WHOLE:
            value = self.column(path)[index]
        else:
            value = self._slice(path, index, index + 1)[0]
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return value if isinstance(value, str) else value.item()

    def _slice(self, path: str, start: int, end: int) -> NDArray[Any]:
        """Returns some entries from a window that is kept: rows are mostly read in order, and chunks inflated whole."""
        if path in self._columns:
            return self._columns[path][start:end]
        first, window = self._windows.get(path, (0, np.empty(0)))
        if not first <= start <= end <= first + len(window):
            first = start - start % 1024
            window = self._read(path, first, max(end, first + 4096))
            self._windows[path] = first, window
        return window[start - first : end - first]

    def _span(self, path: str, item: int) -> tuple[int, int]:
        if path not in self._columns and len(self._dataset(path)) > _WHOLE:
            start, end = self._slice(path, item, item + 2).tolist()
            return start, end
        column = self.column(path)
        return int(column[item]), int(column[item + 1])

    # --- ragged ---

    def flat(self, rows: NDArray[np.int64]) -> Flat:
        first = self.column("trajectories/sequence_offset")[rows]
        count = self.column("trajectories/sequence_offset")[rows + 1] - first
        sequence = np.repeat(first - np.cumsum(count) + count, count) + np.arange(int(count.sum()))
        bounds = self.column("sequences/token_offset")
        starts, ends = bounds[sequence], bounds[sequence + 1]
        columns = [read_slices(self._dataset(path), starts, ends) for path in TOKEN_COLUMNS]
        offsets = offsets_of(ends - starts)
        policy = text(self.column("sequences/policy")[sequence])
        return Flat(np.repeat(rows, count), policy, offsets, *columns)

    def sequences(self, row: int) -> list[SequenceView]:
        start, end = self._span("trajectories/sequence_offset", row)
        if start == end:
            return []
        offsets = self._slice("sequences/token_offset", start, end + 1)
        policies = text(self._slice("sequences/policy", start, end))
        flat = [read(self._dataset(path), offsets[0], offsets[-1]) for path in TOKEN_COLUMNS]
        parts = pairwise((offsets - offsets[0]).tolist())
        return [
            SequenceView(policy, *(column[a:b] for column in flat))
            for policy, (a, b) in zip(policies, parts, strict=True)
        ]

    def messages(self, row: int) -> list[dict[str, Any]]:
        start, end = self._span("trajectories/message_offset", row)
        if end == start:
            return []
        offsets = self._slice("messages/offset", start, end + 1).tolist()
        data = read(self._dataset("messages/json"), offsets[0], offsets[-1]).tobytes()
        try:
            return [parse_object(data[a - offsets[0] : b - offsets[0]]) for a, b in pairwise(offsets)]
        except ValueError as error:
            raise ConfigError(f"{self.path}: row {row}: a message is {error}; the file is damaged") from None

    def parents(self, row: int) -> list[int]:
        start, end = self._span("trajectories/message_offset", row)
        if "messages/parent" not in self.file:
            return linked((), end - start)
        found: list[int] = self._slice("messages/parent", start, end).tolist()
        if any(not -1 <= parent < node for node, parent in enumerate(found)):
            raise ConfigError(
                f"{self.path}: row {row}: a message follows one that comes later; "
                f"run: megaflow-hpc validate {self.path}"
            )
        return found

    def turns(self, row: int) -> list[Turn]:
        start, end = self._span("trajectories/turn_offset", row)
        first, last = self._span("trajectories/sequence_offset", row)
        bases = self._slice("sequences/token_offset", first, last).tolist() if last > first else []
        turns = [Turn(**values) for values in self._records("turns", Turn, start, end)]
        first_message, last_message = self._span("trajectories/message_offset", row)
        answers: set[int] = set()
        for number, turn in enumerate(turns):
            known = -1 <= turn.message < last_message - first_message and turn.message not in answers
            answers |= {turn.message} - {-1}
            if not known or not -1 <= turn.started_by < number:
                raise ConfigError(
                    f"{self.path}: row {row}: call {number} names message {turn.message} and call {turn.started_by}, "
                    f"which are out of range; run: megaflow-hpc validate {self.path}"
                )
            if turn.sequence >= 0:
                if not first <= turn.sequence < last:
                    raise ConfigError(
                        f"{self.path}: row {row}: a call in sequence {turn.sequence}, expected {first} to {last - 1}; "
                        f"run: megaflow-hpc validate {self.path}"
                    )
                turn.sequence -= first
                turn.token_start -= bases[turn.sequence]
                turn.token_end -= bases[turn.sequence]
        return turns

    def attempts(self, row: int) -> list[Attempt]:
        start, end = self._span("trajectories/attempt_offset", row)
        return [Attempt(**values) for values in self._records("attempts", Attempt, start, end)]

    def artifacts(self, row: int) -> list[Artifact]:
        start, end = np.searchsorted(self.column("artifacts/trajectory"), [row, row + 1]).tolist()
        if start == end:
            return []
        offsets = self._slice("artifacts/offset", start, end + 1).tolist()
        names = text(self._slice("artifacts/name", start, end))
        spans = zip(names, pairwise(offsets), strict=True)
        data = self._dataset("artifacts/bytes")
        return [Artifact(name, read(data, first, last).tobytes()) for name, (first, last) in spans]

    def _records(self, group: str, made: Any, start: int, end: int) -> list[dict[str, Any]]:
        """Returns items ``[start, end)`` of a group as dicts of Python values, with the fields that ``made`` has."""
        if start == end:
            return []
        known = made.__dataclass_fields__
        names = [column.name for column in COLUMNS.values() if column.group == group and column.name in known]
        slices: list[Sequence[Any]] = []
        for name in names:
            values = self._slice(f"{group}/{name}", start, end)
            slices.append((text(values) if values.dtype.kind in "SO" else values).tolist())
        return [dict(zip(names, values, strict=True)) for values in zip(*slices, strict=True)]
