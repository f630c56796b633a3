"""What every measurement of the store is set against: bare h5py, and JSONL under gzip.

Bare h5py writes the arrays of a gathered file with the same chunks and filters, a piece at a time; reading the piece is
not counted. JSONL holds the same rollouts, log-probabilities unrounded.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

PIECE = 32 << 20
"""Bytes of an array that are read and written at a time."""


def bare_h5py(path: Path, target: Path) -> tuple[float, float]:
    """The seconds and CPU seconds in which h5py writes the numbers of a campaign file anew and makes them durable."""
    import h5py

    seconds = cpu = 0.0

    def timed(action: Callable[[], object]) -> None:
        nonlocal seconds, cpu
        began, its_cpu = time.perf_counter(), time.process_time()
        action()
        seconds, cpu = seconds + time.perf_counter() - began, cpu + time.process_time() - its_cpu

    with h5py.File(path) as source:
        names: list[str] = []
        source.visititems(lambda name, item: names.append(name) if _is_numeric(item) else None)
        file = h5py.File(target, "w")
        for name in names:
            dataset = source[name]
            copy = file.create_dataset(
                name,
                (len(dataset),),
                dataset.dtype,
                maxshape=(None,),
                chunks=dataset.chunks,
                shuffle=dataset.shuffle,
                compression="gzip",
                compression_opts=1,
            )
            for first, values in _pieces(dataset):
                timed(partial(copy.write_direct, values, dest_sel=slice(first, first + len(values))))
            timed(file.flush)  # compresses what HDF5 still holds of the dataset

        def finish() -> None:
            file.close()
            descriptor = os.open(target, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        timed(finish)
    target.unlink()
    return seconds, cpu


def _is_numeric(item: Any) -> bool:
    import h5py

    return isinstance(item, h5py.Dataset) and h5py.check_string_dtype(item.dtype) is None


def _pieces(dataset: Any) -> Iterator[tuple[int, Any]]:
    """Whole chunks at a time, so that none is compressed twice."""
    chunk = dataset.chunks[0]
    step = max(1, PIECE // (chunk * dataset.dtype.itemsize)) * chunk
    for first in range(0, len(dataset), step):
        yield first, dataset[first : first + step]


def plain(trajectory: Any) -> dict[str, Any]:
    """A trajectory as other formats hold it: lists, numbers unrounded."""
    sequence = trajectory.sequences[0]
    names = (
        "id",
        "task_id",
        "group_id",
        "policy",
        "agent",
        "status",
        "node",
        "job_id",
        "reward",
        "started_at",
        "finished_at",
    )
    return {
        **{name: getattr(trajectory, name) for name in names},
        "messages": trajectory.messages,
        "tokens": sequence.tokens.tolist(),
        "logprobs": [None if value != value else value for value in sequence.logprobs],
        "loss_mask": sequence.loss_mask.tolist(),
        "weight_versions": sequence.weight_versions.tolist(),
        "turns": [vars(turn) for turn in trajectory.turns],
    }


def jsonl_gz(drawn: list[Any]) -> int:
    """The bytes of these rollouts as JSONL under gzip's default level, log-probabilities unrounded."""
    lines = (json.dumps(plain(trajectory), ensure_ascii=False) for trajectory in drawn)
    return len(gzip.compress("\n".join(lines).encode(), 6))
