"""The journals of a run as rows of a store; they show the same as the campaign file that is gathered from them."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.hdf5.encoding import escape, message_json, reward_name
from megaflow_hpc.trajectories.journal.records import Entry
from megaflow_hpc.trajectories.journal.shards import open_shard, shard_path
from megaflow_hpc.trajectories.journal.winners import Index
from megaflow_hpc.trajectories.reading.row_columns import Joined, Rowwise
from megaflow_hpc.trajectories.reading.sources import UNKNOWN_AS_NAN, Hdf5Source, SequenceView, Source
from megaflow_hpc.types import Artifact, Attempt, Trajectory, Turn

_CACHED = 8
"""Trajectories of a journal kept decoded: the parts of one row are usually read together."""


MAX_SHARDS = 256
"""Shards kept open at once, with two descriptors each; the journals of the others are read instead."""


def source_of(run: RunDir, found: Index) -> Source:
    """The rows of a running campaign: from shards what lies in them, the rest from the journals."""
    parts: list[Source] = []
    numbers: dict[str, int | None] = {}
    from_journals: list[Entry] = []
    part, row = np.empty(len(found.winners), np.int64), np.empty(len(found.winners), np.int64)
    for place, entry in enumerate(found.winners):
        number = None
        if entry.shard_row >= 0 and entry.id not in found.losers:  # with losers, attempts are put together
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
    return Joined([*parts, journals], part, row)


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
            turn = replace(turn, finish_reason=escape(turn.finish_reason), server=escape(turn.server))
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
                setattr(attempt, name, escape(getattr(attempt, name)))
        return found

    def artifacts(self, row: int) -> list[Artifact]:
        return [Artifact(escape(artifact.name), artifact.data) for artifact in self._load(row).artifacts]

    def _load(self, row: int) -> Trajectory:
        entry = self._index.winners[row]
        if entry not in self._cache:
            self._cache[entry] = self._index.load(entry)
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return self._cache[entry]
