"""``verify``, ``compact``, ``anonymise`` and ``du`` check campaign files, shrink them, copy them and measure them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.verb import add_json
from megaflow_hpc.errors import ConfigError


def register(subparsers: Any) -> None:
    """Adds verify, compact, anonymise and du."""

    def verb(name: str, help_: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = subparsers.add_parser(name, help=help_, description=f"{help_}.")
        add_json(parser)
        parser.set_defaults(run=run)
        return parser

    parser = verb("verify", "read every column of a trajectories.h5 and compare checksums", _verify)
    parser.add_argument("file", metavar="FILE", type=Path, help="a trajectories.h5")

    parser = verb(
        "compact", "drop superseded attempts from a trajectories.h5, or the journals of a finished run", _compact
    )
    parser.add_argument("path", metavar="FILE|RUN", type=Path, help="a trajectories.h5, or a run directory")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write there instead of in its place")
    parser.add_argument(
        "--drop-artifacts",
        metavar="PATTERN",
        action="append",
        default=[],
        help="also leave these files out, e.g. '*.log'",
    )
    parser.add_argument(
        "--drop-journals",
        action="store_true",
        help="of a finished RUN: remove journals and shards once its trajectories.h5 is verified to hold them",
    )

    parser = verb(
        "anonymise", "copy a trajectories.h5 without names of users, hosts, jobs and home directories", _anonymise
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a trajectories.h5")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="the copy, which must not exist")
    parser.add_argument(
        "--name", metavar="WORD", action="append", default=[], help="a further word to remove (repeatable)"
    )
    parser.add_argument(
        "--keep-tokens",
        action="store_true",
        help="keep the token sequences of rollouts whose messages were changed: their ids still spell the old text",
    )

    parser = verb("du", "say where the bytes of a run or of a trajectories.h5 are", _du)
    parser.add_argument("path", metavar="FILE|RUN", type=Path, help="a trajectories.h5, or a run directory")


def _verify(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories.maintenance.checksums import verify

    checks = verify(arguments.file)
    if arguments.json:
        print_json({"file": str(arguments.file), "columns": [asdict(check) for check in checks]})
    else:
        rows = [(check.path, check.entries, check.sha256[:16], check.state) for check in checks]
        say(table(("column", "entries", "sha256", ""), rows))
    bad = [check for check in checks if not check.good]
    for check in bad:
        note(f"{arguments.file}: /{check.path} {check.state}")
    return 1 if bad else 0


def _compact(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.rundir.layout import RunDir
    from megaflow_hpc.trajectories.maintenance.compact import compact, drop_journals

    path: Path = arguments.path
    result: dict[str, int] = {}
    if arguments.drop_journals:
        if not path.is_dir():
            raise ConfigError(f"{path}: --drop-journals is for a run directory")
        result["journal_bytes_dropped"] = drop_journals(RunDir(path))
    else:
        file = path / "trajectories.h5" if path.is_dir() else path
        result = compact(file, arguments.output, arguments.drop_artifacts)
    _print_counts(result, arguments.json)
    return 0


def _anonymise(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories.maintenance.anonymise import anonymise

    result = anonymise(arguments.file, arguments.output, arguments.name, arguments.keep_tokens)
    _print_counts(result, arguments.json)
    note("names that nobody listed and no path shows are still there: read a few trajectories before sharing")
    return 0


def _print_counts(counts: dict[str, int], as_json: bool) -> None:
    if as_json:
        print_json(counts)
    else:
        say(table(("", "n"), [(name.replace("_", " "), value) for name, value in counts.items()]))


def _du(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories.maintenance.disk_usage import of_file, of_run

    path: Path = arguments.path
    shares = of_run(path) if path.is_dir() else of_file(path)
    if arguments.json:
        print_json({"path": str(path), "shares": [asdict(share) for share in shares]})
        return 0
    total = sum(share.stored for share in shares)
    rows = [
        (
            share.name,
            share.files,
            f"{share.stored / 1e6:.2f}",
            f"{share.raw / share.stored:.1f}" if share.raw and share.stored else "",
            f"{100 * share.stored / total:.1f}" if total else "",
        )
        for share in shares
    ]
    say(table(("", "files", "MB", "raw/stored", "%"), [*rows, ("total", "", f"{total / 1e6:.2f}", "", "")]))
    return 0
