"""Whole campaigns: what one asks of slurmctld and holds idle, and what is lost when a lab does its worst to them.

    megaflow-hpc bench campaign --tasks 60
    megaflow-hpc bench campaign --flat
    megaflow-hpc bench campaign --chaos --seeds 20

Each seed is one campaign of real sandboxes, pods and engine servers (:mod:`megaflow_hpc.bench.chaos`), and a few faults
at drawn instants: a rank, rank 0, a runner, a whole pod, an engine, a slurmd or slurmctld killed with SIGKILL; a
preemption, a walltime, a cancelled and a requeued element. A seed decides what is hit and how long after the work has
begun; what the machine does meanwhile it cannot. Exit status 0 only if nothing was lost, doubled or left behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.bench.figures import Figure, median
from megaflow_hpc.errors import ConfigError, MegaflowError

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
    from megaflow_hpc.bench.chaos import Verdict, figures_of, trial

    if not arguments.image or not Path(arguments.image).exists():
        raise ConfigError(f"--image {arguments.image}: no such file; give a SIF with Python, or run launchers/setup")
    base = Path(arguments.directory or tempfile.gettempdir()) / f"megaflow-chaos-{os.getpid()}"
    if not arguments.chaos:
        from megaflow_hpc.bench import flat, requests

        if arguments.flat:
            figures = flat.measure(base, Path(arguments.image), note)
        else:
            figures = requests.measure(base, Path(arguments.image), note, arguments.tasks, arguments.pods)
        shutil.rmtree(base, ignore_errors=True)
        return figures
    verdicts: list[Verdict] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        note(f"seed {seed}: {time.strftime('%H:%M:%S')}")
        verdict = trial(
            seed,
            base / f"seed-{seed}",
            base / "scratch",
            Path(arguments.image),
            note,
            arguments.tasks,
            arguments.strikes,
        )
        verdicts.append(verdict)
        said = f"{verdict.planned} rollouts, {len(verdict.lost)} lost, {len(verdict.double)} double, "
        said += f"{len(verdict.failed)} not solved, {len(verdict.left)} things left, resumed {verdict.resumed} times"
        note(f"seed {seed}: {said}, {verdict.seconds:.0f} s")
        for line in [*verdict.lost, *verdict.double, *verdict.failed, *verdict.left]:
            note(f"seed {seed}:   {line}")
    if all(verdict.good for verdict in verdicts):
        shutil.rmtree(base, ignore_errors=True)
    sums = figures_of(verdicts)
    note("strikes by kind: " + ", ".join(f"{kind} {count}" for kind, count in sums["kinds"].items()))
    n, strikes = sums["rollouts"], sums["strikes"]
    figures = [
        Figure(f"rollouts lost, {len(verdicts)} seeds, {strikes} faults", "rollouts", sums["lost"], n, goal=0),
        Figure("rollouts stored twice", "rollouts", sums["double"], n, goal=0),
        Figure("rollouts stored as failed or unsolved", "rollouts", sums["failed"], n),
        Figure("processes, mounts and files left", "things", sums["left"], len(verdicts), goal=0),
        Figure(
            "faults inside running rollouts", "%", 100 * sums["inside"] / max(1, strikes), strikes, None, 50, "higher"
        ),
        median("seconds a campaign", "s", [verdict.seconds for verdict in verdicts]),
    ]
    if sums["lost"] or sums["double"] or sums["left"]:
        raise MegaflowError("\n".join(f"{f.name}: {f.value:g} {f.unit}" for f in figures) + f"\nsee {base}")
    return figures
