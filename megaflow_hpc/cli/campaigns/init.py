"""``init``: writes a first campaign file for this directory and this site."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.verb import Subparsers, add_verb
from megaflow_hpc.errors import ConfigError


def register(subparsers: Subparsers) -> None:
    """Adds ``init``."""
    parser = add_verb(
        subparsers,
        "init",
        _init,
        "write a campaign file for this site",
        examples=["init", "init experiments/first.yaml", "init --force"],
        description="Writes a commented campaign file of at most 40 lines, with this site's partitions, accounts and "
        "walltimes, the tasks next to it, and a model if one is available. Asks no questions; values that could not be "
        "determined are comments.",
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default="campaign.yaml", help="file or directory; default: campaign.yaml"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def _init(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.planning.starter import Starter
    from megaflow_hpc.host.atomic import write_atomic

    path = Path(arguments.path)
    path = path / "campaign.yaml" if path.is_dir() else path
    if path.exists() and not arguments.force:
        raise ConfigError(f"{path}: exists already; name another file, or replace it with --force")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}; create it, or name another file")
    with PlanProgress() as watch:
        watch.step("examining this site")
        starter = Starter.of(path.parent)
    write_atomic(path, starter.text())
    for line in starter.notices:
        note(line)
    if arguments.json:
        print_json({"campaign": str(path), "slurm": starter.slurm, "tasks": starter.tasks, "model": starter.model})
        return 0
    say(path)
    note(f"next: megaflow-hpc check {path}; then megaflow-hpc run {path}")
    return 0
