"""Measures the same rollouts stored with Parquet and JSONL, and batches of them read with Parquet.

Both hold the same rollouts, with unrounded log-probabilities. Batches come from the first rows, at most 2,048. Fewer
rows favour Parquet, which reads the row groups of the requested rows.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def plain(trajectory: Any) -> dict[str, Any]:
    """A trajectory as other formats hold it: lists, numbers unrounded."""
    sequence = trajectory.sequences[0]
    names = [
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
    ]
    return {
        **{name: getattr(trajectory, name) for name in (*names, "started_at", "finished_at")},
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


def _release(name: str, package: str, note: Note) -> str:
    """Returns the version of an installed package, or an empty text."""
    try:
        return version(package)
    except PackageNotFoundError:
        note(f"{name}: not installed; pip install 'megaflow-hpc[export]'")
        return ""


def beside_size(figure: Figure, drawn: list[Any], room: Path, note: Note) -> Figure:
    """Adds the size of the same rollouts in Parquet and JSONL with zstd."""
    tokens, target = sum(len(t.sequences[0].tokens) for t in drawn), room / "peer"
    for name, package, write in (("Parquet, zstd", "pyarrow", parquet), ("JSONL, zstd", "zstandard", jsonl_zstd)):
        if release := _release(name, package, note):
            write(drawn, target)
            figure = figure.beside(name, release, target.stat().st_size / tokens)
            target.unlink()
    return figure


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


READ_PARQUET = """
import json, sys, time
import numpy
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


def beside_batches(figures: list[Figure], path: Path, room: Path, note: Note) -> list[Figure]:
    """Adds random batches from Parquet."""
    from megaflow_hpc.trajectories import open_trajectories

    name = "Parquet, zstd"
    if not (release := _release(name, "pyarrow", note)):
        return figures
    with open_trajectories(path) as store:
        rows = min(PEER_ROWS, len(store))
        note(f"{name}: batches from {rows} rows")
        target = room / "peer"
        rows_as_parquet(store, rows, target)
        found = in_new_process(READ_PARQUET, target, str(min(BATCH, rows)))
        for place, column in ((2, 0), (3, 1)):
            milliseconds = 1000 * statistics.median(pair[column] for pair in found)
            figures[place] = figures[place].beside(f"{name}, of {rows} rows", release, milliseconds)
        target.unlink()
    return figures
