"""``check``: validates a campaign file alone, and then against the site. It creates and submits nothing."""

from __future__ import annotations

import argparse

from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.verb import Subparsers, add_verb
from megaflow_hpc.errors import ConfigError, SiteError

MAX_LINES = 100


def register(subparsers: Subparsers) -> None:
    """Adds ``check``."""
    parser = add_verb(
        subparsers,
        "check",
        _check,
        "find errors in a campaign file",
        examples=["check campaign.yaml", "check campaign.yaml --no-site --json"],
        description="Reads a campaign file with its tasks and models and reports every error, "
        "with file, line and remedy. Then it checks the campaign against this site: partitions, walltimes, limits, "
        "sandboxes. It creates, fetches and submits nothing.",
    )
    parser.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML)")
    parser.add_argument("--no-site", action="store_true", help="check only the file, without Slurm and Apptainer")


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
        for line in wrong[:MAX_LINES]:
            note(line)
        if len(wrong) > MAX_LINES:
            note(f"… and {len(wrong) - MAX_LINES} more; --json prints them all")
        for line in found.warnings:
            note(f"warning: {line}")
        if not found.file and any(not line.startswith(arguments.campaign) for line in found.site):
            note("the file itself has no errors; --no-site checks it alone, and run --launcher local needs no Slurm")
        if not found.file and not found.site:
            say(f"{arguments.campaign}: ok: {found.tasks} tasks, {found.rollouts} rollouts")
    if found.file:
        return ConfigError.exit_status
    return SiteError.exit_status if found.site else 0
