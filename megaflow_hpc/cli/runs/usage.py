"""``usage``: sums the cluster resources that runs were allocated."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.cli.output import print_json, say, table
from megaflow_hpc.cli.progress import under_way
from megaflow_hpc.cli.verb import Subparsers, add_run, add_verb

HEAD = ("run", "core-hours", "idle", "GPU-hours", "idle GPU-hours")


def register(subparsers: Subparsers) -> None:
    """Adds usage."""
    usage = add_verb(
        subparsers,
        "usage",
        _usage,
        "show core-hours and GPU-hours of runs, and their sum",
        examples=["usage RUN", "usage runs/*", "usage latest --json"],
        description="Shows the resources of all jobs of the runs, from the start of each allocation to its end, by "
        "Slurm's accounting. A pod is idle while none of its rollouts runs, an engine server while no rollout runs "
        "at all. JSON values are in seconds.",
    )
    add_run(usage, nargs="+")


def _usage(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run
    from megaflow_hpc.monitor.usage import added

    totals = {}
    for run in arguments.run_dir:
        with under_way(f"accounting for {run}"):
            totals[run] = Run(run).usage()
    total = added(totals.values())
    if arguments.json:
        print_json(
            {"runs": [{"run": str(Path(run).absolute()), **used} for run, used in totals.items()], "total": total}
        )
        return 0
    rows = [(Path(run).name, *hours(used)) for run, used in totals.items()]
    say(table(HEAD, [*rows, ("total", *hours(total))] if len(rows) > 1 else rows))
    return 0


def hours(usage: Mapping[str, Any]) -> list[str]:
    """Formats core-hours and GPU-hours, each followed by its idle part."""
    names = ("core_seconds", "idle_core_seconds", "gpu_seconds", "idle_gpu_seconds")
    return [f"{usage[name] / 3600:.2f}" for name in names]
