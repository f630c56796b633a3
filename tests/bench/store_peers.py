"""Measures the same rollouts written, and batches of them read, with Parquet and JSONL.

Both hold the same rollouts, with unrounded log-probabilities. Batches come from the first rows, at most 2,048. Fewer
rows favour the peers. Parquet reads the row groups of the requested rows, JSONL seeks to their lines.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.bench.baselines import plain
from tests.bench.figures import Figure
from tests.bench.store_reads import BATCH, in_new_process

GROUP = 16
"""Rollouts per row group of a Parquet file."""
PEER_ROWS = 2048
Note = Callable[[str], None]


def parquet(drawn: list[Any], target: Path) -> None:
    """Writes columns straight from the arrays, a row group per 16 rollouts."""
    import numpy as np
    import pyarrow as pa

    def columns_of(group: list[Any]) -> dict[str, Any]:
        lengths = np.cumsum([0, *(len(t.sequences[0].tokens) for t in group)])
        columns: dict[str, Any] = {
            name: [getattr(t, name) for t in group] for name in ("id", "task_id", "status", "reward")
        }
        columns["messages"] = [json.dumps(t.messages, ensure_ascii=False) for t in group]
        for name, dtype in (("tokens", "i4"), ("logprobs", "f4"), ("loss_mask", "u1"), ("weight_versions", "i4")):
            flat = np.concatenate([np.frombuffer(getattr(t.sequences[0], name), dtype) for t in group])
            columns[name] = pa.LargeListArray.from_arrays(pa.array(lengths), pa.array(flat))
        return columns

    _write_parquet(target, (columns_of(drawn[first : first + GROUP]) for first in range(0, len(drawn), GROUP)))


def _write_parquet(target: Path, groups: Iterable[dict[str, Any]]) -> None:
    """One row group for each group of columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for group in groups:
        table = pa.table(group)
        writer = writer or pq.ParquetWriter(target, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()


def jsonl_zstd(drawn: list[Any], target: Path) -> None:
    """Writes a line of JSON a rollout, under zstd's default level."""
    import zstandard

    with open(target, "wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as out:
        for trajectory in drawn:
            out.write(json.dumps(plain(trajectory), ensure_ascii=False).encode() + b"\n")


def beside_ingest(figures: list[Figure], drawn: list[Any], raw_each: float, room: Path, note: Note) -> list[Figure]:
    """Adds Parquet and JSONL with zstd to the figures of ingest and size."""
    tokens = sum(len(t.sequences[0].tokens) for t in drawn)
    for name, package, write in (("Parquet, zstd", "pyarrow", parquet), ("JSONL, zstd", "zstandard", jsonl_zstd)):
        try:
            release = version(package)
        except PackageNotFoundError:
            note(f"{name}: not installed; pip install 'megaflow-hpc[export]'")
            continue
        note(f"{name}: {len(drawn)} rollouts")
        target = room / "peer"
        began, cpu = time.perf_counter(), time.process_time()
        write(drawn, target)
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        figures[0] = figures[0].beside(name, release, raw_each * len(drawn) / 1e6 / seconds)
        figures[2] = figures[2].beside(name, release, raw_each * len(drawn) / 1e6 / cpu)
        figures[6] = figures[6].beside(name, release, target.stat().st_size / tokens)
        target.unlink()
    return figures


# --- batches ---

_COLUMNS = (("tokens", "i4"), ("logprobs", "f4"), ("loss_mask", "u1"), ("weight_version", "i4"))


def rows_as_parquet(store: Any, rows: int, target: Path) -> None:
    """Writes the token columns of the first rows, a list per row."""
    import pyarrow as pa

    def columns_of(batch: Any) -> dict[str, Any]:
        offsets = pa.array(batch["offsets"])
        return {name: pa.LargeListArray.from_arrays(offsets, pa.array(batch[name])) for name, _ in _COLUMNS}

    ranges = (range(first, min(first + GROUP, rows)) for first in range(0, rows, GROUP))
    _write_parquet(target, (columns_of(store.batch(chosen)) for chosen in ranges))


def rows_as_jsonl(store: Any, rows: int, target: Path) -> None:
    """Writes the same rows as text; NaN as null."""
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


def beside_batches(figures: list[Figure], path: Path, room: Path, note: Note) -> list[Figure]:
    """Adds random batches from Parquet and JSONL."""
    from megaflow_hpc.trajectories import open_trajectories

    with open_trajectories(path) as store:
        rows = min(PEER_ROWS, len(store))
        for name, package, write, read in (
            ("Parquet, zstd", "pyarrow", rows_as_parquet, READ_PARQUET),
            ("JSONL, orjson", "orjson", rows_as_jsonl, READ_JSONL),
        ):
            try:
                release = version(package)
            except PackageNotFoundError:
                note(f"{name}: not installed; pip install 'megaflow-hpc[export]'")
                continue
            note(f"{name}: batches from {rows} rows")
            target = room / "peer"
            write(store, rows, target)
            found = in_new_process(read, target, str(min(BATCH, rows)))
            label = f"{name}, of {rows} rows"
            for place, column in ((2, 0), (3, 1)):
                milliseconds = 1000 * statistics.median(pair[column] for pair in found)
                figures[place] = figures[place].beside(label, release, milliseconds)
            target.unlink()
    return figures
