"""Reads rows from the journals of a run. They are identical to the rows of the file gathered from the journals.

Journals have no columns. The first request for a column decodes all rows once and keeps the small columns of rows,
sequences and turns. Tokens and messages are read again on demand.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from megaflow_hpc.trajectories.hdf5.columns import Array, Integers
from megaflow_hpc.trajectories.hdf5.encoding import escape, message_json, reward_name
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, ROW_COLUMNS, STRING, TEXT, UNKNOWN_AS_NAN
from megaflow_hpc.trajectories.journal.winners import Index, RecordEntry
from megaflow_hpc.trajectories.reading.sources import Flat, SequenceView, experts_of, offsets_of
from megaflow_hpc.trajectory import Attempt, Trajectory, Turn
from megaflow_hpc.types import Artifact

_CACHED = 8
"""Number of decoded trajectories to cache, because the parts of a row are usually read together."""
_SCALARS = tuple(column.name for column in ROW_COLUMNS if column.name != "turns")
_TIMES = ("model_s", "sandbox_s", "agent_s", "wait_s")
_OF_ATTEMPTS = ("job_id", "started_at", "finished_at")
_COLUMNS = (
    *(f"trajectories/{name}" for name in _SCALARS),
    *(f"sequences/{name}" for name in ("trajectory", "policy", "weight_version_min", "weight_version_max")),
    *(f"sequences/{name}" for name in ("expert_layers", "experts_per_token")),
    *(f"turns/{name}" for name in ("sequence", "token_start", "token_end", *_TIMES)),
    *(f"attempts/{name}" for name in _OF_ATTEMPTS),
)
_OFFSETS = (
    *(f"trajectories/{item}_offset" for item in ("sequence", "turn", "message", "attempt")),
    "sequences/token_offset",
    "sequences/expert_offset",
)


class JournalSource:
    """Reads the winning records of an index."""

    def __init__(self, index: Index) -> None:
        self._index = index
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
        rewards = {}
        for name, value in self._load(row).rewards.items():
            if not math.isnan(value):
                rewards[reward_name(name)] = float(np.float32(value))
        return dict(sorted(rewards.items()))

    def messages(self, row: int) -> list[dict[str, Any]]:
        return [json.loads(message_json(message)) for message in self._load(row).messages]

    def parents(self, row: int) -> list[int]:
        return list(self._load(row).parents)

    def sequences(self, row: int) -> list[SequenceView]:
        views = []
        for s in self._load(row).sequences:
            columns: list[Any] = [*map(np.array, (s.tokens, s.logprobs, s.loss_mask, s.weight_versions)), experts_of(s)]
            views.append(SequenceView(escape(s.policy), *columns))
        return views

    def turns(self, row: int) -> list[Turn]:
        turns = [replace(turn) for turn in self._load(row).turns]
        for turn in turns:
            for name in ("finish_reason", "server", "policy"):
                setattr(turn, name, escape(getattr(turn, name)))
            for name in _TIMES:
                setattr(turn, name, float(np.float32(getattr(turn, name))))
            if turn.sequence < 0:
                turn.sequence, turn.token_start, turn.token_end = -1, 0, 0
        return turns

    def attempts(self, row: int) -> list[Attempt]:
        attempts = [replace(attempt) for attempt in self._load(row).attempts]
        for attempt in attempts:
            for name in ("status", "error_kind", "error", "node", "job_id"):
                setattr(attempt, name, escape(getattr(attempt, name)))
        return attempts

    def artifacts(self, row: int) -> list[Artifact]:
        return [Artifact(escape(artifact.name), artifact.data) for artifact in self._load(row).artifacts]

    def column(self, path: str) -> Array:
        if path not in self._columns:
            raise KeyError(f"{path}: no column of rows")
        return self._columns[path]

    def reward_names(self) -> list[str]:
        return sorted(path.partition("/")[2] for path in self._columns if path.startswith("rewards/"))

    def flat(self, rows: Integers) -> Flat:
        owners: list[int] = []
        views: list[SequenceView] = []
        for row in rows.tolist():
            own = self.sequences(row)
            owners += [row] * len(own)
            views += own

        def joined(name: str, dtype: Any) -> Array:
            return np.concatenate([np.empty(0, dtype), *(getattr(view, name) for view in views)])

        return Flat(
            np.array(owners, np.int64),
            np.array([view.policy for view in views], object),
            offsets_of([len(view.tokens) for view in views]),
            joined("tokens", np.int32),
            joined("logprobs", np.float32),
            joined("loss_mask", np.uint8),
            joined("weight_versions", np.int32),
        )

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
    def _columns(self) -> dict[str, Array]:
        values: dict[str, list[Any]] = {path: [] for path in _COLUMNS} | {path: [0] for path in _OFFSETS}
        rewards: dict[str, Array] = {}
        for row, trajectory in enumerate(self._index.trajectories()):
            self._keep(self._index.winners[row], trajectory)
            for name in _SCALARS:
                values[f"trajectories/{name}"].append(self.scalar(name, row))
            for name, reward in self.rewards(row).items():
                column = rewards.setdefault(f"rewards/{name}", np.full(len(self), np.nan, np.float32))
                column[row] = reward
            self._add_sequences_and_turns(values, row)
            for attempt in self.attempts(row):
                for name in _OF_ATTEMPTS:
                    values[f"attempts/{name}"].append(getattr(attempt, name))
            counts = {
                "trajectories/sequence_offset": len(trajectory.sequences),
                "trajectories/turn_offset": len(trajectory.turns),
                "trajectories/message_offset": len(trajectory.messages),
                "trajectories/attempt_offset": len(trajectory.attempts),
            }
            for path, count in counts.items():
                values[path].append(values[path][-1] + count)
        columns = {path: _array(COLUMNS[path].dtype, column) for path, column in values.items()}
        columns["trajectories/turns"] = np.diff(columns["trajectories/turn_offset"]).astype(np.int32)
        return columns | rewards

    def _add_sequences_and_turns(self, values: dict[str, list[Any]], row: int) -> None:
        """Appends a row's sequences and turns to the column lists, renumbered for the whole run."""
        first_sequence = len(values["sequences/trajectory"])
        token_offsets = values["sequences/token_offset"]
        for view in self.sequences(row):
            token_offsets.append(token_offsets[-1] + len(view.tokens))
            sampled = view.weight_versions[view.weight_versions >= 0]
            values["sequences/trajectory"].append(row)
            values["sequences/policy"].append(view.policy)
            values["sequences/weight_version_min"].append(int(sampled.min()) if len(sampled) else -1)
            values["sequences/weight_version_max"].append(int(sampled.max()) if len(sampled) else -1)
            _, layers, per_token = (0, 0, 0) if view.experts is None else view.experts.shape
            values["sequences/expert_layers"].append(layers)
            values["sequences/experts_per_token"].append(per_token)
            size = 0 if view.experts is None else view.experts.nbytes
            values["sequences/expert_offset"].append(values["sequences/expert_offset"][-1] + size)
        for turn in self.turns(row):
            if turn.sequence >= 0:
                turn.sequence += first_sequence
                turn.token_start += token_offsets[turn.sequence]
                turn.token_end += token_offsets[turn.sequence]
            for name in ("sequence", "token_start", "token_end", *_TIMES):
                values[f"turns/{name}"].append(getattr(turn, name))


def _array(dtype: str, values: list[Any]) -> Array:
    if dtype not in (STRING, TEXT):
        return np.array(values, dtype)
    column = np.empty(len(values), object)
    column[:] = values
    return column
