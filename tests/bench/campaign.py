"""Whole campaigns: what one asks of slurmctld and holds idle, and what is lost when a lab does its worst to them.

Each seed is one campaign of real sandboxes, pods and engine servers (``tests/bench/chaos.py``), and a few faults
at drawn instants: a rank, rank 0, a runner, a whole pod, an engine, a slurmd or slurmctld killed with SIGKILL; a
preemption, a walltime, a cancelled and a requeued element; a node that Slurm takes for lost while its pods go on;
rank 0 stopped for longer than its lease, a worker stopped within a large message; a pod that drains while its files
cannot grow; slurmctld away, a rate limit or Requeue=0 while a pod asks for its requeue; the coordinator killed within
a survey of 20,000 old starts. A seed decides what is hit, how long after the work has begun, whether the campaign is
submitted from Python, by hand with --export=NONE or from inside an allocation, and the site's WaitTime; what the
machine does meanwhile it cannot. Exit status 0 only if nothing was lost, doubled or left behind.
All but --peers drive a Slurm lab.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.host.files import remove_tree
from tests.bench import campaign_peers, chaos, flat, requests
from tests.bench.arguments import add_count, add_image, image_of
from tests.bench.command import main
from tests.bench.figures import Figure

KINDS = {"chaos": chaos, "flat": flat, "peers": campaign_peers, "requests": requests}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_image(parser)
    parser.add_argument(
        "--flat", action="store_true", help="makespans of few and many sleeping rollouts, and busy slots"
    )
    parser.add_argument("--chaos", action="store_true", help="inject faults into campaigns, by seed")
    add_count(parser, "--tasks", 24, "rollouts of a campaign")
    add_count(parser, "--pods", 2, "without --chaos: pods of the campaign")
    add_count(parser, "--slots", 4, "with --peers: rollouts at once")
    add_count(parser, "--seeds", 20, "with --chaos: campaigns")
    add_count(parser, "--first", 1, "with --chaos: the first seed", least=0)
    add_count(parser, "--strikes", 4, "with --chaos: faults in each campaign", least=0)
    parser.add_argument("--log", metavar="FILE", help="with --chaos: append each seed's result, and skip those in it")
    parser.add_argument("--directory", metavar="DIR", help="make the runs there; what is in order is removed again")


def run(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Runs the campaigns of one kind of measurement below a directory of their own."""
    kinds = {"chaos": arguments.chaos, "flat": arguments.flat, "peers": arguments.peers, "requests": True}
    kind = next(name for name, asked in kinds.items() if asked)
    measurement = KINDS[kind]
    image = Path(image_of(arguments, sif=True))
    if arguments.directory:
        os.makedirs(arguments.directory, exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix=f"megaflow-{kind}-", dir=arguments.directory))
    figures: list[Figure] = measurement.measure(base, image, note, arguments)
    remove_tree(base, ignore_errors=True)
    return figures


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
