"""``validate``, ``compact``, ``anonymise`` and ``du``: verbs for trajectory files."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megaflow_hpc.cli.output import confirmed, note, print_result, table
from megaflow_hpc.cli.progress import under_way
from megaflow_hpc.cli.verb import Subparsers, add_output, add_run, add_verb
from megaflow_hpc.errors import ConfigError


def register(subparsers: Subparsers) -> None:
    """Registers the verbs ``validate``, ``compact``, ``anonymise`` and ``du``."""
    validate = add_verb(
        subparsers,
        "validate",
        _validate,
        "check a trajectories.h5 against the schema and its checksums",
        examples=["validate RUN", "validate shared.h5 --digests --json"],
        description="Reads every column, which compares every checksum. Checks datasets, types, offsets and "
        "consistency between columns. Exit status 1 if anything is wrong, 2 if the file is not a campaign file of this "
        "program.",
    )
    add_run(validate, file=True)
    validate.add_argument(
        "--digests",
        action="store_true",
        help="print the SHA-256 of each column's values, which compression and the order of writing do not change",
    )

    compact = add_verb(
        subparsers,
        "compact",
        _compact,
        "drop superseded attempts from a trajectories.h5, or the journals of a finished run",
        examples=[
            "compact RUN",
            "compact trajectories.h5 --drop-artifacts '*.log' -o small.h5",
            "compact RUN --drop-journals --dry-run",
            "compact RUN --drop-journals --yes",
        ],
        description="Rewrites the file without superseded attempts, in place or to --output. With --drop-journals it "
        "instead removes the journals of a finished run, after verifying that its file holds all of them. The run "
        "cannot be resumed afterwards. Asks for confirmation on a terminal, and otherwise requires --yes.",
    )
    add_run(compact, file=True)
    add_output(compact, "write to FILE instead of in place", metavar="FILE")
    compact.add_argument(
        "--drop-artifacts",
        metavar="PATTERN",
        action="append",
        default=[],
        help="also drop these artifacts, e.g. '*.log'",
    )
    compact.add_argument(
        "--drop-journals",
        action="store_true",
        help="remove the journals of a finished RUN",
    )
    compact.add_argument("--dry-run", action="store_true", help="with --drop-journals: print what would be removed")
    compact.add_argument("--yes", action="store_true", help="with --drop-journals: do not ask")

    anonymise = add_verb(
        subparsers,
        "anonymise",
        _anonymise,
        "copy a trajectories.h5 without names of users, hosts, jobs and home directories",
        examples=["anonymise RUN -o shared.h5 --name turing"],
        description="Writes a copy in which names of users, hosts, jobs and home directories are replaced in every "
        "text of every rollout.",
    )
    add_run(anonymise, file=True)
    add_output(anonymise, "the copy, which must not exist yet", required=True, metavar="FILE")
    anonymise.add_argument(
        "--name", metavar="WORD", action="append", default=[], help="another word to remove (repeatable)"
    )
    anonymise.add_argument(
        "--keep-tokens",
        action="store_true",
        help="keep the token sequences of rollouts with changed messages, although their ids still spell the old text",
    )
    anonymise.add_argument(
        "--keep-images",
        action="store_true",
        help="keep the images and the token sequences that show them, although names in their pixels stay",
    )

    du = add_verb(
        subparsers,
        "du",
        _du,
        "show how much space each part of a run or a trajectories.h5 takes",
        examples=["du RUN", "du RUN/trajectories.h5 --json"],
    )
    add_run(du, file=True)


def _validate(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories.maintenance.gather import gathered
    from megaflow_hpc.trajectories.maintenance.validate import column_digests, validate

    file = gathered(arguments.run_dir)
    with under_way(f"validating {file}"):
        problems = validate(file)
        columns = column_digests(file) if arguments.digests else []
    lines = [f"{file}: {problem}" for problem in problems] or [f"{file}: valid"]
    if columns:
        rows = [(column.path, column.entries, column.sha256[:16], column.state) for column in columns]
        lines.append(table(("column", "entries", "sha256", ""), rows))
    result = {"file": str(file), "valid": not problems, "problems": problems}
    if arguments.digests:
        result["columns"] = [asdict(column) for column in columns]
    print_result(arguments.json, result, "\n".join(lines))
    return 1 if problems else 0


def _compact(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories.maintenance.compact import compact
    from megaflow_hpc.trajectories.maintenance.gather import gathered

    path = Path(arguments.run_dir)
    if arguments.drop_journals:
        return _drop_journals(path, arguments)
    if arguments.dry_run or arguments.yes:
        raise ConfigError("compact: --dry-run and --yes need --drop-journals")
    with under_way(f"compacting {path}"):
        counts = compact(gathered(path), arguments.output or None, arguments.drop_artifacts)
    _print_counts(counts, arguments.json)
    return 0


def _drop_journals(path: Path, arguments: argparse.Namespace) -> int:
    from megaflow_hpc.rundir.layout import RunDir
    from megaflow_hpc.trajectories.maintenance.compact import drop_journals

    if not path.is_dir():
        raise ConfigError(f"{path}: --drop-journals is for a run directory")
    run = RunDir(path)
    if arguments.dry_run or not arguments.yes:
        with under_way(f"checking {path}"):
            journals = drop_journals(run, dry_run=True)
        what = f"{path}: journal files: {journals['journals']}, {journals['journal_bytes'] / 1e6:.1f} MB"
        if arguments.dry_run:
            print_result(arguments.json, {**journals, "dry_run": True}, f"{what}, would be removed")
            return 0
        if not confirmed(f"{what}, will be lost; the run cannot be resumed afterwards. Remove them?", "--yes"):
            note("nothing was removed")
            return 1
    with under_way(f"checking {path}"):
        dropped = drop_journals(run)
    _print_counts(dropped, arguments.json)
    return 0


def _anonymise(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories.maintenance.anonymise import anonymise
    from megaflow_hpc.trajectories.maintenance.gather import gathered

    with under_way(f"copying {arguments.run_dir}"):
        path = gathered(arguments.run_dir)
        keep = {"keep_tokens": arguments.keep_tokens, "keep_images": arguments.keep_images}
        result = anonymise(path, arguments.output, arguments.name, **keep)
    _print_counts(result, arguments.json)
    note("names that were neither listed nor found in a path are still there: read a few trajectories before sharing")
    return 0


def _print_counts(counts: dict[str, int], as_json: bool) -> None:
    rows = [(name.replace("_", " "), value) for name, value in counts.items()]
    print_result(as_json, counts, table(("", "n"), rows))


def _du(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories.maintenance.compact import usage_of_file, usage_of_run

    path = Path(arguments.run_dir)
    if path.is_dir() and not any((path / part).exists() for part in ("run.json", "journal", "trajectories.h5")):
        raise ConfigError(f"{path}: not a run directory (no run.json); list run directories with: megaflow-hpc list")
    with under_way(f"measuring {path}"):
        shares = usage_of_run(path) if path.is_dir() else usage_of_file(path)
    total = sum(share.stored for share in shares)
    rows: list[tuple[object, ...]] = [
        (
            share.name,
            share.files,
            f"{share.stored / 1e6:.2f}",
            f"{share.raw / share.stored:.1f}" if share.raw and share.stored else "",
            f"{100 * share.stored / total:.1f}" if total else "",
        )
        for share in shares
    ]
    rows.append(("total", "", f"{total / 1e6:.2f}", "", ""))
    result = {"path": str(path), "shares": [asdict(share) for share in shares]}
    print_result(arguments.json, result, table(("", "files", "MB", "raw/stored", "%"), rows))
    return 0
