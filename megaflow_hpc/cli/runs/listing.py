"""``list``: prints the runs in this directory and its subdirectories, newest first."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.values import whole
from megaflow_hpc.cli.verb import add_verb
from megaflow_hpc.rundir import runs

STATES = ("planned", "queued", "running", "serving", "stopped", "cancelled", "finished", "broken", "unknown")

DESCRIPTION = f"""\
Lists the runs here, or under each DIR, newest first: state, stored and planned
rollouts, age and size. Searches {runs.DEPTH} directories deep and follows links. States:
planned, queued, running (an engine pool: serving), stopped (no pod is left, but
not finished: resume), cancelled, finished, broken, unknown (Slurm does not answer). The size of a large
run is omitted; --bytes measures all."""


def register(subparsers: Any) -> None:
    """Adds ``list``."""
    parser = add_verb(
        subparsers,
        "list",
        _list,
        "list the runs here or under a directory, newest first",
        examples=["list", "list /scratch/$USER --depth 5", "list --state running --json"],
        description=DESCRIPTION,
    )
    parser.add_argument(
        "directories", metavar="DIR", nargs="*", default=["."], help="directory to search; default: here"
    )
    parser.add_argument("-n", "--newest", metavar="N", type=whole(1), help="only the N newest")
    parser.add_argument("--state", metavar="STATE", choices=STATES, help="only those in this state")
    parser.add_argument(
        "--depth", metavar="N", type=whole(), default=runs.DEPTH, help=f"maximum depth of the search ({runs.DEPTH})"
    )
    parser.add_argument("--bytes", action="store_true", help="measure every run, however long it takes")


def _list(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign import overview

    paths: dict[Path, None] = {}
    cut = unreadable = 0
    for directory in arguments.directories:
        search = runs.find(directory, arguments.depth)
        paths |= dict.fromkeys(search.runs)
        cut, unreadable = cut + search.cut, unreadable + len(search.unreadable)
    glances = sorted(overview.glances(paths), key=lambda glance: -glance.planned_at)
    shown = [glance for glance in glances if arguments.state in (None, glance.state)][: arguments.newest]
    overview.measure(shown, None if arguments.bytes else overview.SIZED_ENTRIES)
    if arguments.json:
        print_json([{**asdict(glance), "path": str(glance.path.absolute())} for glance in shown])
    elif shown:
        rows = [
            (
                _place(glance.path),
                glance.name,
                glance.state,
                "?" if glance.total is None else f"{glance.done}/{glance.total}",
                _age(time.time() - glance.planned_at),
                "-" if glance.bytes is None else _size(glance.bytes),
            )
            for glance in shown
        ]
        say(table(("run", "campaign", "state", "rollouts", "age", "bytes"), rows))
    else:
        note(f"no run in {', '.join(arguments.directories)} or {arguments.depth} levels below")
    for cause in dict.fromkeys(glance.cause for glance in shown if glance.cause):
        note(cause)
    if cut:
        note("the search stopped at its bound, since there are too many files: name the directory of your runs")
    if unreadable:
        note(f"{unreadable} directories are unreadable and were skipped")
    return 0


def _place(path: Path) -> str:
    """Returns a path relative to the working directory if it is inside, otherwise unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
