"""Measures the trajectory store: ingest, size, opening and random batches, on transcripts of coding agents.

Ingest is the whole way: records packed, appended and committed in groups of 16 with fsync, then gathered into one HDF5
file, which is made durable. MB are 10^6 uncompressed bytes of the arrays in that file; strings of ids and names are not
counted. Everything is streamed, so memory does not grow with the number of rollouts. CPU time is that of all threads,
for machines that run other programs too.

Sizes: a rollout of the default length is 0.52 MB raw, 0.5 MB of journal and 0.11 MB of file; a generated row of 4,096
tokens takes about 12 kB of file. Data are written to --directory, by default a temporary one, and are removed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaflow_hpc.host.files import remove_tree
from tests.bench import store_peers
from tests.bench.arguments import add_count
from tests.bench.command import main
from tests.bench.figures import Figure, median

_GROUP = 16
"""Records per commit."""
_DRAWN = 150
"""Number of different rollouts. Further ones repeat them under other ids, too far apart for deflate to notice."""
_GZIPPED = 40
"""Rollouts that are written as JSONL.gz, which is slow."""

Note = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_count(parser, "--rollouts", 150, "rollouts that are ingested; 0 for none", least=0)
    add_count(parser, "--tokens", 30_000, "tokens of each")
    add_count(parser, "--turns", 40, "turns of each")
    add_count(parser, "--repeat", 3, "times that ingest is measured")
    add_count(parser, "--generated", 8_000, "rows of the file that is read; 0 for none", least=0)
    add_count(parser, "--generated-tokens", 4_096, "tokens of each of these rows")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="make the files there (a temporary directory)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave campaign.h5 and generated.h5 there")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    """Measures ingest and size, then reading a generated file."""
    from tests.bench.store_reads import reads
    from tests.bench.transcripts import Transcripts

    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-", dir=arguments.directory) as directory:
        room = Path(directory)
        note(f"drawing transcripts of {arguments.tokens} tokens and {arguments.turns} turns")
        transcripts = Transcripts()
        drawn = [transcripts.draw(n, arguments.tokens, arguments.turns) for n in range(min(_DRAWN, arguments.rollouts))]
        if drawn:
            figures += _ingest(arguments, drawn, room, note)
        if arguments.generated:
            figures += reads(arguments, transcripts, room, note)
    return figures


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

    from megaflow_hpc.rundir.layout import RunDir
    from megaflow_hpc.trajectories import JournalWriter, gather
    from tests.bench.baselines import bare_h5py, jsonl_gz

    rates: dict[str, list[float]] = {"both": [], "journal": [], "gather": [], "cpu": []}
    bare: list[float] = []
    bare_cpu: list[float] = []
    stored: dict[str, int] = {}
    tokens = raw = size = 0
    for number in range(arguments.repeat):
        note(f"ingest of {arguments.rollouts} rollouts, {number + 1} of {arguments.repeat}")
        run_dir = RunDir(room / f"run-{number}")
        run_dir.create()
        began, cpu = time.perf_counter(), time.process_time()
        with JournalWriter(run_dir.journal_file("pod", "0")) as journal:
            for place, trajectory in enumerate(_renamed(drawn, arguments.rollouts), 1):
                record = trajectory.to_record()
                journal.append({"kind": "trajectory", "epoch": 0, "block": 0, "trajectory": record})
                if place % _GROUP == 0:
                    journal.commit()
        between = time.perf_counter()
        path = gather(run_dir)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        with h5py.File(path) as file:
            stored, raw, tokens = sizes(file)
        size = path.stat().st_size
        rates["both"].append(raw / 1e6 / (ended - began))
        rates["journal"].append(raw / 1e6 / (between - began))
        rates["gather"].append(raw / 1e6 / (ended - between))
        rates["cpu"].append(raw / 1e6 / cpu)
        remove_tree(run_dir.journal)
        note("the same arrays by h5py alone")
        seconds, its_cpu = bare_h5py(path, room / "bare.h5")
        bare.append(raw / 1e6 / seconds)
        bare_cpu.append(raw / 1e6 / its_cpu)
        if number + 1 == arguments.repeat and arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, arguments.keep / "campaign.h5")
        remove_tree(run_dir.path, ignore_errors=True)
    shares = [ours / theirs for ours, theirs in zip(rates["both"], bare, strict=True)]
    gzipped = jsonl_gz(drawn[:_GZIPPED])
    per_token = sum(stored[f"tokens/{name}"] for name in ("id", "logprob", "loss_mask", "weight_version")) / tokens
    sample = min(len(drawn), _GZIPPED)
    what = f"{arguments.rollouts} rollouts of {arguments.tokens} tokens"
    theirs = "h5py alone, same chunks and filters"
    figures = [
        median(f"ingest of {what}, journal fsynced + HDF5", "MB/s", rates["both"], 100.0, "higher").beside(
            theirs, version("h5py"), statistics.median(bare)
        ),
        median("ingest, part of h5py alone", "", shares, 0.6, "higher"),
        median("ingest, by CPU time of all threads", "MB/CPU s", rates["cpu"], None, "higher").beside(
            theirs, version("h5py"), statistics.median(bare_cpu)
        ),
        median("the journal alone", "MB/s", rates["journal"], None, "higher"),
        median("gather alone", "MB/s", rates["gather"], None, "higher"),
        Figure("token columns, of 13 raw", "B/token", per_token, tokens, None, 3.2),
        Figure("whole file, messages included", "B/token", size / tokens, tokens),
        Figure("whole file", "GB", size / 1e9, arguments.rollouts),
        Figure("whole file, part of JSONL.gz", "", size / arguments.rollouts / (gzipped / sample), sample, None, 0.75),
    ]
    if arguments.peers:
        figures = store_peers.beside_ingest(figures, drawn, raw / arguments.rollouts, room, note)
    return figures


def sizes(file: Any) -> tuple[dict[str, int], int, int]:
    """Returns stored bytes by column, raw bytes of all columns except strings, and tokens of a trajectories.h5."""
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


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
