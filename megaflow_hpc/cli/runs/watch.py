"""The verb that follows a run until it ends: watch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from megaflow_hpc.cli.output import print_json, say
from megaflow_hpc.cli.runs.status import shown
from megaflow_hpc.cli.values import above_zero
from megaflow_hpc.cli.verb import add_run, add_verb
from megaflow_hpc.texts import printable

CLEAR = "\x1b[H\x1b[2J"


def register(subparsers: Any) -> None:
    """Adds watch."""
    watch = add_verb(
        subparsers,
        "watch",
        _watch,
        "follow a run's status until it ends",
        description="Shows the status anew every few seconds until the campaign ends. Ctrl-C leaves, and the campaign "
        "goes on. Slurm is asked twice a minute. Pods that limits left no room for are added while it is open.",
        examples=["watch RUN", "watch latest --json"],
    )
    add_run(watch)
    watch.add_argument("--every", type=above_zero, default=2.0, metavar="S", help="seconds between looks (2)")


def _watch(arguments: argparse.Namespace) -> int:
    """On a terminal one page, rewritten; into a file or pipe a page whenever counts have changed (one JSON a line)."""
    from megaflow_hpc.campaign.facade import Run

    run, said = Run(arguments.run_dir), None
    while True:
        status = run.status()
        run.slurm_jobs.top_up()
        page = shown(run.config.name, status)
        over = run.over(status)
        if arguments.json:
            if over or told(status) != said:
                print_json(status, indent=None)
        elif sys.stdout.isatty():
            print(CLEAR + printable(page))
        elif over or told(status) != said:
            say(page + "\n")
        said = told(status)
        sys.stdout.flush()
        if over:
            return 0
        time.sleep(max(0.1, arguments.every))


def told(status: Mapping[str, Any]) -> Any:
    """What of a status is worth another page."""
    return (
        status["state"],
        status["rollouts"],
        [(group["role"], group["reason"]) for group in status["queue"]],
        {policy: found["step"] for policy, found in status.get("training", {}).items()},
    )
