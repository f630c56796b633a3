"""Checks a campaign file against the schema and its invariants.

Large columns are read in windows, so memory stays bounded. Each kind of fault is reported once, at its first place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.hdf5.file import open_file
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OPTIONAL, STATUSES, STRING, TEXT

_WINDOW = 1 << 20

_EXTENTS = {
    "n": "trajectories/id",
    "m": "sequences/trajectory",
    "t": "turns/sequence",
    "k": "tokens/id",
    "qb": "messages/json",
    "a": "attempts/attempt",
    "f": "artifacts/name",
    "fb": "artifacts/bytes",
}
"""The column whose length each extent is; of messages only the offsets count."""

_TARGETS = {
    "trajectories/sequence_offset": "sequences/trajectory",
    "trajectories/turn_offset": "turns/sequence",
    "trajectories/attempt_offset": "attempts/attempt",
    "sequences/token_offset": "tokens/id",
    "messages/offset": "messages/json",
    "artifacts/offset": "artifacts/bytes",
}
"""The column whose length an offset column ends with; ``message_offset`` ends with the number of messages."""


def validate(path: str | os.PathLike[str]) -> list[str]:
    """Returns what is wrong with the file, in words that name dataset and row; an empty list if nothing is.

    Raises:
        ConfigError: it cannot be opened as a campaign file at all.
    """
    with open_file(path, complete=False) as file:
        problems = list(_structure(file))
        if not problems:
            problems = list(_offsets(file))
        if not problems:
            for check in (_trajectories, _rewards, _sequences, _turns, _tokens, _messages, _artifacts):
                problems += check(file)
    return problems


def _structure(file: h5py.File) -> Iterator[str]:
    for attribute in ("campaign", "software"):
        if attribute not in file.attrs:
            yield f"root attribute {attribute} is missing"
    for path, column in COLUMNS.items():
        if path not in file:
            if path not in OPTIONAL:
                yield f"/{path}: is missing"
            continue
        dataset = file[path]
        if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1:
            yield f"/{path}: is no one-dimensional dataset"
            continue
        text = h5py.check_string_dtype(dataset.dtype)
        if column.dtype in (STRING, TEXT):
            if text is None or text.encoding != "utf-8":
                yield f"/{path}: type {dataset.dtype}, expected UTF-8 strings"
        elif dataset.dtype != np.dtype(column.dtype):
            yield f"/{path}: type {dataset.dtype}, expected {column.dtype}"


def _offsets(file: h5py.File) -> Iterator[str]:
    for path, column in COLUMNS.items():
        extent = column.extent.removesuffix("+1")
        if path not in file:
            continue
        if extent in _EXTENTS:
            expected = len(file[_EXTENTS[extent]]) + column.is_offset
            if len(file[path]) != expected:
                yield f"/{path}: {len(file[path])} entries, expected {expected}"
                continue
        if not column.is_offset:
            continue
        values = file[path][:]
        end = len(file["messages/offset"]) - 1 if path == "trajectories/message_offset" else len(file[_TARGETS[path]])
        led = "journal" in file.attrs and column.group in ("sequences", "messages", "artifacts")  # a shard, whose
        if not len(values) or (values[0] != 0 and not led) or values[-1] != end:  # columns may begin behind another's
            yield f"/{path}: runs from {values[:1]} to {values[-1:]}, expected 0 to {end}"
        elif (bad := _first(np.diff(values) < 0)) is not None:
            yield f"/{path}: decreases at row {bad + 1}"


def _trajectories(file: h5py.File) -> Iterator[str]:
    ids = file["trajectories/id"].asstr()[:]
    seen: set[str] = set()
    for number, rollout in enumerate(ids):
        if rollout in seen:
            yield f"/trajectories/id: row {number}: {rollout!r} is there twice"
            break
        seen.add(rollout)
    status = file["trajectories/status"].asstr()[:]
    reward = file["trajectories/reward"][:]
    turns = file["trajectories/turns"][:]
    if (row := _first(~np.isin(status.astype(str), STATUSES))) is not None:
        yield f"/trajectories/status: row {row}: {status[row]!r}, expected one of {', '.join(STATUSES)}"
    verified = np.isin(status.astype(str), STATUSES[:2])
    if (row := _first(~verified & ~np.isnan(reward))) is not None:
        yield f"/trajectories/reward: row {row}: {reward[row]} though {status[row]}, expected NaN"
    if (row := _first(turns != np.diff(file["trajectories/turn_offset"][:]))) is not None:
        yield f"/trajectories/turns: row {row}: {turns[row]}, not what turn_offset says"


def _rewards(file: h5py.File) -> Iterator[str]:
    rows = len(file["trajectories/id"])
    for name, dataset in file.get("rewards", {}).items():
        if dataset.shape != (rows,) or dataset.dtype != np.float32:
            yield f"/rewards/{name}: {dataset.dtype} {dataset.shape}, expected float32 ({rows},)"


def _owners(file: h5py.File, path: str) -> NDArray[Any]:
    """Returns the row of the trajectory that each item belongs to, by the offsets."""
    counts = np.diff(file[path][:])
    return np.repeat(np.arange(len(counts)), counts)


def _sequences(file: h5py.File) -> Iterator[str]:
    if (row := _first(file["sequences/trajectory"][:] != _owners(file, "trajectories/sequence_offset"))) is not None:
        yield f"/sequences/trajectory: row {row}: not what /trajectories/sequence_offset says"
    if "sequences/weight_version_min" in file and "sequences/weight_version_max" in file:
        low, high = file["sequences/weight_version_min"][:], file["sequences/weight_version_max"][:]
        if (row := _first((low > high) | (low < -1))) is not None:
            yield f"/sequences/weight_version_min: row {row}: {low[row]}, expected -1 to {high[row]}"


def _turns(file: h5py.File) -> Iterator[str]:
    sequence, start, end = (file[f"turns/{name}"][:] for name in ("sequence", "token_start", "token_end"))
    offsets = file["sequences/token_offset"][:]
    if (row := _first((sequence < -1) | (sequence >= len(offsets) - 1))) is not None:
        yield f"/turns/sequence: row {row}: {sequence[row]}, expected -1 to {len(offsets) - 2}"
        return
    known = sequence >= 0
    owner = _owners(file, "trajectories/turn_offset")[known]
    if (row := _first(file["sequences/trajectory"][:][sequence[known]] != owner)) is not None:
        yield f"/turns/sequence: row {np.flatnonzero(known)[row]}: a sequence of another trajectory"
    inside = (offsets[sequence[known]] <= start[known]) & (end[known] <= offsets[sequence[known] + 1])
    if (row := _first(~(inside & (start[known] <= end[known])))) is not None:
        row = int(np.flatnonzero(known)[row])
        yield f"/turns: row {row}: tokens {start[row]} to {end[row]}, outside its sequence"


def _tokens(file: h5py.File) -> Iterator[str]:
    names = ("id", "logprob", "loss_mask", "weight_version")
    reported: set[str] = set()
    for first in range(0, len(file["tokens/id"]), _WINDOW):
        token, logprob, mask, version = (file[f"tokens/{name}"][first : first + _WINDOW] for name in names)
        sampled = mask == 1
        faults = {
            "/tokens/id: negative": token < 0,
            "/tokens/loss_mask: neither 0 nor 1": mask > 1,
            "/tokens/logprob: NaN though sampled": sampled & np.isnan(logprob),
            "/tokens/logprob: a number though not sampled": ~sampled & ~np.isnan(logprob),
            "/tokens/weight_version: negative though sampled": sampled & (version < 0),
            "/tokens/weight_version: not -1 though not sampled": ~sampled & (version != -1),
        }
        for fault, where in faults.items():
            if fault not in reported and (row := _first(where)) is not None:
                reported.add(fault)
                place, what = fault.split(": ")
                yield f"{place}: row {first + row}: {what}"


def _messages(file: h5py.File) -> Iterator[str]:
    offsets = file["messages/offset"][:]
    number = 0
    while number < len(offsets) - 1:
        last = max(int(np.searchsorted(offsets, offsets[number] + _WINDOW, "right")) - 1, number + 1)
        data = file["messages/json"][offsets[number] : offsets[last]].tobytes()
        for message in range(number, last):
            text = data[offsets[message] - offsets[number] : offsets[message + 1] - offsets[number]]
            try:
                fault = "" if isinstance(json.loads(text), dict) else "not an object"
            except ValueError as error:
                fault = f"not JSON in UTF-8 ({error})"
            if fault:
                yield f"/messages: message {message}: {fault}"
                return
        number = last


def _artifacts(file: h5py.File) -> Iterator[str]:
    owner = file["artifacts/trajectory"][:]
    rows = len(file["trajectories/id"])
    if (row := _first((owner < 0) | (owner >= rows))) is not None:
        yield f"/artifacts/trajectory: row {row}: {owner[row]}, expected 0 to {rows - 1}"
    elif (row := _first(np.diff(owner) < 0)) is not None:
        yield f"/artifacts/trajectory: decreases at row {row + 1}"


def _first(where: NDArray[Any]) -> int | None:
    """Returns the index of the first true entry, if there is one."""
    found = np.flatnonzero(where)
    return int(found[0]) if len(found) else None
