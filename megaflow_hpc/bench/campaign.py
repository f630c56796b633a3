"""Whole campaigns: what one asks of slurmctld and holds idle, and what is lost when a lab does its worst to them.

    megaflow-hpc bench campaign --tasks 60
    megaflow-hpc bench campaign --flat
    megaflow-hpc bench campaign --chaos --seeds 20

Each seed is one campaign of real sandboxes, pods and engine servers (``tests/bench/chaos.py``), and a few faults
at drawn instants: a rank, rank 0, a runner, a whole pod, an engine, a slurmd or slurmctld killed with SIGKILL; a
preemption, a walltime, a cancelled and a requeued element. A seed decides what is hit and how long after the work has
begun; what the machine does meanwhile it cannot. Exit status 0 only if nothing was lost, doubled or left behind.
All of these drive a Slurm lab, and so need a checkout of the sources.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.bench.checkout import from_checkout
from megaflow_hpc.bench.figures import Figure
from megaflow_hpc.errors import ConfigError

HELP = "whole campaigns: requests to slurmctld, idle seconds; under seeded faults: lost, doubled, left behind"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chaos", action="store_true", help="strike campaigns on a lab; without it one is followed in peace"
    )
    parser.add_argument(
        "--flat", action="store_true", help="makespans of 1, 8 and 32 sleeping rollouts, and how busy 32 slots are"
    )
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="campaigns; default 20")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="seed of the first; default 1")
    parser.add_argument("--strikes", type=int, default=4, metavar="N", help="faults in each; default 4")
    parser.add_argument("--pods", type=int, default=2, metavar="N", help="pods of a campaign in peace; default 2")
    parser.add_argument("--tasks", type=int, default=24, metavar="N", help="rollouts in each; default 24")
    parser.add_argument(
        "--image",
        default=os.environ.get("MEGAFLOW_TEST_BASE_SIF"),
        metavar="SIF",
        help="image with Python; default MEGAFLOW_TEST_BASE_SIF",
    )
    parser.add_argument("--directory", metavar="DIR", help="where runs are made; what is in order is removed again")


def run(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Runs the campaigns of one kind of measurement below a directory of their own."""
    kind = "chaos" if arguments.chaos else "flat" if arguments.flat else "requests"
    measurement = from_checkout(kind, "bench campaign")
    if not arguments.image or not Path(arguments.image).exists():
        raise ConfigError(f"--image {arguments.image}: no such file; give a SIF with Python, or run launchers/setup")
    base = Path(arguments.directory or tempfile.gettempdir()) / f"megaflow-{kind}-{os.getpid()}"
    figures: list[Figure] = measurement.measure(base, Path(arguments.image), note, arguments)
    shutil.rmtree(base, ignore_errors=True)
    return figures
