"""The journals of a run as rows of a store; they show the same as the campaign file that is gathered from them."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np

from megaflow_hpc.trajectories.columns import UNKNOWN_AS_NAN, SequenceView
from megaflow_hpc.trajectories.rowwise import Rowwise
from megaflow_hpc.trajectories.winners import Entry, Index
from megaflow_hpc.trajectories.writer import clean, message_json, reward_name
from megaflow_hpc.types import Artifact, Attempt, Trajectory, Turn

_CACHED = 8
"""Trajectories of a journal kept decoded: the parts of one row are usually read together."""


class JournalSource(Rowwise):
    """The winners in a run's journals as an index found them."""

    def __init__(self, found: Index) -> None:
        self._index = found
        self._cache: OrderedDict[Entry, Trajectory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._index.winners)

    def close(self) -> None:
        self._cache.clear()

    def ids(self) -> list[str]:
        return [clean(entry.id) for entry in self._index.winners]

    def scalar(self, name: str, row: int) -> Any:
        value = getattr(self._load(row), name)
        if name in UNKNOWN_AS_NAN:
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
