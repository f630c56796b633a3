"""Checks a campaign file against the schema and its invariants, and computes the digests of its columns.

Large columns are read in windows to bound memory. ``validate`` reports each kind of fault once, at the first row
affected. Both read every byte, which makes HDF5 compare the checksum of each chunk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import h5py
import numpy as np

from megaflow_hpc.texts import parse_object
from megaflow_hpc.trajectories.hdf5.columns import Array, offset_faults, read, read_slices, texts
from megaflow_hpc.trajectories.hdf5.file import Datasets, datasets, open_file, schema_faults
from megaflow_hpc.trajectories.hdf5.schema import STATUSES
from megaflow_hpc.types import VERIFIED

_WINDOW = 1 << 20
_WINDOW_BYTES = 16 << 20


# --- validate ---------------------------------------------------------------------------------------------------------


def validate(path: str | os.PathLike[str]) -> list[str]:
    """Returns the faults of a campaign file, as messages that name the dataset and row. Empty if the file is valid.

    Raises:
        ConfigError: The file cannot be opened as a campaign file.
    """
    with open_file(path, complete=False) as file:
        columns = datasets(file)
        faults = [f"root attribute {name} is missing" for name in ("campaign", "software") if name not in file.attrs]
        # Each check relies on the ones before it.
        faults = faults or schema_faults(columns) or list(_unreadable(columns)) or list(offset_faults(file))
        if not faults:
            for check in (_trajectories, _sequences, _turns, _links, _tokens, _messages, _artifacts, _images):
                faults += check(file)
    return faults


def _unreadable(columns: Datasets) -> Iterator[str]:
    """Yields a message for each column that cannot be read completely."""
    for dataset in columns.values():
        if dataset.ndim != 1:
            continue
        try:
            for first in range(0, len(dataset), _WINDOW):
                read(dataset, first, first + _WINDOW)
        except OSError as error:
            yield str(error).removeprefix(f"{dataset.file.filename}: ")


def _trajectories(file: h5py.File) -> Iterator[str]:
    ids = texts(file["trajectories/id"])
    seen: set[str] = set()
    for number, rollout in enumerate(ids):
        if rollout in seen:
            yield f"/trajectories/id: row {number}: {rollout!r} occurs twice"
            break
        seen.add(rollout)
    status = texts(file["trajectories/status"]).astype(str)
    reward = read(file["trajectories/reward"])
    turns = read(file["trajectories/turns"])
    for row in _first(~np.isin(status, STATUSES)):
        yield f"/trajectories/status: row {row}: {str(status[row])!r}, expected one of {', '.join(STATUSES)}"
    for row in _first(~np.isin(status, VERIFIED) & ~np.isnan(reward)):
        yield f"/trajectories/reward: row {row}: {reward[row]} though {status[row]}, expected NaN"
    for row in _first(turns != np.diff(read(file["trajectories/turn_offset"]))):
        yield f"/trajectories/turns: row {row}: {turns[row]}, not what turn_offset says"


def _owners(file: h5py.File, path: str) -> Array:
    """Expands an offset column to the row number of each item."""
    counts = np.diff(read(file[path]))
    return np.repeat(np.arange(len(counts)), counts)


def _sequences(file: h5py.File) -> Iterator[str]:
    for row in _first(read(file["sequences/trajectory"]) != _owners(file, "trajectories/sequence_offset")):
        yield f"/sequences/trajectory: row {row}: not what /trajectories/sequence_offset says"
    low = read(file["sequences/weight_version_min"])
    high = read(file["sequences/weight_version_max"])
    for row in _first((low > high) | (low < -1)):
        yield f"/sequences/weight_version_min: row {row}: {low[row]}, expected -1 to {high[row]}"
    names = ("sequences/expert_layers", "sequences/experts_per_token")
    tokens = np.diff(read(file["sequences/token_offset"]))
    entries = tokens * np.prod([read(file[name]).astype(np.int64) for name in names], axis=0)
    sizes = np.diff(read(file["sequences/expert_offset"]))
    for row in _first((sizes != entries) & (sizes != 2 * entries)):
        yield f"/sequences/expert_offset: row {row}: {sizes[row]} bytes, expected {entries[row]} or twice as many"


def _turns(file: h5py.File) -> Iterator[str]:
    sequence, start, end = (read(file[f"turns/{name}"]) for name in ("sequence", "token_start", "token_end"))
    offsets = read(file["sequences/token_offset"])
    for row in _first((sequence < -1) | (sequence >= len(offsets) - 1)):
        yield f"/turns/sequence: row {row}: {sequence[row]}, expected -1 to {len(offsets) - 2}"
        return
    linked = np.flatnonzero(sequence >= 0)
    sequence, start, end = sequence[linked], start[linked], end[linked]
    owner = _owners(file, "trajectories/turn_offset")[linked]
    for i in _first(read(file["sequences/trajectory"])[sequence] != owner):
        yield f"/turns/sequence: row {linked[i]}: a sequence of another trajectory"
    is_outside = (start < offsets[sequence]) | (end > offsets[sequence + 1])
    for i in _first(is_outside | (start > end)):
        yield f"/turns: row {linked[i]}: tokens {start[i]} to {end[i]}, outside its sequence"


def _links(file: h5py.File) -> Iterator[str]:
    """Checks the links within each trajectory: the parents of messages, and the answer and starting call of each
    turn."""
    message_offset = read(file["trajectories/message_offset"])
    turn_offset = read(file["trajectories/turn_offset"])
    parent = read(file["messages/parent"])
    number = np.arange(len(parent)) - np.repeat(message_offset[:-1], np.diff(message_offset))
    for row in _first((parent < -1) | (parent >= number)):
        yield f"/messages/parent: row {row}: {parent[row]}, expected -1 to {number[row] - 1}"
    owner = _owners(file, "trajectories/turn_offset")
    caller = read(file["turns/started_by"])
    number = np.arange(len(owner)) - turn_offset[owner]
    for row in _first((caller < -1) | (caller >= number)):
        yield f"/turns/started_by: row {row}: {caller[row]}, expected -1 to {number[row] - 1}"
    answer = read(file["turns/message"])
    count = np.diff(message_offset)[owner]
    for row in _first((answer < -1) | (answer >= count)):
        yield f"/turns/message: row {row}: {answer[row]}, expected -1 to {count[row] - 1}"
        return
    linked = np.flatnonzero(answer >= 0)
    _, first_uses = np.unique((answer + message_offset[owner])[linked], return_index=True)
    for row in np.delete(linked, first_uses)[:1]:
        yield f"/turns/message: row {row}: {answer[row]}, the answer of an earlier call"


def _tokens(file: h5py.File) -> Iterator[str]:
    names = ("id", "logprob", "loss_mask", "weight_version")
    reported: set[str] = set()
    for first in range(0, len(file["tokens/id"]), _WINDOW):
        token, logprob, mask, version = (read(file[f"tokens/{name}"], first, first + _WINDOW) for name in names)
        sampled = ~np.isnan(logprob)
        faults = {
            "/tokens/id: negative": token < 0,
            "/tokens/loss_mask: neither 0 nor 1": mask > 1,
            "/tokens/loss_mask: 1 without a log-probability": ~sampled & (mask == 1),
            "/tokens/weight_version: negative with a log-probability": sampled & (version < 0),
            "/tokens/weight_version: not -1 without a log-probability": ~sampled & (version != -1),
        }
        for fault, mask in faults.items():
            for row in _first(mask):
                if fault not in reported:
                    path, what = fault.split(": ")
                    yield f"{path}: row {first + row}: {what}"
                reported.add(fault)


def _messages(file: h5py.File) -> Iterator[str]:
    offsets = read(file["messages/offset"])
    number = 0
    while number < len(offsets) - 1:
        last = max(int(np.searchsorted(offsets, offsets[number] + _WINDOW, "right")) - 1, number + 1)
        data = read(file["messages/json"], offsets[number], offsets[last]).tobytes()
        for message in range(number, last):
            start, end = offsets[message : message + 2] - offsets[number]
            try:
                parse_object(data[start:end])
            except ValueError as error:
                yield f"/messages: message {message}: {error}"
                return
        number = last


def _artifacts(file: h5py.File) -> Iterator[str]:
    owner = read(file["artifacts/trajectory"])
    rows = len(file["trajectories/id"])
    for row in _first((owner < 0) | (owner >= rows)):
        yield f"/artifacts/trajectory: row {row}: {owner[row]}, expected 0 to {rows - 1}"
        return
    for row in _first(np.diff(owner) < 0):
        yield f"/artifacts/trajectory: decreases at row {row + 1}"


def _images(file: h5py.File) -> Iterator[str]:
    digests, offsets = texts(file["images/sha256"]), read(file["images/offset"])
    yield from _image_bytes(file, digests, offsets)
    if len(set(digests)) < len(digests):
        yield "/images/sha256: an image occurs twice"
    for row in _first((read(file["images/width"]) < 1) | (read(file["images/height"]) < 1)):
        yield f"/images/width: image {row}: no pixels"
    used = read(file["image_uses/image"])
    for row in _first((used < 0) | (used >= len(digests))):
        yield f"/image_uses/image: row {row}: {used[row]}, expected 0 to {len(digests) - 1}"
    yield from _spans(file, used)


def _image_bytes(file: h5py.File, digests: Array, offsets: Array) -> Iterator[str]:
    for some in _batches(np.diff(offsets)):
        base = offsets[some.start]
        data = read(file["images/bytes"], base, offsets[some.stop]).data
        for number in range(some.start, some.stop):
            start, end = offsets[number : number + 2] - base
            if hashlib.sha256(data[start:end]).hexdigest() != digests[number]:
                yield f"/images/bytes: image {number}: not what its sha256 says"
                return


def _batches(sizes: Array) -> Iterator[slice]:
    """Yields slices of consecutive items. Without its first item, each slice is smaller than ``_WINDOW_BYTES``."""
    batch = np.cumsum(sizes) // _WINDOW_BYTES
    bounds = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(sizes)]
    return (slice(first, last) for first, last in pairwise(bounds) if first < last)


def _spans(file: h5py.File, used: Array) -> Iterator[str]:
    """Checks that each image span is inside its sequence, starts after the previous span, and refers to an image of its
    rollout."""
    start, length, image = (read(file[f"image_spans/{name}"]) for name in ("start", "length", "image"))
    owner = _owners(file, "sequences/image_offset")
    tokens = read(file["sequences/token_offset"])
    ends = start + length
    is_outside = (length < 1) | (start < tokens[owner]) | (ends > tokens[owner + 1])
    is_outside[1:] |= start[1:] < ends[:-1]
    for row in _first(is_outside):
        yield f"/image_spans: row {row}: tokens {start[row]} to {ends[row]}, outside its sequence or within another"
        return
    row_of = read(file["sequences/trajectory"])[owner]
    uses: set[tuple[int, int]] = set()
    if len(used):
        uses.update(zip(_owners(file, "trajectories/image_offset").tolist(), used.tolist(), strict=True))
    pairs = zip(row_of.tolist(), image.tolist(), strict=True)
    for row in _first(np.array([pair not in uses for pair in pairs], bool)):
        yield f"/image_spans/image: row {row}: {image[row]}, not an image of trajectory {row_of[row]}"
    for some in _batches(length):
        masks = read_slices(file["tokens/loss_mask"], start[some], ends[some])
        is_sampled = np.maximum.reduceat(masks, np.cumsum(length[some]) - length[some]) > 0
        for row in _first(is_sampled):
            row += some.start
            yield f"/image_spans: row {row}: tokens {start[row]} to {ends[row]}, some of which are sampled"
            return


def _first(mask: Array) -> list[int]:
    """Returns a list with the index of the first true entry. Returns an empty list if no entry is true."""
    indices: list[int] = np.flatnonzero(mask)[:1].tolist()
    return indices


# --- digests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnDigest:
    """Digest of one column. It depends only on the values, not on chunking or compression, so files with equal digests
    contain equal data."""

    path: str
    entries: int
    sha256: str
    """Hexadecimal digest of the decoded values."""
    state: str
    """``ok`` or a description of the fault."""

    @property
    def good(self) -> bool:
        """True if the column was read without a fault."""
        return self.state == "ok"


def column_digests(path: str | os.PathLike[str]) -> list[ColumnDigest]:
    """Reads every column and returns a :class:`ColumnDigest` for each, by path.

    Raises:
        ConfigError: The file cannot be opened as a campaign file.
    """
    with open_file(path, complete=False) as file:
        return [_digest(name, dataset) for name, dataset in sorted(datasets(file).items())]


def _digest(name: str, dataset: h5py.Dataset) -> ColumnDigest:
    if dataset.ndim != 1 or dataset.dtype.kind == "O":  # h5py reads variable-length data as objects
        return ColumnDigest(name, 0, "", "cannot be read: it is not a column of numbers or text")
    digest = hashlib.sha256()
    chunk = dataset.chunks[0] if dataset.chunks else 1
    step = max(1, _WINDOW_BYTES // (dataset.dtype.itemsize * chunk)) * chunk
    try:
        for start in range(0, len(dataset), step):
            digest.update(read(dataset, start, start + step).tobytes())
    except OSError as error:
        return ColumnDigest(name, len(dataset), "", f"cannot be read: {error}")
    return ColumnDigest(name, len(dataset), digest.hexdigest(), "ok")
