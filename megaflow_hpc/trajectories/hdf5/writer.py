"""Writes trajectories into an HDF5 file of the schema, row by row or in runs of rows of another file, in little memory.

Values are collected per column and handed to :mod:`~megaflow_hpc.trajectories.hdf5.column_writer` some hundred
trajectories at a time. The file is complete only after ``close``; callers write it under a temporary name and publish
it then.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from megaflow_hpc.trajectories.hdf5 import column_writer, schema
from megaflow_hpc.trajectories.hdf5.backing_file import BackingFile
from megaflow_hpc.trajectories.hdf5.chunks import ChunkCache, ChunkedColumn, gather
from megaflow_hpc.trajectories.hdf5.columns import read
from megaflow_hpc.trajectories.hdf5.encoding import escape, message_json, reward_name
from megaflow_hpc.trajectories.hdf5.numbering import NUMBERED, ROWS, missing, rebased, spans_of
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, FORMAT, FORMAT_VERSION, STRING, TEXT
from megaflow_hpc.trajectories.hdf5.structure import MEMBERS
from megaflow_hpc.trajectory import Trajectory, linked
from megaflow_hpc.version import __version__

_FLUSH_ROWS = 256

Mask = np.ndarray[Any, Any]
"""Booleans, one per item."""

_COPIED = (
    *("id", "task_id", "group_id", "policy", "agent", "status", "error_kind", "error", "node", "job_id"),
    *("rank", "seed", "sample_index", "attempt", "epoch", "inexact", "constrained", "started_at", "finished_at"),
)
_TURN = tuple(c.name for c in COLUMNS.values() if c.group == "turns" and c.path not in NUMBERED)
_ATTEMPT = ("attempt", "status", "error_kind", "error", "node", "job_id", "started_at", "finished_at")

_PICKED = {"attempts": "a", "artifacts": "f"}
"""Groups of which :meth:`TrajectoryWriter.extend` may keep a part, and their extents."""


class TrajectoryWriter:
    """A new HDF5 file at ``path``, which must not exist.

    As a context manager it closes at the end, and abandons the file after an error.

    Args:
        path: the file, usually a temporary name that the caller publishes.
        campaign: name of the campaign.
        sources: journals and seals it is gathered from, by which later readers see whether it is still complete.
        attributes: further root attributes.
    """

    def __init__(
        self,
        path: Path,
        campaign: str,
        sources: Mapping[str, Any] | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        self._backing = BackingFile(path)
        self._file = h5py.File(self._backing, "w", libver=("v110", "v110"))
        self._file.attrs["format"] = FORMAT
        self._file.attrs["format_version"] = np.int32(FORMAT_VERSION)
        self._file.attrs["campaign"] = escape(campaign)
        self._file.attrs["software"] = f"megaflow-hpc {__version__}"
        self._file.attrs["sources"] = json.dumps(sources or {}, sort_keys=True)
        self.describe(**(attributes or {}))
        self._threads = column_writer.pool()
        self._columns = {path: column_writer.column(self._file, spec, self._threads) for path, spec in COLUMNS.items()}
        self._held: dict[str, list[Any]] = {path: [] for path in COLUMNS}
        self._rewards: dict[str, dict[int, float]] = {}
        self._reward_columns: dict[str, column_writer.Column] = {}
        self._counts = dict.fromkeys(("n", "m", "t", "k", "q", "qb", "a", "f", "fb"), 0)
        self._flushed_rows = 0
        self.copied = 0
        """Number of entries copied from other files in compressed form."""
        for column in COLUMNS.values():
            if column.is_offset:
                self._held[column.path].append(0)
        self._file.create_group("rewards")

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __len__(self) -> int:
        return self._counts["n"]

    def describe(self, **attributes: str) -> None:
        """Sets root attributes."""
        for name, value in attributes.items():
            self._file.attrs[name] = escape(value)

    def append(self, trajectory: Trajectory) -> None:
        """Adds one row.

        Args:
            trajectory: one that is whole (:func:`~megaflow_hpc.trajectories.journal.checks.checked`).
        """
        held, counts = self._held, self._counts
        row = counts["n"]
        for name in _COPIED:
            held[f"trajectories/{name}"].append(getattr(trajectory, name))
        for name in schema.UNKNOWN_AS_NAN:
            value = getattr(trajectory, name)
            held[f"trajectories/{name}"].append(math.nan if value is None else value)
        held["trajectories/turns"].append(len(trajectory.turns))
        for name, value in trajectory.rewards.items():
            if self._takes(column := reward_name(name)):
                self._rewards.setdefault(column, {})[row] = value
        self._put_turns(trajectory)  # before the sequences: they are numbered from the first new one
        self._put_sequences(trajectory, row)
        texts = [message_json(message) for message in trajectory.messages]
        self._put_bytes("messages/json", "messages/offset", "qb", texts)
        held["messages/parent"] += linked(trajectory.parents, len(texts))
        counts["q"] += len(texts)
        for name in _ATTEMPT:
            held[f"attempts/{name}"] += [getattr(attempt, name) for attempt in trajectory.attempts]
        counts["a"] += len(trajectory.attempts)
        held["artifacts/name"] += [artifact.name for artifact in trajectory.artifacts]
        held["artifacts/trajectory"] += [row] * len(trajectory.artifacts)
        self._put_bytes("artifacts/bytes", "artifacts/offset", "fb", [a.data for a in trajectory.artifacts])
        counts["f"] += len(trajectory.artifacts)
        counts["n"] += 1
        for extent, name in ROWS.items():
            held[f"trajectories/{name}"].append(counts[extent])
        if counts["n"] - self._flushed_rows >= _FLUSH_ROWS:
            self._flush()

    def extend(self, source: h5py.File, start: int, end: int, keep: Mapping[str, Mask] | None = None) -> None:
        """Adds rows ``[start, end)`` of another file of the schema, with their references renumbered.

        Where the chunks of both files lie on one grid, those of flat columns are copied without being inflated.

        Args:
            source: an open file of the schema.
            start, end: row numbers of it.
            keep: by extent, ``a`` (attempts) or ``f`` (artifacts), a mask over all items of the source that says which
                ones to copy; without one all are.

        Raises:
            OSError: not everything could be written.
        """
        if start >= end:
            return
        self._flush()
        keep = keep or {}
        spans = spans_of(source, start, end)
        shift = {extent: self._counts[extent] - span[0] for extent, span in spans.items()}
        for path, spec in COLUMNS.items():
            extent = spec.extent.removesuffix("+1")
            first, last = spans[extent]
            column = self._columns[path]
            if spec.group in _PICKED and _PICKED[spec.group] in keep:
                continue
            if path == "trajectories/attempt_offset" and "a" in keep:
                kept = np.concatenate([[0], np.cumsum(keep["a"])])
                column.put(kept[read(source[path], start + 1, end + 1)] - kept[spans["a"][0]] + self._counts["a"])
            elif path not in source:
                offsets = read(source["trajectories/message_offset"], start, end + 1)
                column.put(missing(path, last - first, offsets))
            elif path in NUMBERED:
                values = read(source[path], first + spec.is_offset, last + spec.is_offset)
                column.put(rebased(path, values, shift, source, (first, last)))
            else:
                self.copied += column.extend(source[path], first, last)
        for name, dataset in source.get("rewards", {}).items():
            if self._takes(name):
                self._reward_column(name).put(read(dataset, start, end))
        for extent, (first, last) in spans.items():
            if extent not in keep and not (extent == "fb" and "f" in keep):
                self._counts[extent] += last - first
        self._fill_rewards()
        if "a" in keep:
            self._pick_attempts(source, spans["a"], keep["a"])
        if "f" in keep:
            self._pick_artifacts(source, spans["f"], keep["f"], shift["n"])
        self._backing.check()

    def _pick_attempts(self, source: h5py.File, span: tuple[int, int], keep: Mask) -> None:
        mask = keep[span[0] : span[1]]
        for name in _ATTEMPT:
            self._columns[f"attempts/{name}"].put(read(source[f"attempts/{name}"], span[0], span[1])[mask])
        self._counts["a"] += int(mask.sum())

    def _pick_artifacts(self, source: h5py.File, span: tuple[int, int], keep: Mask, shift: int) -> None:
        mask = keep[span[0] : span[1]]
        self._columns["artifacts/name"].put(read(source["artifacts/name"], *span)[mask])
        self._held["artifacts/trajectory"] += (read(source["artifacts/trajectory"], *span)[mask] + shift).tolist()
        offsets = read(source["artifacts/offset"], span[0], span[1] + 1)
        data = ChunkedColumn(source["artifacts/bytes"], ChunkCache())
        for number in np.flatnonzero(mask).tolist():  # one at a time: they may be large
            (found,) = gather([data], offsets[number : number + 1], offsets[number + 1 : number + 2])
            self._put_bytes("artifacts/bytes", "artifacts/offset", "fb", [found.tobytes()])
        self._counts["f"] += int(mask.sum())
        self._flush()

    def close(self) -> None:
        """Writes what is still held and closes the file; making it durable is up to the caller.

        Raises:
            OSError: not everything could be written.
        """
        try:
            self._flush()
            for column in [*self._columns.values(), *self._reward_columns.values()]:
                column.finish()
        finally:
            self.abandon()
        self._backing.check()

    def abandon(self) -> None:
        """Closes the file without writing what is still held."""
        self._threads.shutdown(cancel_futures=True)
        self._file.close()
        self._backing.close()

    def _put_bytes(self, path: str, offset_path: str, count: str, items: list[bytes]) -> None:
        if not items:
            return
        self._columns[path].put(np.frombuffer(b"".join(items), np.uint8))
        ends = list(accumulate(map(len, items), initial=self._counts[count]))[1:]
        self._held[offset_path] += ends
        self._counts[count] = ends[-1]

    def _put_sequences(self, trajectory: Trajectory, row: int) -> None:
        held = self._held
        for sequence in trajectory.sequences:
            versions = _view(sequence.weight_versions, np.int32)
            mask = _view(sequence.loss_mask, np.uint8)
            sampled = versions[versions >= 0]
            held["sequences/trajectory"].append(row)
            held["sequences/policy"].append(sequence.policy)
            held["sequences/weight_version_min"].append(sampled.min() if len(sampled) else -1)
            held["sequences/weight_version_max"].append(sampled.max() if len(sampled) else -1)
            self._columns["tokens/id"].put(_view(sequence.tokens, np.int32))
            self._columns["tokens/logprob"].put(_view(sequence.logprobs, np.float32))
            self._columns["tokens/loss_mask"].put(mask)
            self._columns["tokens/weight_version"].put(versions)
            self._counts["k"] += len(sequence.tokens)
            held["sequences/token_offset"].append(self._counts["k"])
        self._counts["m"] += len(trajectory.sequences)

    def _put_turns(self, trajectory: Trajectory) -> None:
        starts = list(accumulate((len(s.tokens) for s in trajectory.sequences), initial=self._counts["k"]))
        held, base = self._held, self._counts["m"]
        for turn in trajectory.turns:
            known = turn.sequence >= 0
            held["turns/sequence"].append(base + turn.sequence if known else -1)
            held["turns/token_start"].append(starts[turn.sequence] + turn.token_start if known else 0)
            held["turns/token_end"].append(starts[turn.sequence] + turn.token_end if known else 0)
        for name in _TURN:
            held[f"turns/{name}"] += [getattr(turn, name) for turn in trajectory.turns]
        self._counts["t"] += len(trajectory.turns)

    def _flush(self) -> None:
        for path, values in self._held.items():
            if values:
                self._columns[path].put(_array(COLUMNS[path].dtype, values))
                self._held[path] = []
        for name, given in self._rewards.items():
            column = self._reward_column(name)
            new = np.full(self._counts["n"] - self._flushed_rows, np.nan, np.float32)
            for row, value in given.items():
                new[row - self._flushed_rows] = value
            column.put(new)
            given.clear()
        self._rewards = {name: {} for name in self._rewards}
        self._flushed_rows = self._counts["n"]
        self._backing.check()

    def _takes(self, reward: str) -> bool:
        """Whether there is a column for a reward, or room for one in what readers take."""
        return reward in self._rewards or len(self._rewards) < MEMBERS

    def _reward_column(self, name: str) -> column_writer.Column:
        """Returns the column of a reward, padded with NaN up to the last flush."""
        if name not in self._reward_columns:
            column = column_writer.Column(
                self._file, f"rewards/{name}", np.float32, 4096, True, self._threads, fill=np.float32(np.nan)
            )
            self._reward_columns[name] = column
            self._rewards.setdefault(name, {})
        column = self._reward_columns[name]
        if len(column) < self._flushed_rows:
            column.put(np.full(self._flushed_rows - len(column), np.nan, np.float32))
        return column

    def _fill_rewards(self) -> None:
        self._flushed_rows = self._counts["n"]
        for name in self._reward_columns:
            self._reward_column(name)


def _array(dtype: str, values: list[Any]) -> np.ndarray[Any, Any]:
    if dtype == TEXT:
        return np.array([escape(value) for value in values], dtype=object)
    if dtype == STRING:
        known = {value: escape(value).encode() for value in set(values)}
        return np.array([known[value] for value in values], dtype="S")
    return np.array(values, dtype=dtype)


def _view(values: array[Any], dtype: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(values, dtype) if len(values) else np.empty(0, dtype)
