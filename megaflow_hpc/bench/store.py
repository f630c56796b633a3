"""The trajectory store: ingest, size, opening and random batches, on transcripts as coding agents leave them.

Ingest is the whole way: records packed, appended and committed in groups of 16 with fsync, then gathered into one HDF5
file, which is made durable. MB are 10^6 uncompressed bytes of the arrays in that file; strings of ids and names are not
counted. Everything is streamed: memory does not grow with the number of rollouts. CPU time is that of all threads, for
machines that are busy with other things.

Sizes: a rollout of the default length is 0.52 MB raw, 0.5 MB of journal and 0.11 MB of file; a generated row of 4,096
tokens takes about 12 kB of file. Data go to --directory, by default a temporary one, and are removed.
All of it comes with the sources (``tests/bench/store.py``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.bench.arguments import add_count
from megaflow_hpc.bench.checkout import from_checkout
from megaflow_hpc.bench.figures import Figure

HELP = "the trajectory store: ingest, size, opening, random batches"
EXAMPLES = ("bench store", "bench store --rollouts 20 --generated 0")


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


def run(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Measures ingest and size, then reading a generated file."""
    option = "--peers" if arguments.peers else "bench store"
    figures: list[Figure] = from_checkout("store", option).measure(arguments, note)
    return figures
