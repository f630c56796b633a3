"""The journals of a run as a source of rows, equal to those of the campaign file that is gathered from them.

A journal has no columns. The first request for a column decodes all rows once and keeps the small columns, of rows,
sequences and turns; tokens and messages are read again when they are needed.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.encoding import escape, message_json, reward_name
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, STRING, TEXT, UNKNOWN_AS_NAN
from megaflow_hpc.trajectories.journal.winners import Index, RecordEntry
from megaflow_hpc.trajectories.reading.sources import Flat, SequenceView
from megaflow_hpc.trajectory import Attempt, Trajectory, Turn
from megaflow_hpc.types import Artifact

_CACHED = 8
"""Decoded trajectories in memory: the parts of one row are usually read together."""
_SCALARS = tuple(
    c.name for c in COLUMNS.values() if c.group == "trajectories" and c.extent == "n" and c.name != "turns"
)
_OF_SEQUENCE = ("trajectory", "policy", "weight_version_min", "weight_version_max")
_OF_TURN = ("sequence", "token_start", "token_end")
_TIMES = ("model_s", "sandbox_s", "agent_s", "wait_s")
_OFFSETS = (
    *(f"trajectories/{item}_offset" for item in ("sequence", "turn", "message", "attempt")),
    "sequences/token_offset",
)
_COLUMNS = (
    *(f"trajectories/{name}" for name in _SCALARS),
    *(f"sequences/{name}" for name in _OF_SEQUENCE),
    *(f"turns/{name}" for name in (*_OF_TURN, *_TIMES)),
)


class JournalSource:
    """The winners in a run's journals, as an index found them."""

    def __init__(self, found: Index) -> None:
        self._index = found
        self._cache: OrderedDict[RecordEntry, Trajectory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._index.winners)

    def close(self) -> None:
        self._cache.clear()

    def ids(self) -> list[str]:
        return [escape(entry.id) for entry in self._index.winners]

    def scalar(self, name: str, row: int) -> Any:
        value = getattr(self._load(row), name)
        if name in UNKNOWN_AS_NAN:
            return float("nan") if value is None else float(np.float32(value))
        return escape(value) if isinstance(value, str) else value

    def rewards(self, row: int) -> dict[str, float]:
        found = {reward_name(name): float(np.float32(value)) for name, value in self._load(row).rewards.items()}
        return {name: found[name] for name in sorted(found) if found[name] == found[name]}

    def messages(self, row: int) -> list[dict[str, Any]]:
        return [json.loads(message_json(message)) for message in self._load(row).messages]

    def parents(self, row: int) -> list[int]:
        return list(self._load(row).parents)

    def sequences(self, row: int) -> list[SequenceView]:
        return [
            SequenceView(
                escape(s.policy),
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
            turn = replace(turn)
            for name in ("finish_reason", "server", "policy"):
                setattr(turn, name, escape(getattr(turn, name)))
            for name in _TIMES:
                setattr(turn, name, float(np.float32(getattr(turn, name))))
            if turn.sequence < 0:
                turn.sequence, turn.token_start, turn.token_end = -1, 0, 0
            found.append(turn)
        return found

    def attempts(self, row: int) -> list[Attempt]:
        found = [replace(attempt) for attempt in self._load(row).attempts]
        for attempt in found:
            for name in ("status", "error_kind", "error", "node", "job_id"):
                setattr(attempt, name, escape(getattr(attempt, name)))
        return found

    def artifacts(self, row: int) -> list[Artifact]:
        return [Artifact(escape(artifact.name), artifact.data) for artifact in self._load(row).artifacts]

    def column(self, path: str) -> NDArray[Any]:
        group, _, name = path.partition("/")
        if group == "rewards":
            return self.reward_column(name)
        if path not in self._built[0]:
            raise KeyError(f"{path}: no column of rows")
        found: NDArray[Any] = self._built[0][path]
        return found

    def reward_names(self) -> list[str]:
        return sorted(self._built[1])

    def reward_column(self, name: str) -> NDArray[np.float32]:
        found = np.full(len(self), np.nan, np.float32)
        for row, value in self._built[1][name].items():
            found[row] = value
        return found

    def flat(self, rows: NDArray[np.int64]) -> Flat:
        return Flat.of([(row, view) for row in rows.tolist() for view in self.sequences(row)])

    def _load(self, row: int) -> Trajectory:
        entry = self._index.winners[row]
        if entry not in self._cache:
            self._keep(entry, self._index.load(entry))
        return self._cache[entry]

    def _keep(self, entry: RecordEntry, trajectory: Trajectory) -> None:
        self._cache[entry] = trajectory
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)

    @cached_property
    def _built(self) -> tuple[dict[str, NDArray[Any]], dict[str, dict[int, float]]]:
        """The columns by path, and the rewards by name and row."""
        values: dict[str, list[Any]] = {path: [0] if path in _OFFSETS else [] for path in (*_OFFSETS, *_COLUMNS)}
        rewards: dict[str, dict[int, float]] = {}
        for row, trajectory in enumerate(self._index.trajectories()):
            self._keep(self._index.winners[row], trajectory)
            for name in _SCALARS:
                values[f"trajectories/{name}"].append(self.scalar(name, row))
            for name, reward in self.rewards(row).items():
                rewards.setdefault(name, {})[row] = reward
            views, turns = self.sequences(row), self.turns(row)
            first, starts = values["trajectories/sequence_offset"][-1], values["sequences/token_offset"][-1:]
            for view in views:
                starts.append(starts[-1] + len(view.tokens))
                sampled = view.weight_versions[view.weight_versions >= 0]
                versions = (int(sampled.min()), int(sampled.max())) if len(sampled) else (-1, -1)
                for name, value in zip(_OF_SEQUENCE, (row, view.policy, *versions), strict=True):
                    values[f"sequences/{name}"].append(value)
            values["sequences/token_offset"] += starts[1:]
            for turn in turns:
                start = starts[turn.sequence]
                known = (first + turn.sequence, start + turn.token_start, start + turn.token_end)
                for name, value in zip(_OF_TURN, known if turn.sequence >= 0 else (-1, 0, 0), strict=True):
                    values[f"turns/{name}"].append(value)
                for name in _TIMES:
                    values[f"turns/{name}"].append(getattr(turn, name))
            sizes = (len(views), len(turns), len(self.messages(row)), len(self.attempts(row)))
            for path, size in zip(_OFFSETS, sizes, strict=False):
                values[path].append(values[path][-1] + size)
        built = {path: _array(COLUMNS[path].dtype, found) for path, found in values.items()}
        built["trajectories/turns"] = np.diff(built["trajectories/turn_offset"]).astype(np.int32)
        return built, rewards


def _array(dtype: str, values: list[Any]) -> NDArray[Any]:
    if dtype not in (STRING, TEXT):
        return np.array(values, dtype)
    found = np.empty(len(values), object)
    found[:] = values
    return found
