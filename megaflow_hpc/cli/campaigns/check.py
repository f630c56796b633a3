"""``check``: validates a campaign file, first on its own and then against the site. Creates and submits nothing."""

from __future__ import annotations

import argparse

from megaflow_hpc.cli.campaigns.following import add_max_rollouts
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
    add_max_rollouts(parser)


def _check(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import check

    with PlanProgress() as watch:
        result = check(arguments.campaign, not arguments.no_site, watch, arguments.max_rollouts)
    if arguments.json:
        print_json(
            {
                "ok": not (result.file or result.site),
                "mistakes": result.file,
                "site": result.site,
                "warnings": result.warnings,
                "tasks": result.tasks,
                "rollouts": result.rollouts,
            }
        )
    else:
        wrong = [*result.file, *result.site]
        for line in wrong[:MAX_LINES]:
            note(line)
        if len(wrong) > MAX_LINES:
            note(f"… and {len(wrong) - MAX_LINES} more; --json prints them all")
        for line in result.warnings:
            note(f"warning: {line}")
        if not result.file and any(not line.startswith(arguments.campaign) for line in result.site):
            note("the file itself has no errors; --no-site checks it alone, and run --launcher local needs no Slurm")
        if not result.file and not result.site:
            say(f"{arguments.campaign}: ok: {result.tasks} tasks, {result.rollouts} rollouts")
    if result.file:
        return ConfigError.exit_status
    return SiteError.exit_status if result.site else 0
