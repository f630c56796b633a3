"""The trajectory store: ingest, size, opening and random batches, on transcripts as coding agents leave them.

Ingest is the whole way: records packed, appended and committed in groups of 16 with fsync, then gathered into one HDF5
file, which is made durable. MB are 10^6 uncompressed bytes of the arrays in that file; strings of ids and names are not
counted. Reads are timed in new processes, on a file generated with --generated rows that carry real token columns.

Sizes: a rollout of the default length is 0.52 MB raw, 0.5 MB of journal and 0.11 MB of file; a generated row of 4,096
tokens takes about 12 kB of file. Data go to --directory, by default a temporary one, and are removed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megaflow_hpc.bench.figures import Figure, median

HELP = "the trajectory store: ingest, size, opening, random batches"

_GROUP = 16
"""Records per commit."""
_DRAWN = 150
"""Different rollouts that are drawn; more are the same ones under other ids, too far apart for deflate to notice."""
_GZIPPED = 40
"""Rollouts that are written as JSONL.gz, which is slow."""

Note = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rollouts", type=int, default=150, help="that are ingested (150)")
    parser.add_argument("--tokens", type=int, default=30_000, help="of each (30000)")
    parser.add_argument("--turns", type=int, default=40, help="of each (40)")
    parser.add_argument("--repeat", type=int, default=3, help="times that ingest is measured (3)")
    parser.add_argument("--generated", type=int, default=8_000, help="rows of the file that is read, 0 for none (8000)")
    parser.add_argument("--generated-tokens", type=int, default=4_096, help="of each of these (4096)")
    parser.add_argument("--directory", type=Path, help="where the files are made")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    from megaflow_hpc.bench.transcripts import Transcripts

    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-", dir=arguments.directory) as directory:
        room = Path(directory)
        note(f"drawing transcripts of {arguments.tokens} tokens and {arguments.turns} turns")
        transcripts = Transcripts()
        drawn = [transcripts.draw(n, arguments.tokens, arguments.turns) for n in range(min(_DRAWN, arguments.rollouts))]
        figures += _ingest(arguments, drawn, room, note)
        if arguments.generated:
            figures += _reads(arguments, transcripts, room, note)
    return figures


# --- ingest and size ---


def _renamed(drawn: list[Any], count: int) -> Iterator[Any]:
    from dataclasses import replace

    for number in range(count):
        t = drawn[number % len(drawn)]
        task = f"repository__project-{number // 8:06d}"
        rollout = f"{task}/default/{number % 8}"
        yield (
            t
            if number < len(drawn)
            else replace(t, id=rollout, task_id=task, group_id=f"{task}/default", sample_index=number % 8)
        )


def _ingest(arguments: argparse.Namespace, drawn: list[Any], room: Path, note: Note) -> list[Figure]:
    import h5py

    from megaflow_hpc.rundir import RunDir
    from megaflow_hpc.trajectories import JournalWriter, fastzlib, gather

    rates: dict[str, list[float]] = {"both": [], "journal": [], "gather": []}
    bare: list[float] = []
    stored: dict[str, int] = {}
    tokens = raw = size = 0
    for number in range(arguments.repeat):
        note(f"ingest of {arguments.rollouts} rollouts, {number + 1} of {arguments.repeat}")
        run_dir = RunDir(room / f"run-{number}")
        run_dir.create()
        began = time.perf_counter()
        with JournalWriter(run_dir.journal_file("pod", "0")) as journal:
            for place, trajectory in enumerate(_renamed(drawn, arguments.rollouts), 1):
                record = trajectory.to_record()
                journal.append({"kind": "trajectory", "epoch": 0, "block": 0, "trajectory": record})
                if place % _GROUP == 0:
                    journal.commit()
        between = time.perf_counter()
        path = gather(run_dir)
        ended = time.perf_counter()
        with h5py.File(path) as file:
            stored, raw, tokens = _sizes(file)
        size = path.stat().st_size
        rates["both"].append(raw / 1e6 / (ended - began))
        rates["journal"].append(raw / 1e6 / (between - began))
        rates["gather"].append(raw / 1e6 / (ended - between))
        bare.append(_bare_h5py(path, room / "bare.h5"))
        if number + 1 < arguments.repeat:
            _remove(run_dir.path)
    goal = 200.0 if fastzlib.NAME.startswith("isal") else 100.0
    ingest = median("ingest, journal fsynced + HDF5", "MB/s", rates["both"], goal, "higher")
    shares = [ours / theirs for ours, theirs in zip(rates["both"], bare, strict=True)]
    gzipped = _jsonl_gz(drawn[:_GZIPPED])
    per_token = sum(stored[f"tokens/{name}"] for name in ("id", "logprob", "loss_mask", "weight_version")) / tokens
    sample = min(len(drawn), _GZIPPED)
    figures = [
        ingest.beside("h5py alone, same chunks and filters", version("h5py"), statistics.median(bare)),
        median("ingest, part of h5py alone", "", shares, 0.6, "higher"),
        median("the journal alone", "MB/s", rates["journal"], None, "higher"),
        median("gather alone", "MB/s", rates["gather"], None, "higher"),
        Figure("token columns, of 13 raw", "B/token", per_token, tokens, None, 3.2),
        Figure("whole file, messages included", "B/token", size / tokens, tokens),
        Figure("whole file, part of JSONL.gz", "", size / arguments.rollouts / (gzipped / sample), sample, None, 0.75),
    ]
    if arguments.peers:
        figures = _peers(figures, drawn, raw / arguments.rollouts, size / tokens, room, note)
    _remove(room / f"run-{arguments.repeat - 1}")
    return figures


def _sizes(file: Any) -> tuple[dict[str, int], int, int]:
    """Stored bytes by column, raw bytes of all but the strings, tokens."""
    import h5py

    stored: dict[str, int] = {}
    raw = 0

    def collect(name: str, item: Any) -> None:
        nonlocal raw
        if isinstance(item, h5py.Dataset):
            stored[name] = item.id.get_storage_size()
            raw += 0 if h5py.check_string_dtype(item.dtype) else item.size * item.dtype.itemsize

    file.visititems(collect)
    return stored, raw, len(file["tokens/id"])


def _bare_h5py(path: Path, target: Path) -> float:
    """MB/s of h5py writing the same arrays, whole in memory already, with the same chunks and filters; no strings."""
    import h5py

    from megaflow_hpc.trajectories.publishing import fsync

    with h5py.File(path) as file:
        arrays: dict[str, tuple[Any, Any]] = {}

        def collect(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and h5py.check_string_dtype(item.dtype) is None:
                arrays[name] = (item[:], (item.chunks, item.shuffle))

        file.visititems(collect)
    began = time.perf_counter()
    with h5py.File(target, "w") as file:
        for name, (values, (chunks, shuffle)) in arrays.items():
            file.create_dataset(
                name,
                data=values,
                maxshape=(None,),
                chunks=chunks,
                shuffle=shuffle,
                compression="gzip",
                compression_opts=1,
            )
    fsync(target)
    seconds = time.perf_counter() - began
    target.unlink()
    return float(sum(values.nbytes for values, _ in arrays.values()) / 1e6 / seconds)


def _plain(trajectory: Any) -> dict[str, Any]:
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


def _jsonl_gz(drawn: list[Any]) -> int:
    """Bytes of these rollouts as JSONL under gzip's default level, log-probabilities unrounded."""
    lines = (json.dumps(_plain(trajectory), ensure_ascii=False) for trajectory in drawn)
    return len(gzip.compress("\n".join(lines).encode(), 6))


def _peers(
    figures: list[Figure], drawn: list[Any], raw_each: float, per_token: float, room: Path, note: Note
) -> list[Figure]:
    """Adds Parquet and JSONL with zstd to the figures of ingest and size."""
    tokens = sum(len(t.sequences[0].tokens) for t in drawn)
    for name, package, write in (("Parquet, zstd", "pyarrow", _parquet), ("JSONL, zstd", "zstandard", _jsonl_zstd)):
        try:
            release = version(package)
        except PackageNotFoundError:
            note(f"{name}: not installed; pip install 'megaflow-hpc[export]'")
            continue
        note(f"{name}: {len(drawn)} rollouts")
        target = room / "peer"
        began = time.perf_counter()
        write(drawn, target)
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - began
        figures[0] = figures[0].beside(name, release, raw_each * len(drawn) / 1e6 / seconds)
        figures[5] = figures[5].beside(name, release, target.stat().st_size / tokens)
        target.unlink()
    return figures


def _parquet(drawn: list[Any], target: Path) -> None:
    """Columns straight from the arrays, a row group per 16 rollouts."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for first in range(0, len(drawn), _GROUP):
        group = drawn[first : first + _GROUP]
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


def _jsonl_zstd(drawn: list[Any], target: Path) -> None:
    import zstandard

    with open(target, "wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as out:
        for trajectory in drawn:
            out.write(json.dumps(_plain(trajectory), ensure_ascii=False).encode() + b"\n")


# --- reading ---


def _reads(arguments: argparse.Namespace, transcripts: Any, room: Path, note: Note) -> list[Figure]:
    from megaflow_hpc.trajectories.schema import COLUMNS, TOKEN_CHUNK, chunk

    count, each = arguments.generated, arguments.generated_tokens
    path = room / "generated.h5"
    note(f"generating {count} rows of {each} tokens")
    began = time.perf_counter()
    generate(path, transcripts, count, each)
    seconds = time.perf_counter() - began
    size = path.stat().st_size
    note(f"{size / 1e9:.2f} GB in {seconds:.0f} s; reading in new processes")
    opened = [_read(path, "open")[0][0] for _ in range(5)]
    batches = [pair for _ in range(2) for pair in _read(path, "batch")]
    whole = count >= 1_000_000
    rows = min(1024, count)
    return [
        Figure(f"generated file, {count} rows of {each} tokens", "GB", size / 1e9, count),
        median(f"open {count} trajectories, in a new process", "s", opened, 1.0 if whole else None),
        median(
            f"random batch of {rows} trajectories of {each} tokens, warm",
            "ms",
            [1000 * wall for wall, _ in batches],
            150.0 if each == 4096 and rows == 1024 else None,
        ),
        median(
            f"its CPU time; chunks of {chunk(COLUMNS['tokens/id'])} ids, of {TOKEN_CHUNK} in other columns",
            "ms",
            [1000 * cpu for _, cpu in batches],
        ),
    ]


def generate(path: Path, transcripts: Any, count: int, each: int) -> None:
    """A campaign file of ``count`` rows of ``each`` tokens: stretches of drawn transcripts, ids of their own."""
    from dataclasses import replace

    import numpy as np

    from megaflow_hpc import __version__
    from megaflow_hpc.trajectories.writer import TrajectoryWriter
    from megaflow_hpc.types import TokenSequence

    drawn = [transcripts.draw(n, max(30_000, 2 * each), 40) for n in range(24)]
    columns = ("tokens", "logprobs", "loss_mask", "weight_versions")
    draw = np.random.default_rng(0)
    writer = TrajectoryWriter(path, "generated", f"megaflow-hpc {__version__}")
    for number in range(count):
        source = drawn[int(draw.integers(len(drawn)))]
        whole = source.sequences[0]
        first = int(draw.integers(0, len(whole.tokens) - each + 1))
        parts = [getattr(whole, name)[first : first + each] for name in columns]
        task = f"repository__project-{number // 8:06d}"
        writer.append(
            replace(
                source,
                id=f"{task}/default/{number % 8}",
                task_id=task,
                group_id=f"{task}/default",
                sample_index=number % 8,
                reward=float(draw.integers(2)),
                sequences=[TokenSequence("default", *parts)],
                messages=source.messages[1:4],
                turns=[],
                artifacts=[],
            )
        )
    writer.close()


_READER = """
import json, sys, time
began = time.perf_counter()
from megaflow_hpc import open_trajectories
import numpy, h5py
loaded = time.perf_counter()
with open_trajectories(sys.argv[1]) as store:
    count = len(store)
    store[count - 1].reward
    opened = time.perf_counter()
    if sys.argv[2] == "open":
        print(json.dumps([[opened - loaded]]))
        sys.exit()
    draw = numpy.random.default_rng(int(sys.argv[3]))
    seconds = []
    for _ in range(6):
        rows = draw.choice(count, min(1024, count), replace=False)
        began, cpu = time.perf_counter(), time.process_time()
        batch = store.batch(rows.tolist())
        seconds.append([time.perf_counter() - began, time.process_time() - cpu])
        assert batch["tokens"].size
    print(json.dumps(seconds[1:]))
"""


def _read(path: Path, what: str) -> list[list[float]]:
    """Seconds, measured inside a new process; of a batch those on the clock and those of CPU, all threads together.

    The first batch, which warms up, is left out.
    """
    command = [sys.executable, "-c", _READER, str(path), what, str(time.monotonic_ns() % 2**31)]
    found: list[list[float]] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
