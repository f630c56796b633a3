"""``janitor``: removes leftover files and processes of killed sandboxes from this node."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter

from megaflow_hpc.cli.output import print_json, say
from megaflow_hpc.cli.verb import Subparsers, add_verb


def register(subparsers: Subparsers) -> None:
    """Registers the verb ``janitor``."""
    parser = add_verb(
        subparsers,
        "janitor",
        _janitor,
        "remove what killed sandboxes left on this node",
        examples=["janitor", "janitor --scratch /local/me/megaflow"],
        description="Ends processes and removes scratch files of sandboxes whose owner has ended. Never touches files "
        "of a live process. Processes are identified by pid and start time.",
    )
    parser.add_argument(
        "--scratch", metavar="DIR", help="scratch directory to clean; default: the sandboxes' scratch on this node"
    )


def _janitor(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.sandbox.scratch import scratch_directories, sweep
    from megaflow_hpc.host.private import BUILD_DIRECTORY, sweep_directories, sweep_shared_memory

    places = [arguments.scratch] if arguments.scratch else scratch_directories()
    counts: Counter[str] = Counter(owners=0, sandboxes=0, processes=0, left=0)
    for directory in places:
        counts.update(sweep(directory))
    scratch = ", ".join(map(str, places)) or "no scratch on this node"
    counts["pods"] = sweep_directories(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    counts["builds"] = sweep_directories(tempfile.gettempdir(), BUILD_DIRECTORY)
    counts["shared_memory"] = sweep_shared_memory()
    if arguments.json:
        print_json({"scratch": scratch, **counts})
    else:
        say(
            f"{scratch}: {counts['owners']} dead owners, {counts['sandboxes']} sandboxes, "
            f"{counts['processes']} processes, {counts['pods']} directories of pods and "
            f"{counts['builds']} of builds, {counts['shared_memory']} shared-memory files removed, "
            f"{counts['left']} could not be removed"
        )
    return 1 if counts["left"] else 0
