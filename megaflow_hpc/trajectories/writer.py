"""Writes trajectories into an HDF5 file of the schema, row by row, in bounded memory.

Rows are collected per column and appended to the datasets some hundred trajectories, or some ten MB, at a time. The
file is meant to be written under a temporary name and published by its caller: it is whole only after ``close``.

Text. HDF5 strings hold neither NUL nor lone surrogates (bytes of a program that were not UTF-8). In string columns they
are written as the escapes ``\\x00`` and ``\\udc80``. Messages lose nothing: there the same escapes are JSON's own, and
parsing the JSON gives the original string back.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from megaflow_hpc.trajectories.schema import COLUMNS, FORMAT, FORMAT_VERSION, STRING, Column, chunk
from megaflow_hpc.types import Trajectory

_FLUSH_ROWS = 512
_FLUSH_BYTES = 32 << 20
FILTERS: dict[str, Any] = {"shuffle": True, "compression": "gzip", "compression_opts": 1}

_COPIED = (
    *("id", "task_id", "group_id", "policy", "agent", "status", "error_kind", "error", "node", "job_id"),
    *("sample_index", "attempt", "epoch", "started_at", "finished_at"),
)


def clean(text: str) -> str:
    """``text`` as an HDF5 string can hold it."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def message_json(message: Mapping[str, Any]) -> bytes:
    """A message as strict JSON in UTF-8. Numbers JSON does not have become null, objects it does not have strings."""
    try:
        text = json.dumps(message, ensure_ascii=False, allow_nan=False, default=_text)
    except ValueError:
        text = json.dumps(_finite(message), ensure_ascii=False, allow_nan=False, default=_text)
    return text.encode("utf-8", "backslashreplace")


def reward_name(name: str) -> str:
    """A verifier's name for a reward as the name of a dataset: no path, never empty."""
    plain = clean(name).replace("/", "_")
    return plain if plain.strip(".") else f"_{plain}"


class TrajectoryWriter:
    """A new HDF5 file at ``path``, which must not exist.

    Args:
        path: where.
        campaign: name of the campaign.
        software: name and version of what writes.
        sources: what it is gathered from, for later readers to see whether it is still all there is.
    """

    def __init__(self, path: Path, campaign: str, software: str, sources: Mapping[str, Any] | None = None) -> None:
        self._file = h5py.File(path, "x", libver=("v108", "v110"), locking=False)
        self._file.attrs["format"] = FORMAT
        self._file.attrs["format_version"] = np.int32(FORMAT_VERSION)
        self._file.attrs["campaign"] = clean(campaign)
        self._file.attrs["software"] = software
        self._file.attrs["sources"] = json.dumps(sources or {}, sort_keys=True)
        self._columns: dict[str, h5py.Dataset] = {}
        self._pending: dict[str, list[Any]] = defaultdict(list)
        self._pending_bytes = 0
        self._rewards: dict[str, dict[int, float]] = {}
        self._counts = dict.fromkeys(("n", "m", "t", "k", "q", "qb", "a", "f", "fb"), 0)
        self._flushed_rows = 0
        for column in COLUMNS.values():
            self._columns[column.path] = self._create(column)
            if column.is_offset:
                self._pending[column.path].append(0)
        self._file.create_group("rewards")

    def append(self, trajectory: Trajectory) -> None:
        """Adds one row. The trajectory is :func:`~megaflow_hpc.trajectories.winners.checked`."""
        row = self._counts["n"]
        for name in _COPIED:
            self._put(f"trajectories/{name}", getattr(trajectory, name))
        self._put("trajectories/turns", len(trajectory.turns))
        self._put("trajectories/reward", math.nan if trajectory.reward is None else trajectory.reward)
        for name, value in trajectory.rewards.items():
            self._rewards.setdefault(reward_name(name), {})[row] = value
        self._put_turns(trajectory)  # before the sequences: they are numbered from the first new one
        self._put_sequences(trajectory, row)
        for message in trajectory.messages:
            self._put_bytes("messages/json", "messages/offset", "qb", message_json(message))
        self._counts["q"] += len(trajectory.messages)
        for attempt in trajectory.attempts:
            for name in ("attempt", "status", "error_kind", "error", "node", "job_id", "started_at", "finished_at"):
                self._put(f"attempts/{name}", getattr(attempt, name))
        self._counts["a"] += len(trajectory.attempts)
        for artifact in trajectory.artifacts:
            self._put("artifacts/name", artifact.name)
            self._put("artifacts/trajectory", row)
            self._put_bytes("artifacts/bytes", "artifacts/offset", "fb", artifact.data)
        self._counts["f"] += len(trajectory.artifacts)
        self._counts["n"] += 1
        for name, count in (("sequence", "m"), ("turn", "t"), ("message", "q"), ("attempt", "a")):
            self._put(f"trajectories/{name}_offset", self._counts[count])
        if self._counts["n"] - self._flushed_rows >= _FLUSH_ROWS or self._pending_bytes >= _FLUSH_BYTES:
            self._flush()

    def close(self) -> None:
        """Writes the rest and closes; the caller makes it durable."""
        try:
            self._flush()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Closes without writing the rest."""
        self._file.close()

    def _create(self, column: Column) -> h5py.Dataset:
        dtype = h5py.string_dtype() if column.dtype == STRING else np.dtype(column.dtype)
        return self._file.create_dataset(
            column.path, shape=(0,), maxshape=(None,), dtype=dtype, chunks=(chunk(column),), **FILTERS
        )

    def _put(self, path: str, value: Any) -> None:
        self._pending[path].append(clean(value) if COLUMNS[path].dtype == STRING else value)

    def _put_array(self, path: str, values: np.ndarray[Any, Any]) -> None:
        self._pending[path].append(values)
        self._pending_bytes += values.nbytes

    def _put_bytes(self, path: str, offset_path: str, count: str, data: bytes) -> None:
        self._put_array(path, np.frombuffer(data, np.uint8))
        self._counts[count] += len(data)
        self._put(offset_path, self._counts[count])

    def _put_sequences(self, trajectory: Trajectory, row: int) -> None:
        for sequence in trajectory.sequences:
            self._put("sequences/trajectory", row)
            self._put("sequences/policy", sequence.policy)
            self._put_array("tokens/id", _view(sequence.tokens, np.int32))
            self._put_array("tokens/logprob", _view(sequence.logprobs, np.float32))
            self._put_array("tokens/loss_mask", _view(sequence.loss_mask, np.uint8))
            self._put_array("tokens/weight_version", _view(sequence.weight_versions, np.int32))
            self._counts["k"] += len(sequence.tokens)
            self._put("sequences/token_offset", self._counts["k"])
        self._counts["m"] += len(trajectory.sequences)

    def _put_turns(self, trajectory: Trajectory) -> None:
        starts = [self._counts["k"]]
        for sequence in trajectory.sequences:
            starts.append(starts[-1] + len(sequence.tokens))
        for turn in trajectory.turns:
            known = turn.sequence >= 0
            self._put("turns/sequence", self._counts["m"] + turn.sequence if known else -1)
            self._put("turns/token_start", starts[turn.sequence] + turn.token_start if known else 0)
            self._put("turns/token_end", starts[turn.sequence] + turn.token_end if known else 0)
            for name in ("finish_reason", "model_s", "sandbox_s", "agent_s", "wait_s", "server"):
                self._put(f"turns/{name}", getattr(turn, name))
        self._counts["t"] += len(trajectory.turns)

    def _flush(self) -> None:
        for path, pending in self._pending.items():
            if not pending:
                continue
            dataset = self._columns[path]
            column = COLUMNS[path]
            if column.dtype == STRING:
                values = np.array(pending, dtype=object)
            elif isinstance(pending[0], np.ndarray):
                values = np.concatenate(pending)
            else:
                values = np.array(pending, dtype=column.dtype)
            start = len(dataset)
            dataset.resize((start + len(values),))
            if len(values):
                dataset[start:] = values
            pending.clear()
        self._pending_bytes = 0
        self._flush_rewards()
        self._flushed_rows = self._counts["n"]

    def _flush_rewards(self) -> None:
        rows = self._counts["n"]
        for name, values in self._rewards.items():
            path = f"rewards/{name}"
            if path not in self._columns:
                options: dict[str, Any] = {"dtype": np.float32, "fillvalue": np.float32(np.nan), **FILTERS}
                self._columns[path] = self._file.create_dataset(
                    path, shape=(self._flushed_rows,), maxshape=(None,), chunks=(1024,), **options
                )
            new = np.full(rows - self._flushed_rows, np.nan, np.float32)
            for row, value in values.items():
                new[row - self._flushed_rows] = value
            self._columns[path].resize((rows,))
            if len(new):
                self._columns[path][self._flushed_rows :] = new
            values.clear()


def fsync(path: Path) -> None:
    """Makes a file or directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _view(values: array[Any], dtype: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(values, dtype) if len(values) else np.empty(0, dtype)


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
