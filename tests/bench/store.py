"""Measures the trajectory store: size, opening and random batches, on transcripts of coding agents.

Records are packed, appended and committed in groups of 16 with fsync, then gathered into one HDF5 file. Everything is
streamed, so memory does not grow with the number of rollouts. CPU time is that of all threads, for machines that run
other programs too.

Sizes: a rollout of the default length is 0.52 MB raw, 0.5 MB of journal and 0.11 MB of file; a generated row of 4,096
tokens takes about 12 kB of file. Data are written to --directory, by default a temporary one, and are removed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megaflow_hpc.host.files import remove_tree
from tests.bench import store_peers
from tests.bench.arguments import add_count
from tests.bench.command import main
from tests.bench.figures import Figure

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
    add_count(parser, "--generated", 8_000, "rows of the file that is read; 0 for none", least=0)
    add_count(parser, "--generated-tokens", 4_096, "tokens of each of these rows")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="make the files there (a temporary directory)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave campaign.h5 and generated.h5 there")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    """Measures the size of a gathered file, then reading a generated one."""
    from tests.bench.store_reads import reads
    from tests.bench.transcripts import Transcripts

    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-", dir=arguments.directory) as directory:
        room = Path(directory)
        note(f"drawing transcripts of {arguments.tokens} tokens and {arguments.turns} turns")
        transcripts = Transcripts()
        drawn = [transcripts.draw(n, arguments.tokens, arguments.turns) for n in range(min(_DRAWN, arguments.rollouts))]
        if drawn:
            figures += _size(arguments, drawn, room, note)
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


def _size(arguments: argparse.Namespace, drawn: list[Any], room: Path, note: Note) -> list[Figure]:
    import h5py

    from megaflow_hpc.rundir.layout import RunDir
    from megaflow_hpc.trajectories import JournalWriter, gather

    note(f"storing {arguments.rollouts} rollouts")
    run_dir = RunDir(room / "run")
    run_dir.create()
    with JournalWriter(run_dir.journal_file("pod", "0")) as journal:
        for place, trajectory in enumerate(_renamed(drawn, arguments.rollouts), 1):
            journal.append({"kind": "trajectory", "epoch": 0, "block": 0, "trajectory": trajectory.to_record()})
            if place % _GROUP == 0:
                journal.commit()
    path = gather(run_dir)
    with h5py.File(path) as file:
        tokens = len(file["tokens/id"])
        names = ("id", "logprob", "loss_mask", "weight_version")
        stored = sum(file[f"tokens/{name}"].id.get_storage_size() for name in names)
    size = path.stat().st_size
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, arguments.keep / "campaign.h5")
    remove_tree(run_dir.path, ignore_errors=True)
    sample = min(len(drawn), _GZIPPED)
    part = size / arguments.rollouts / (store_peers.jsonl_gz(drawn[:sample]) / sample)
    figures = [
        Figure("token columns, of 13 raw", "B/token", stored / tokens, tokens, None, 3.2),
        Figure("whole file, messages included", "B/token", size / tokens, tokens),
        Figure("whole file", "GB", size / 1e9, arguments.rollouts),
        Figure("whole file, part of JSONL.gz", "", part, sample, None, 0.75),
    ]
    if arguments.peers:
        figures[1] = store_peers.beside_size(figures[1], drawn, room, note)
    return figures


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
