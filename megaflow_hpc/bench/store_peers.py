"""What the store is measured beside: the same rollouts written, and batches of them read, by other programs.

Bare h5py writes the arrays of a gathered file with the same chunks and filters, a piece at a time; reading the piece is
not counted. Parquet and JSONL hold the same rollouts, log-probabilities unrounded.
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

GROUP = 16
"""Rollouts per row group of a Parquet file."""
PIECE = 32 << 20
"""Bytes of an array that are read and written at a time."""


def bare_h5py(path: Path, target: Path) -> tuple[float, float]:
    """Seconds, and CPU seconds, in which h5py writes the numbers of a campaign file anew and makes them durable."""
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
    """Bytes of these rollouts as JSONL under gzip's default level, log-probabilities unrounded."""
    lines = (json.dumps(plain(trajectory), ensure_ascii=False) for trajectory in drawn)
    return len(gzip.compress("\n".join(lines).encode(), 6))


def parquet(drawn: list[Any], target: Path) -> None:
    """Columns straight from the arrays, a row group per 16 rollouts."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for first in range(0, len(drawn), GROUP):
        group = drawn[first : first + GROUP]
        lengths = np.cumsum([0, *(len(t.sequences[0].tokens) for t in group)])
        columns: dict[str, Any] = {
            name: [getattr(t, name) for t in group] for name in ("id", "task_id", "status", "reward")
        }
        columns["messages"] = [json.dumps(t.messages, ensure_ascii=False) for t in group]
        for name, dtype in (("tokens", "i4"), ("logprobs", "f4"), ("loss_mask", "u1"), ("weight_versions", "i4")):
            flat = np.concatenate([np.frombuffer(getattr(t.sequences[0], name), dtype) for t in group])
            columns[name] = pa.LargeListArray.from_arrays(pa.array(lengths), pa.array(flat))
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(target, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()


def jsonl_zstd(drawn: list[Any], target: Path) -> None:
    import zstandard

    with open(target, "wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as out:
        for trajectory in drawn:
            out.write(json.dumps(plain(trajectory), ensure_ascii=False).encode() + b"\n")


# --- batches ---

_COLUMNS = (("tokens", "i4"), ("logprobs", "f4"), ("loss_mask", "u1"), ("weight_version", "i4"))


def rows_as_parquet(store: Any, rows: int, target: Path) -> None:
    """The token columns of the first rows, a list per row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for first in range(0, rows, GROUP):
        batch = store.batch(range(first, min(first + GROUP, rows)))
        offsets = pa.array(batch["offsets"])
        table = pa.table({n: pa.LargeListArray.from_arrays(offsets, pa.array(batch[n])) for n, _ in _COLUMNS})
        writer = writer or pq.ParquetWriter(target, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()


def rows_as_jsonl(store: Any, rows: int, target: Path) -> None:
    """The same as text; NaN as null."""
    import orjson

    with open(target, "wb") as file:
        for row in range(rows):
            batch = store.batch([row])
            file.write(orjson.dumps({n: batch[n] for n, _ in _COLUMNS}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


_TIMED = """
import json, sys, time
import numpy
{load}
draw = numpy.random.default_rng(int(sys.argv[3]))
seconds = []
for _ in range(4):
    chosen = draw.choice(count, int(sys.argv[2]), replace=False)
    began, cpu = time.perf_counter(), time.process_time()
    batch = read(chosen)
    seconds.append([time.perf_counter() - began, time.process_time() - cpu])
    assert len(batch) == 4 and batch["tokens"].size
print(json.dumps(seconds[1:]))
"""

READ_PARQUET = _TIMED.format(
    load="""
import pyarrow, pyarrow.parquet
file = pyarrow.parquet.ParquetFile(sys.argv[1], memory_map=True)
count, size = file.metadata.num_rows, file.metadata.row_group(0).num_rows

def read(chosen):
    groups = numpy.unique(chosen // size)
    place = numpy.zeros(file.num_row_groups, numpy.int64)
    place[groups] = numpy.arange(len(groups)) * size
    table = file.read_row_groups(groups.tolist(), use_threads=True).take(place[chosen // size] + chosen % size)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return {name: column.flatten().to_numpy(zero_copy_only=False) for name, column in columns.items()}
"""
)

READ_JSONL = _TIMED.format(
    load="""
import orjson
file = open(sys.argv[1], "rb")
starts = [0]
for line in file:
    starts.append(starts[-1] + len(line))
count = len(starts) - 1
types = {"tokens": "i4", "logprobs": "f4", "loss_mask": "u1", "weight_version": "i4"}

def read(chosen):
    found = {name: [] for name in types}
    for row in chosen.tolist():
        file.seek(starts[row])
        line = orjson.loads(file.read(starts[row + 1] - starts[row]))
        for name, dtype in types.items():
            found[name].append(numpy.array(line[name], dtype))
    return {name: numpy.concatenate(parts) for name, parts in found.items()}
"""
)
