"""Verbs that take a campaign file: plan, run, submit."""

from __future__ import annotations

import argparse
from typing import Any

from megaflow_hpc.cli.campaigns.dry_run import add_dry_run, dry_run
from megaflow_hpc.cli.campaigns.following import add_launcher, say_notices, start_and_follow
from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.verb import Subparsers, add_verb


def register(subparsers: Subparsers) -> None:
    """Adds plan, run and submit."""
    plan = add_verb(
        subparsers,
        "plan",
        _plan,
        "create the run directory and submit nothing",
        examples=["plan campaign.yaml", "plan campaign.yaml --only 'fix-*/default/0' --run-dir runs/trial"],
        description="Checks the campaign file, its tasks and the site, creates the run directory and prints it. On "
        "stderr it prints the commands that submit the run by hand.",
    )
    _add_campaign(plan)

    run = add_verb(
        subparsers,
        "run",
        _run,
        "submit, follow, gather and print the summary",
        examples=["run campaign.yaml", "run campaign.yaml --launcher local --ranks 4"],
        description="Plans the campaign, submits it, shows its progress, and prints the summary at its end. Ctrl-C "
        "cancels the jobs and keeps stored results; megaflow-hpc resume continues from there.",
    )
    _add_campaign(run)
    add_launcher(run)
    add_dry_run(run)

    submit = add_verb(
        subparsers,
        "submit",
        _submit,
        "submit the campaign and return",
        examples=["submit campaign.yaml --dry-run", "submit campaign.yaml"],
        description="Plans the campaign, submits its jobs and prints the run directory and the jobs. You may close "
        "the terminal. Follow the run with megaflow-hpc watch RUN.",
    )
    _add_campaign(submit)
    add_dry_run(submit)


def _add_campaign(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("campaign", metavar="CAMPAIGN", help="campaign file (YAML)")
    parser.add_argument(
        "--run-dir", metavar="RUN", help="run directory; default: a new one under the campaign's run_dir"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="ID", help="plan only these tasks, groups or rollouts (shell patterns)"
    )


def _plan(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Campaign
    from megaflow_hpc.slurm import site

    campaign = Campaign.from_yaml(arguments.campaign)
    with PlanProgress(arguments.campaign) as watch:
        run = campaign.plan(arguments.run_dir, arguments.only, watch=watch)
    say_notices(campaign)
    here = f"megaflow-hpc resume {run.path} --launcher local"
    commands = _by_hand(run) if site.has_slurm() else [here]
    if arguments.json:
        print_json({"run": str(run.path), "commands": commands})
        return 0
    for command in commands:
        note(command)
    say(run.path)
    return 0


def _by_hand(run: Any) -> list[str]:
    """Return the commands that submit a planned run by hand."""
    from megaflow_hpc.campaign.job_requests import by_hand

    return by_hand(run.config, run.dir, run.record.server_groups)


def _run(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Campaign

    campaign = Campaign.from_yaml(arguments.campaign)
    if arguments.dry_run:
        return dry_run(campaign, arguments)
    with PlanProgress(arguments.campaign) as watch:
        run = campaign.plan(arguments.run_dir, arguments.only, arguments.launcher, watch)
    note(f"run directory: {run.path}")
    say_notices(campaign)

    def start() -> bool:
        campaign.start(run, arguments.launcher, arguments.ranks)
        note(f"jobs: {' '.join(run.job_ids()) or 'local'}")
        say_notices(run.slurm_jobs)
        return True

    return start_and_follow(run, arguments, start)


def _submit(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Campaign

    campaign = Campaign.from_yaml(arguments.campaign)
    if arguments.dry_run:
        return dry_run(campaign, arguments)
    with PlanProgress(arguments.campaign) as watch:
        run = campaign.submit("slurm", arguments.run_dir, arguments.only, watch=watch)
    say_notices(campaign, run.slurm_jobs)
    if arguments.json:
        print_json({"run": str(run.path), "jobs": run.job_ids()})
        return 0
    say(run.path)
    for job in run.job_ids():
        say(job)
    note(f"follow with: megaflow-hpc status {run.path}")
    return 0
