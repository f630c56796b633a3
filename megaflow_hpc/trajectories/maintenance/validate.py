"""Checks a campaign file against the schema and its invariants.

Large columns are read in windows, so memory stays bounded. Each kind of fault is reported once, at its first place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.texts import parse_object
from megaflow_hpc.trajectories.hdf5.columns import offset_faults, read, texts
from megaflow_hpc.trajectories.hdf5.file import Datasets, datasets, open_file, schema_faults
from megaflow_hpc.trajectories.hdf5.schema import STATUSES
from megaflow_hpc.types import VERIFIED

_WINDOW = 1 << 20


def validate(path: str | os.PathLike[str]) -> list[str]:
    """Returns what is wrong with the file, in words that name dataset and row; an empty list if nothing is.

    Raises:
        ConfigError: it cannot be opened as a campaign file at all.
    """
    with open_file(path, complete=False) as file:
        columns = datasets(file)
        problems = [f"root attribute {name} is missing" for name in ("campaign", "software") if name not in file.attrs]
        problems = problems or list(schema_faults(columns)) or list(_unreadable(columns)) or list(offset_faults(file))
        if not problems:
            for check in (_trajectories, _sequences, _turns, _links, _tokens, _messages, _artifacts):
                problems += check(file)
    return problems


def _unreadable(columns: Datasets) -> Iterator[str]:
    """Yields the columns that cannot be read to their end."""
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
            yield f"/trajectories/id: row {number}: {rollout!r} is there twice"
            break
        seen.add(rollout)
    status = texts(file["trajectories/status"])
    reward = read(file["trajectories/reward"])
    turns = read(file["trajectories/turns"])
    if (row := _first(~np.isin(status.astype(str), STATUSES))) is not None:
        yield f"/trajectories/status: row {row}: {status[row]!r}, expected one of {', '.join(STATUSES)}"
    verified = np.isin(status.astype(str), VERIFIED)
    if (row := _first(~verified & ~np.isnan(reward))) is not None:
        yield f"/trajectories/reward: row {row}: {reward[row]} though {status[row]}, expected NaN"
    if (row := _first(turns != np.diff(read(file["trajectories/turn_offset"])))) is not None:
        yield f"/trajectories/turns: row {row}: {turns[row]}, not what turn_offset says"


def _owners(file: h5py.File, path: str) -> NDArray[Any]:
    """Returns the row of the trajectory that each item belongs to, by the offsets."""
    counts = np.diff(read(file[path]))
    return np.repeat(np.arange(len(counts)), counts)


def _sequences(file: h5py.File) -> Iterator[str]:
    if (row := _first(read(file["sequences/trajectory"]) != _owners(file, "trajectories/sequence_offset"))) is not None:
        yield f"/sequences/trajectory: row {row}: not what /trajectories/sequence_offset says"
    if "sequences/weight_version_min" in file and "sequences/weight_version_max" in file:
        low, high = read(file["sequences/weight_version_min"]), read(file["sequences/weight_version_max"])
        if (row := _first((low > high) | (low < -1))) is not None:
            yield f"/sequences/weight_version_min: row {row}: {low[row]}, expected -1 to {high[row]}"


def _turns(file: h5py.File) -> Iterator[str]:
    sequence, start, end = (read(file[f"turns/{name}"]) for name in ("sequence", "token_start", "token_end"))
    offsets = read(file["sequences/token_offset"])
    if (row := _first((sequence < -1) | (sequence >= len(offsets) - 1))) is not None:
        yield f"/turns/sequence: row {row}: {sequence[row]}, expected -1 to {len(offsets) - 2}"
        return
    known = sequence >= 0
    owner = _owners(file, "trajectories/turn_offset")[known]
    if (row := _first(read(file["sequences/trajectory"])[sequence[known]] != owner)) is not None:
        yield f"/turns/sequence: row {np.flatnonzero(known)[row]}: a sequence of another trajectory"
    inside = (offsets[sequence[known]] <= start[known]) & (end[known] <= offsets[sequence[known] + 1])
    if (row := _first(~(inside & (start[known] <= end[known])))) is not None:
        row = int(np.flatnonzero(known)[row])
        yield f"/turns: row {row}: tokens {start[row]} to {end[row]}, outside its sequence"


def _links(file: h5py.File) -> Iterator[str]:
    """Checks the links of version 2: parents of messages, and the answer and the starting call of each call."""
    messages, turns = (read(file[f"trajectories/{name}_offset"]) for name in ("message", "turn"))
    if "messages/parent" in file:
        parent = read(file["messages/parent"])
        own = np.arange(len(parent)) - np.repeat(messages[:-1], np.diff(messages))
        if (row := _first((parent < -1) | (parent >= own))) is not None:
            yield f"/messages/parent: row {row}: {parent[row]}, expected -1 to {own[row] - 1}"
    owner = _owners(file, "trajectories/turn_offset")
    if "turns/started_by" in file:
        caller, own = read(file["turns/started_by"]), np.arange(len(owner)) - turns[owner]
        if (row := _first((caller < -1) | (caller >= own))) is not None:
            yield f"/turns/started_by: row {row}: {caller[row]}, expected -1 to {own[row] - 1}"
    if "turns/message" in file:
        answer, count = read(file["turns/message"]), np.diff(messages)[owner]
        if (row := _first((answer < -1) | (answer >= count))) is not None:
            yield f"/turns/message: row {row}: {answer[row]}, expected -1 to {count[row] - 1}"
            return
        linked = answer >= 0
        _, places = np.unique((answer + messages[owner])[linked], return_index=True)
        twice = np.setdiff1d(np.flatnonzero(linked), np.flatnonzero(linked)[places])
        if len(twice):
            yield f"/turns/message: row {twice[0]}: {answer[twice[0]]}, the answer of an earlier call"


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
        for fault, where in faults.items():
            if fault not in reported and (row := _first(where)) is not None:
                reported.add(fault)
                place, what = fault.split(": ")
                yield f"{place}: row {first + row}: {what}"


def _messages(file: h5py.File) -> Iterator[str]:
    offsets = read(file["messages/offset"])
    number = 0
    while number < len(offsets) - 1:
        last = max(int(np.searchsorted(offsets, offsets[number] + _WINDOW, "right")) - 1, number + 1)
        data = read(file["messages/json"], offsets[number], offsets[last]).tobytes()
        for message in range(number, last):
            text = data[offsets[message] - offsets[number] : offsets[message + 1] - offsets[number]]
            try:
                parse_object(text)
            except ValueError as error:
                yield f"/messages: message {message}: {error}"
                return
        number = last


def _artifacts(file: h5py.File) -> Iterator[str]:
    owner = read(file["artifacts/trajectory"])
    rows = len(file["trajectories/id"])
    if (row := _first((owner < 0) | (owner >= rows))) is not None:
        yield f"/artifacts/trajectory: row {row}: {owner[row]}, expected 0 to {rows - 1}"
    elif (row := _first(np.diff(owner) < 0)) is not None:
        yield f"/artifacts/trajectory: decreases at row {row + 1}"


def _first(where: NDArray[Any]) -> int | None:
    """Returns the index of the first true entry, if there is one."""
    found = np.flatnonzero(where)
    return int(found[0]) if len(found) else None
