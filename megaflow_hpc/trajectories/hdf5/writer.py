"""Writes campaign files row by row, using little memory.

A column buffers its values and writes whole chunks, so HDF5 compresses each chunk once. Every chunk carries HDF5's
fletcher32 checksum, which is verified on every read. A file is complete only after ``close``, so callers write it under
a temporary name and then publish it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from megaflow_hpc.trajectories.hdf5.columns import Array
from megaflow_hpc.trajectories.hdf5.file import continued_file, new_file
from megaflow_hpc.trajectories.hdf5.schema import (
    BYTE_CHUNK,
    COLUMNS,
    MAX_REWARD_COLUMNS,
    ROW_CHUNK,
    ROW_COLUMNS,
    STRING,
    TEXT,
    UNKNOWN_AS_NAN,
    Column,
    escape,
    message_json,
    reward_name,
    text_offset,
)
from megaflow_hpc.trajectory import Image, Trajectory, linked
from megaflow_hpc.types import is_part_reward

_FLUSH_ROWS = 256

_COPIED = [column.name for column in ROW_COLUMNS if column.name not in ("turns", *UNKNOWN_AS_NAN)]
_TIMED = ("model_s", "sandbox_s", "agent_s", "wait_s")
_TURN = ("finish_reason", *_TIMED, "server", "policy", "message", "started_by", "role")
_ATTEMPT = [column.name for column in COLUMNS.values() if column.group == "attempts"]

_ROW_OFFSETS = {"m": "sequence_offset", "t": "turn_offset", "q": "message_offset", "a": "attempt_offset"}
_ROW_OFFSETS |= {"u": "image_offset"}
"""Offset column of ``/trajectories`` for the items of each extent."""
_BATCH_BYTES = 1 << 20
"""Size in bytes at which a column flushes its buffer."""
_MIN_STRING_BYTES = 16


class ColumnWriter:
    """Appends to a column of numbers or fixed-width strings. Creates the column if it does not exist.

    Args:
        file: A file open for writing.
        path: Dataset name.
        dtype: Type of the entries; ``S`` for strings.
        chunk: Entries per chunk.
        shuffle: Whether to apply HDF5's shuffle filter before deflate.
        deflate: Whether to compress the column.
        fill: Fill value for entries that are never written.
    """

    def __init__(
        self,
        file: h5py.File,
        path: str,
        dtype: Any,
        chunk: int,
        shuffle: bool = True,
        deflate: bool = True,
        fill: Any = None,
    ) -> None:
        self._file = file
        self._path = path
        self._options = {
            "shape": (0,),
            "maxshape": (None,),
            "chunks": (chunk,),
            "shuffle": shuffle,
            **({"compression": "gzip", "compression_opts": 1} if deflate else {}),
            "fletcher32": True,
            "fillvalue": fill,
            "track_times": False,
        }
        self._chunk = chunk
        self._is_text = np.dtype(dtype).kind == "S"
        self.dtype = h5py.string_dtype("utf-8", _MIN_STRING_BYTES) if self._is_text else np.dtype(dtype)
        self._written = 0
        """Number of entries in the dataset's complete chunks."""
        self._buffer: list[Array] = []
        self._buffered = 0
        if path not in file:
            self._dataset = file.create_dataset(path, dtype=self.dtype, **self._options)
            return
        self._dataset = file[path]
        if self._is_text:
            self.dtype = h5py.string_dtype("utf-8", self._dataset.dtype.itemsize)
        self._buffered = len(self._dataset) % chunk  # the last chunk is written again
        self._written = len(self._dataset) - self._buffered
        self._buffer = [self._dataset[self._written :]] if self._buffered else []

    def __len__(self) -> int:
        return self._written + self._buffered

    def append(self, values: Array) -> None:
        """Appends a one-dimensional array. Does not copy it, so the caller must not modify it afterwards."""
        if not len(values):
            return
        if self._is_text:
            values = self._fitted(values)
        self._buffer.append(values)
        self._buffered += len(values)
        if self._buffered * self.dtype.itemsize >= _BATCH_BYTES:
            self._write(self._buffered - self._buffered % self._chunk)

    def finish(self) -> None:
        """Flushes the buffer."""
        self._write(self._buffered)

    def _write(self, count: int) -> None:
        """Writes the first ``count`` buffered entries."""
        if not count:
            return
        values = np.empty(self._buffered, self.dtype)
        np.concatenate(self._buffer, out=values, casting="unsafe")
        end = self._written + count
        self._dataset.resize((end,))
        self._dataset[self._written : end] = values[:count]
        self._written = end
        self._buffer = [values[count:]] if count < len(values) else []
        self._buffered = len(values) - count

    def _fitted(self, values: Array) -> Array:
        """Encodes strings as bytes, widening the column if one does not fit."""
        if values.dtype.kind != "S":
            values = np.array([text.encode("utf-8", "replace") for text in values.tolist()], "S")
        if values.dtype.itemsize > self.dtype.itemsize:
            longest = int(np.char.str_len(values).max())
            if longest > self.dtype.itemsize:
                self._widen(1 << (longest - 1).bit_length())
        return values

    def _widen(self, width: int) -> None:
        """Rewrites the column with wider strings. This is rare, and strings are only a small part of a file."""
        written = self._dataset[: self._written]
        del self._file[self._path]
        self.dtype = h5py.string_dtype("utf-8", width)
        self._dataset = self._file.create_dataset(self._path, dtype=self.dtype, **self._options)
        self._buffer.insert(0, written)
        self._buffered += self._written
        self._written = 0


class TextColumnWriter:
    """Appends to a column of strings of any length, which is stored as UTF-8 bytes and offsets."""

    def __init__(self, file: h5py.File, path: str, chunk: int) -> None:
        self._bytes = ColumnWriter(file, path, np.uint8, BYTE_CHUNK, shuffle=False)
        self._offsets = ColumnWriter(file, text_offset(path), np.int64, chunk)
        if not len(self._offsets):
            self._offsets.append(np.zeros(1, np.int64))
        self._end = len(self._bytes)

    def append(self, values: Array) -> None:
        """Appends a one-dimensional array of ``str``."""
        encoded = [text.encode("utf-8", "replace") for text in values.tolist()]
        ends = self._end + np.cumsum([len(data) for data in encoded], dtype=np.int64)
        self._bytes.append(np.frombuffer(b"".join(encoded), np.uint8))
        self._offsets.append(ends)
        self._end = len(self._bytes)

    def finish(self) -> None:
        """Flushes the buffers."""
        self._bytes.finish()
        self._offsets.finish()


def column_writer(file: h5py.File, column: Column) -> ColumnWriter | TextColumnWriter:
    """Opens a schema column. Creates it empty if it does not exist."""
    if column.dtype == TEXT:
        return TextColumnWriter(file, column.path, column.chunk)
    dtype = "S" if column.dtype == STRING else column.dtype
    return ColumnWriter(file, column.path, dtype, column.chunk, column.is_shuffled, column.is_deflated)


def reward_writer(file: h5py.File, name: str) -> ColumnWriter:
    """Opens the column of a named reward. Creates it empty if it does not exist."""
    return ColumnWriter(file, f"rewards/{name}", np.float32, ROW_CHUNK, fill=np.float32(np.nan))


class ColumnLists:
    """Converts trajectories to lists of column values. Flat columns, such as tokens and message texts, are left out.

    Args:
        paths: Columns to collect. Other columns are ignored.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.values: dict[str, list[Any]] = {path: [] for path in paths}
        self.counts: Counter[str] = Counter()
        """Number of items so far, by extent."""
        self.images: dict[bytes, int] = {}
        """Row of ``/images`` for each image so far, by SHA-256."""

    def add(self, trajectory: Trajectory) -> list[Image]:
        """Adds a trajectory as the next row. Returns its new images, which no earlier row contains."""
        counts = self.counts
        new = self._add_images(trajectory)
        row = {name: getattr(trajectory, name) for name in _COPIED}
        for name in UNKNOWN_AS_NAN:
            value = getattr(trajectory, name)
            row[name] = math.nan if value is None else value
        row["turns"] = len(trajectory.turns)
        self._add_turns(trajectory)
        self._add_sequences(trajectory)
        self._extend("messages/parent", linked(trajectory.parents, len(trajectory.messages)))
        counts["q"] += len(trajectory.messages)
        for name in _ATTEMPT:
            self._extend(f"attempts/{name}", [getattr(attempt, name) for attempt in trajectory.attempts])
        counts["a"] += len(trajectory.attempts)
        self._extend("artifacts/name", [artifact.name for artifact in trajectory.artifacts])
        self._extend("artifacts/trajectory", [counts["n"]] * len(trajectory.artifacts))
        counts["f"] += len(trajectory.artifacts)
        counts["n"] += 1
        for extent, name in _ROW_OFFSETS.items():
            row[name] = counts[extent]
        for name, value in row.items():
            self._extend(f"trajectories/{name}", [value])
        return new

    def _extend(self, path: str, values: list[Any]) -> None:
        if path in self.values:
            self.values[path] += values

    def _add_images(self, trajectory: Trajectory) -> list[Image]:
        """Adds the images of a row. Call it before adding the row's sequences, whose spans refer to the images."""
        new = []
        for image in trajectory.images.values():
            key = bytes.fromhex(image.sha256)
            if key not in self.images:
                self.images[key] = len(self.images)
                new.append(image)
            self._extend("image_uses/image", [self.images[key]])
        for name in ("sha256", "media_type", "width", "height"):
            self._extend(f"images/{name}", [getattr(image, name) for image in new])
        self.counts["u"] += len(trajectory.images)
        return new

    def _add_turns(self, trajectory: Trajectory) -> None:
        """Adds the turns of a row. Call it before adding the row's sequences, because turns refer to the next free
        sequence and token."""
        sequence_lengths = [len(sequence.tokens) for sequence in trajectory.sequences]
        token_starts = list(accumulate(sequence_lengths, initial=self.counts["k"]))
        sequences, starts, ends = [], [], []
        for turn in trajectory.turns:
            is_known = turn.sequence >= 0
            first_token = token_starts[turn.sequence] if is_known else 0
            sequences.append(self.counts["m"] + turn.sequence if is_known else -1)
            starts.append(first_token + turn.token_start if is_known else 0)
            ends.append(first_token + turn.token_end if is_known else 0)
        self._extend("turns/sequence", sequences)
        self._extend("turns/token_start", starts)
        self._extend("turns/token_end", ends)
        for name in _TURN:
            self._extend(f"turns/{name}", [getattr(turn, name) for turn in trajectory.turns])
        self.counts["t"] += len(trajectory.turns)

    def _add_sequences(self, trajectory: Trajectory) -> None:
        for sequence in trajectory.sequences:
            versions = np.asarray(sequence.weight_versions)
            sampled = versions[versions >= 0]
            self._extend("image_spans/start", [self.counts["k"] + span.start for span in sequence.images])
            self._extend("image_spans/length", [span.length for span in sequence.images])
            rows = [self.images[bytes.fromhex(span.image)] for span in sequence.images]
            self._extend("image_spans/image", rows)
            self.counts["p"] += len(sequence.images)
            self.counts["k"] += len(sequence.tokens)
            self.counts["eb"] += len(sequence.experts)
            values = {
                "trajectory": self.counts["n"],
                "policy": sequence.policy,
                "weight_version_min": sampled.min() if len(sampled) else -1,
                "weight_version_max": sampled.max() if len(sampled) else -1,
                "token_offset": self.counts["k"],
                "expert_layers": sequence.expert_layers,
                "experts_per_token": sequence.experts_per_token,
                "expert_offset": self.counts["eb"],
                "image_offset": self.counts["p"],
            }
            for name, value in values.items():
                self._extend(f"sequences/{name}", [value])
        self.counts["m"] += len(trajectory.sequences)


class TrajectoryWriter:
    """Writes a campaign file. A context manager that closes the file, or discards it after an error.

    Args:
        path: The file, usually a temporary name that the caller publishes. It must not exist, unless ``append``.
        campaign: Name of the campaign.
        sources: The journals and seals from which the file is gathered. Readers compare them with the run's journals
            and seals.
        attributes: Additional root attributes.
        append: Continue an existing file that a writer has closed. Its root attributes are kept.
    """

    def __init__(
        self,
        path: Path,
        campaign: str,
        sources: Mapping[str, Any] | None = None,
        attributes: Mapping[str, str] | None = None,
        append: bool = False,
    ) -> None:
        self._open = ExitStack()
        opened = continued_file(path) if append else new_file(path, campaign, sources, attributes)
        self._file, self._backing = self._open.enter_context(opened)
        self._columns = {name: column_writer(self._file, column) for name, column in COLUMNS.items()}
        self._rewards: dict[str, ColumnWriter] = {}
        self._held_rewards: dict[str, dict[int, float]] = {}
        """Rewards of the rows since the last flush, by name and row."""
        for name in self._file.require_group("rewards"):
            self._rewards[name], self._held_rewards[name] = reward_writer(self._file, name), {}
        self._lists = ColumnLists(COLUMNS)
        """Values of the rows since the last flush."""
        for name, column in COLUMNS.items():
            written = self._columns[name]
            if column.is_offset and not append:
                self._lists.values[name].append(0)
            elif isinstance(written, ColumnWriter) and not column.is_offset:
                self._lists.counts[column.extent] = len(written)
        digests = self._file["images/sha256"][:].tolist()
        self._lists.images = {bytes.fromhex(digest.decode()): row for row, digest in enumerate(digests)}

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._open.__exit__(kind, error, trace)

    def __len__(self) -> int:
        return self._lists.counts["n"]

    def append(self, trajectory: Trajectory) -> None:
        """Adds one row.

        Args:
            trajectory: A trajectory that passed :func:`~megaflow_hpc.trajectories.journal.checks.checked`.

        Raises:
            OSError: A write failed.
        """
        for name, value in trajectory.rewards.items():
            self._put_reward(len(self), reward_name(name), value)
        for sequence in trajectory.sequences:
            self._columns["tokens/id"].append(np.asarray(sequence.tokens))
            self._columns["tokens/logprob"].append(np.asarray(sequence.logprobs))
            self._columns["tokens/loss_mask"].append(np.asarray(sequence.loss_mask))
            self._columns["tokens/weight_version"].append(np.asarray(sequence.weight_versions))
            self._columns["experts/bytes"].append(np.asarray(sequence.experts))
        messages = [message_json(message) for message in trajectory.messages]
        self._put_items("messages/json", "messages/offset", messages)
        self._put_items("artifacts/bytes", "artifacts/offset", [artifact.data for artifact in trajectory.artifacts])
        new = self._lists.add(trajectory)
        self._put_items("images/bytes", "images/offset", [image.data for image in new])
        if len(self) % _FLUSH_ROWS == 0:
            self._flush()

    def close(self) -> None:
        """Flushes all columns and closes the file. The caller must fsync it.

        Raises:
            OSError: A write failed.
        """
        with self._open:
            self._flush()
            for column in [*self._columns.values(), *self._rewards.values()]:
                column.finish()

    def _put_reward(self, row: int, name: str, value: float) -> None:
        # A rollout may have a reward for every turn. These must not use up the columns that other rewards need.
        most = MAX_REWARD_COLUMNS // 2 if is_part_reward(name) else MAX_REWARD_COLUMNS
        if name in self._held_rewards or len(self._held_rewards) < most:
            self._held_rewards.setdefault(name, {})[row] = value

    def _put_items(self, path: str, offset_path: str, items: list[bytes]) -> None:
        """Appends items of varying length to a flat column, and their end offsets to its offset column."""
        self._columns[path].append(np.frombuffer(b"".join(items), np.uint8))
        for item in items:
            self._lists.counts[COLUMNS[path].extent] += len(item)
            self._lists.values[offset_path].append(self._lists.counts[COLUMNS[path].extent])

    def _flush(self) -> None:
        for path, values in self._lists.values.items():
            if values:
                self._columns[path].append(_array(COLUMNS[path].dtype, values))
                values.clear()
        for name, given in self._held_rewards.items():
            self._flush_reward(name, given)
        self._backing.check()

    def _flush_reward(self, name: str, given: dict[int, float]) -> None:
        """Extends a reward column to cover the new rows. Rows without this reward get NaN."""
        if name not in self._rewards:
            self._rewards[name] = reward_writer(self._file, name)
        column = self._rewards[name]
        values = np.full(len(self) - len(column), np.nan, np.float32)
        for row, value in given.items():
            values[row - len(column)] = value
        column.append(values)
        given.clear()


def _array(dtype: str, values: list[Any]) -> Array:
    if dtype == TEXT:
        return np.array([escape(value) for value in values], object)
    if dtype == STRING:
        encoded = {value: escape(value).encode() for value in set(values)}
        return np.array([encoded[value] for value in values], "S")
    return np.array(values, dtype=dtype)
