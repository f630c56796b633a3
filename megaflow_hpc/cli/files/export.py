"""``export`` writes trajectories in the formats of other programs. ``import`` creates a campaign file from JSON
Lines."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaflow_hpc.cli.output import note, print_result
from megaflow_hpc.cli.progress import under_way
from megaflow_hpc.cli.verb import Subparsers, add_output, add_run, add_verb
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.texts import in_one_line

FORMATS = """\
Writes the trajectories of a campaign for other programs. Works while the campaign runs, needs little memory, and
replaces a file only when the new one is complete.

formats:
  jsonl    everything, one trajectory a line; megaflow-hpc import reads it back
  parquet  one row per trajectory
  verl     verl.parquet: one row per token sequence
  areal    areal.parquet: one row per token sequence
  atif     atif/: Harbor's trajectory format
  preds    preds.json: SWE-bench predictions, from the patch of each rollout
  harbor   harbor/: for harbor view
  inspect  inspect/: for inspect view
  traces   traces/: for the trace viewer of the Hugging Face Hub

An expression (--where) can use columns of trajectories.h5 (status, reward, policy, group, task, agent, turns, …),
single rewards (rewards['tests']), tokens, duration_s, weight_version_min and weight_version_max.
"""


def register(subparsers: Subparsers) -> None:
    """Registers the verbs ``export`` and ``import``."""
    export = add_verb(
        subparsers,
        "export",
        _export,
        "write trajectories in other formats",
        examples=[
            "export RUN --format jsonl,parquet",
            "export RUN --format verl --where \"status == 'completed' and reward >= 0.5\" -o train",
            "export latest --format jsonl --compress zst -o share",
        ],
        description=FORMATS,
    )
    add_run(export, file=True)
    export.add_argument(
        "--format",
        required=True,
        metavar="F[,F…]",
        help="formats, separated by commas",
    )
    export.add_argument("--where", metavar="EXPR", help="export only trajectories for which the expression is true")
    add_output(export, "directory to write to (RUN/export)", metavar="DIR")
    export.add_argument(
        "--compress", choices=("none", "gz", "zst"), default="none", help="compression of JSON lines (none)"
    )

    back = add_verb(
        subparsers,
        "import",
        _import,
        "make a trajectories.h5 from exported JSON lines",
        examples=["import trajectories.jsonl.zst -o trajectories.h5"],
        description="Reads the output of megaflow-hpc export --format jsonl, plain or compressed, into a new campaign "
        "file with the same columns.",
    )
    back.add_argument("file", metavar="FILE", help="JSON lines, plain, .gz or .zst")
    add_output(back, "the campaign file to write", required=True, metavar="FILE.h5")
    back.add_argument("--campaign", metavar="NAME", help="name of the campaign (default: FILE's)")
    back.add_argument("--force", action="store_true", help="replace an existing file")


def _export(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories import open_trajectories
    from megaflow_hpc.trajectories.exports import export, module_of

    formats = [name.strip() for name in arguments.format.split(",") if name.strip()]
    for name in formats or [arguments.format]:
        module_of(name)
    path = Path(arguments.run_dir)
    run_directory = path if path.is_dir() else path.parent
    directory = Path(arguments.output or run_directory / "export")
    with under_way(f"exporting {path}") as watch, open_trajectories(path) as store:

        def progress(name: str, done: int, total: int) -> None:
            watch.detail(f"{name} {done}/{total} trajectories")

        warnings: list[str] = []
        written = export(store, formats, directory, arguments.where, arguments.compress, progress, warnings.append)
        count = len(store) if arguments.where is None else len(store.select(arguments.where))
    for warning in warnings:
        note(in_one_line(warning))
    files = {name: list(map(str, paths)) for name, paths in written.items()}
    lines = "\n".join(path for paths in files.values() for path in paths)
    hint = f"{count} trajectories" + (f", warnings: {len(warnings)}" if warnings else "")
    print_result(arguments.json, {"trajectories": count, "files": files, "warnings": warnings}, lines, hint)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories.exports.jsonl import import_jsonl

    target = Path(arguments.output)
    if target.exists() and not arguments.force:
        raise ConfigError(f"{target}: exists already; name another file, or replace it with --force")
    with under_way(f"importing {arguments.file}") as watch:
        count = import_jsonl(
            Path(arguments.file),
            target,
            arguments.campaign,
            lambda done: watch.detail(f"{done} trajectories"),
        )
    print_result(arguments.json, {"file": str(target), "trajectories": count}, target, f"{count} trajectories")
    return 0
