"""Where the rows of a store come from: a campaign file, or the journals of a run. Both show the same.

A source knows rows by number only. Scalars are served column by column, everything ragged row by row, and nothing is
read before it is asked for.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.rundir import RunDir
from megaflow_hpc.trajectories.hdf5 import open_file
from megaflow_hpc.trajectories.schema import COLUMNS, STRING
from megaflow_hpc.trajectories.winners import Entry, Seals, index
from megaflow_hpc.trajectories.writer import clean, message_json, reward_name
from megaflow_hpc.types import Artifact, Attempt, Trajectory, Turn

_CACHED = 8
"""Trajectories of a journal kept decoded: the parts of one row are usually read together."""


@dataclass(frozen=True)
class SequenceView:
    """A token sequence as numpy; one entry per token."""

    policy: str
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """NaN where not sampled."""
    loss_mask: NDArray[np.uint8]
    weight_versions: NDArray[np.int32]
    """-1 where not sampled."""


class Source(Protocol):
    """Rows by number, 0 to ``len - 1``, in commit order."""

    def ids(self) -> list[str]: ...
    def scalar(self, name: str, row: int) -> Any: ...
    def rewards(self, row: int) -> dict[str, float]: ...
    def messages(self, row: int) -> list[dict[str, Any]]: ...
    def sequences(self, row: int) -> list[SequenceView]: ...
    def turns(self, row: int) -> list[Turn]: ...
    def attempts(self, row: int) -> list[Attempt]: ...
    def artifacts(self, row: int) -> list[Artifact]: ...
    def close(self) -> None: ...


class Hdf5Source:
    """A ``trajectories.h5``. Scalar and offset columns are read whole on first use; flat data by slices."""

    def __init__(self, path: Path) -> None:
        self._file = open_file(path)
        self._columns: dict[str, Any] = {}

    def close(self) -> None:
        self._file.close()

    def ids(self) -> list[str]:
        return list(self._column("trajectories/id"))

    def scalar(self, name: str, row: int) -> Any:
        value = self._column(f"trajectories/{name}")[row]
        return value if isinstance(value, str) else value.item()

    def rewards(self, row: int) -> dict[str, float]:
        found = {name: float(self._column(f"rewards/{name}")[row]) for name in self._file.get("rewards", ())}
        return {name: value for name, value in found.items() if value == value}

    def messages(self, row: int) -> list[dict[str, Any]]:
        start, end = self._span("trajectories/message_offset", row)
        offsets = self._file["messages/offset"][start : end + 1]
        if end == start:
            return []
        data = self._file["messages/json"][offsets[0] : offsets[-1]].tobytes()
        return [json.loads(data[a - offsets[0] : b - offsets[0]]) for a, b in pairwise(offsets)]

    def sequences(self, row: int) -> list[SequenceView]:
        start, end = self._span("trajectories/sequence_offset", row)
        offsets = self._column("sequences/token_offset")[start : end + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        flat = [self._file[f"tokens/{name}"][first:last] for name in ("id", "logprob", "loss_mask", "weight_version")]
        policies = self._column("sequences/policy")[start:end]
        return [
            SequenceView(policy, *(column[a - first : b - first] for column in flat))
            for policy, a, b in zip(policies, offsets, offsets[1:], strict=False)
        ]

    def turns(self, row: int) -> list[Turn]:
        start, end = self._span("trajectories/turn_offset", row)
        first = self._span("trajectories/sequence_offset", row)[0]
        turns = [Turn(**values) for values in self._records("turns", start, end)]
        for turn in turns:
            if turn.sequence >= 0:
                base = int(self._column("sequences/token_offset")[turn.sequence])
                turn.sequence -= first
                turn.token_start -= base
                turn.token_end -= base
        return turns

    def attempts(self, row: int) -> list[Attempt]:
        start, end = self._span("trajectories/attempt_offset", row)
        return [Attempt(**values) for values in self._records("attempts", start, end)]

    def artifacts(self, row: int) -> list[Artifact]:
        start, end = np.searchsorted(self._column("artifacts/trajectory"), [row, row + 1])
        found = []
        for number in range(start, end):
            a, b = self._span("artifacts/offset", number)
            found.append(Artifact(self._column("artifacts/name")[number], self._file["artifacts/bytes"][a:b].tobytes()))
        return found

    def _column(self, path: str) -> Any:
        if path not in self._columns:
            dataset = self._file[path]
            text = path in COLUMNS and COLUMNS[path].dtype == STRING
            self._columns[path] = dataset.asstr()[:] if text else dataset[:]
        return self._columns[path]

    def _span(self, path: str, item: int) -> tuple[int, int]:
        column = self._column(path)
        return int(column[item]), int(column[item + 1])

    def _records(self, group: str, start: int, end: int) -> list[dict[str, Any]]:
        """Rows ``[start, end)`` of a group as dicts of Python values."""
        names = [column.name for column in COLUMNS.values() if column.group == group]
        slices = []
        for name in names:
            dataset = self._file[f"{group}/{name}"]
            text = COLUMNS[f"{group}/{name}"].dtype == STRING
            slices.append((dataset.asstr() if text else dataset)[start:end].tolist())
        return [dict(zip(names, values, strict=True)) for values in zip(*slices, strict=True)]


class JournalSource:
    """The winners in a run's journals as they were when it was opened."""

    def __init__(self, run: RunDir, seals: Seals) -> None:
        self._index = index(run, seals)
        self._cache: OrderedDict[Entry, Trajectory] = OrderedDict()

    def close(self) -> None:
        self._cache.clear()

    def ids(self) -> list[str]:
        return [clean(entry.id) for entry in self._index.winners]

    def scalar(self, name: str, row: int) -> Any:
        value = getattr(self._load(row), name)
        if name == "reward":
            return float("nan") if value is None else float(np.float32(value))
        return clean(value) if isinstance(value, str) else value

    def rewards(self, row: int) -> dict[str, float]:
        found = {reward_name(name): float(np.float32(value)) for name, value in self._load(row).rewards.items()}
        return {name: found[name] for name in sorted(found) if found[name] == found[name]}

    def messages(self, row: int) -> list[dict[str, Any]]:
        return [json.loads(message_json(message)) for message in self._load(row).messages]

    def sequences(self, row: int) -> list[SequenceView]:
        return [
            SequenceView(
                clean(s.policy),
                np.frombuffer(s.tokens.tobytes(), np.int32),
                np.frombuffer(s.logprobs.tobytes(), np.float32),
                np.frombuffer(s.loss_mask.tobytes(), np.uint8),
                np.frombuffer(s.weight_versions.tobytes(), np.int32),
            )
            for s in self._load(row).sequences
        ]

    def turns(self, row: int) -> list[Turn]:
        found = []
        for turn in self._load(row).turns:
            turn = replace(turn, finish_reason=clean(turn.finish_reason), server=clean(turn.server))
            for name in ("model_s", "sandbox_s", "agent_s", "wait_s"):
                setattr(turn, name, float(np.float32(getattr(turn, name))))
            if turn.sequence < 0:
                turn.sequence, turn.token_start, turn.token_end = -1, 0, 0
            found.append(turn)
        return found

    def attempts(self, row: int) -> list[Attempt]:
        found = [replace(attempt) for attempt in self._load(row).attempts]
        for attempt in found:
            for name in ("status", "error_kind", "error", "node", "job_id"):
                setattr(attempt, name, clean(getattr(attempt, name)))
        return found

    def artifacts(self, row: int) -> list[Artifact]:
        return [Artifact(clean(artifact.name), artifact.data) for artifact in self._load(row).artifacts]

    def _load(self, row: int) -> Trajectory:
        entry = self._index.winners[row]
        if entry not in self._cache:
            self._cache[entry] = self._index.load(entry)
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return self._cache[entry]
