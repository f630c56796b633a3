"""``check``: a campaign file alone, before anything is made or queued, and then what the site would say to it."""

from __future__ import annotations

import argparse

from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.verb import Subparsers, add_verb
from megaflow_hpc.errors import ConfigError, SiteError

MOST_LINES = 100


def register(subparsers: Subparsers) -> None:
    """Adds ``check``."""
    parser = add_verb(
        subparsers,
        "check",
        _check,
        "find what is wrong with a campaign file",
        examples=["check campaign.yaml", "check campaign.yaml --no-site --json"],
        description="Reads a campaign file with its tasks and models and says everything that is wrong with it, each "
        "mistake with file, line and remedy; then what is wrong for this site: partitions, walltimes, limits, "
        "sandboxes. Nothing is made, fetched or queued.",
    )
    parser.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML)")
    parser.add_argument("--no-site", action="store_true", help="only the file: ask neither Slurm nor Apptainer")


def _check(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import check

    with PlanProgress() as watch:
        found = check(arguments.campaign, not arguments.no_site, watch)
    if arguments.json:
        print_json(
            {
                "ok": not (found.file or found.site),
                "mistakes": found.file,
                "site": found.site,
                "warnings": found.warnings,
                "tasks": found.tasks,
                "rollouts": found.rollouts,
            }
        )
    else:
        wrong = [*found.file, *found.site]
        for line in wrong[:MOST_LINES]:
            note(line)
        if len(wrong) > MOST_LINES:
            note(f"… and {len(wrong) - MOST_LINES} more; --json prints them all")
        for line in found.warnings:
            note(f"warning: {line}")
        if not found.file and any(not line.startswith(arguments.campaign) for line in found.site):
            note("nothing is wrong with the file; --no-site looks at it alone, and run --launcher local needs no Slurm")
        if not found.file and not found.site:
            say(f"{arguments.campaign}: ok: {found.tasks} tasks, {found.rollouts} rollouts")
    if found.file:
        return ConfigError.exit_status
    return SiteError.exit_status if found.site else 0
