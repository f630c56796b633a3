"""``--dry-run`` of ``run`` and ``submit``: prints every script on stdout and an estimate of the cost on stderr."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megaflow_hpc.cli.output import note, print_json, say, seconds
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.values import above_zero
from megaflow_hpc.cli.verb import run_path

if TYPE_CHECKING:
    from megaflow_hpc.campaign.facade import Campaign
    from megaflow_hpc.campaign.planning.estimate import Estimate


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Adds ``--dry-run`` and the options that set the assumed duration of rollouts."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every script and an estimate of time, hours, nodes and disk space; change nothing",
    )
    parser.add_argument(
        "--like", metavar="RUN", type=run_path, help="with --dry-run: rollouts take as long as in this run"
    )
    parser.add_argument(
        "--rollout-seconds", metavar="N", type=above_zero, help="with --dry-run: every rollout takes N seconds"
    )


def dry_run(campaign: Campaign, arguments: argparse.Namespace) -> int:
    """Prints scripts and estimate. Returns the exit status."""
    from megaflow_hpc.slurm import script

    with PlanProgress() as watch:
        jobs, found = campaign.estimate(
            getattr(arguments, "launcher", "slurm"),  # submit has no --launcher: it always uses Slurm
            arguments.run_dir,
            arguments.only,
            getattr(arguments, "ranks", 1),
            arguments.rollout_seconds,
            arguments.like,
            watch,
        )
    texts = {f"{job.role}-{number}": script.script(job) for number, job in enumerate(jobs)}
    if arguments.json:
        print_json({"scripts": texts, "estimate": found.as_json(), "warnings": campaign.notices})
        return 0
    say("\n".join(texts.values()), end="")
    for line in [*_lines(found), *campaign.notices]:
        note(line)
    return 0


def _lines(found: Estimate) -> list[str]:
    """Format the estimate for a person."""
    wait = "" if found.jobs and found.jobs[0].role == "local" else " and the wait in the queue"
    blocks = f" in {_count(found.blocks, 'block')}" if found.blocks else ""
    said = [
        f"{_count(found.rollouts, 'rollout')} of {_count(found.tasks, 'task')}{blocks}",
        f"{_count(found.pods, 'pod')} with {_count(found.slots, 'slot')} at once, {_count(found.nodes, 'node')} in all",
        f"time: {seconds(found.time_s)}{wait} ({found.basis})",
    ]
    for name, hours in (("core-hours", found.core_hours), ("GPU-hours", found.gpu_hours)):
        if hours.expected or hours.by_walltime:
            most = "no walltime bounds it"
            if hours.by_walltime is not None:
                most = f"at most {hours.by_walltime:,.1f} by walltime, and the same again for each requeue"
            said.append(f"{name}: {hours.expected:,.1f} expected, {most}")
    for job in found.jobs:
        end = "no known end" if job.walltime_s is None else seconds(job.walltime_s)
        throttled = f", {job.at_once} at once" if job.at_once < job.elements else ""
        gpus = f", {_count(job.gpus, 'GPU')}" if job.gpus else ""
        held = ", started on demand" if job.held else ""
        each = f"{_count(job.nodes, 'node')}, {_count(job.cores, 'core')}{gpus}, {end}{held}"
        said.append(f"{job.role}: {job.elements}{throttled}, each {each}")
    if found.images.get("images"):
        said.append(f"images: {found.images['images']}, {found.images['to_make'] or 'none'} missing")
    for place in found.storage:
        wants = f"about {place.bytes / 1e9:.2g} GB and {place.inodes} files, " if place.bytes else ""
        files = "" if place.free_inodes is None else f" and {place.free_inodes:,.0f} files"
        lacks = "" if place.fits else "NOT ENOUGH: "
        said.append(
            f"{place.what}: {lacks}{wants}{place.free_bytes / 1e9:,.0f} GB{files} free ({place.by}) at {place.path}"
        )
    return [*said, *found.site]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
