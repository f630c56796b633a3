"""Adds verbs to the command line with uniform help and argument names.

A group's ``register`` adds each of its verbs with :func:`add_verb`, which requires a one-line help and an example to
copy. A verb with subcommands is added with :func:`add_group`. Arguments that several verbs share have functions
here, so that their names agree: ``RUN`` (:func:`add_run`), ``-o`` (:func:`add_output`), ``--json`` (:func:`add_json`).
``tests/cli/test_help.py`` checks the help of every verb.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from megaflow_hpc.cli.parser import HelpFormatter
from megaflow_hpc.errors import MegaflowError

Subparsers = Any
"""Return type of ``ArgumentParser.add_subparsers``, which argparse does not export."""


def add_verb(
    subparsers: Subparsers,
    name: str,
    function: Callable[[argparse.Namespace], int],
    help_: str,
    *,
    examples: Sequence[str],
    description: str = "",
    json: bool = True,
) -> argparse.ArgumentParser:
    """Adds a verb and returns its parser, to which the caller adds arguments.

    Args:
        function: Carries out the verb and returns the exit status.
        help_: One line without a full stop, for the list of verbs.
        examples: At least one command line. ``megaflow-hpc`` is prepended unless the line contains it.
        description: Text for the verb's own help. Default: ``help_``. Paragraphs are wrapped to the terminal's width,
            and indented lines are left unchanged.
        json: Whether the verb accepts ``--json``. Every verb that prints results should.
    """
    lines = [line if "megaflow-hpc " in line else f"megaflow-hpc {line}" for line in examples]
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help_,
        description=description or help_[0].upper() + help_[1:] + ".",
        epilog="\n  ".join([f"example{'s' * (len(lines) > 1)}:", *lines]),
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=function)
    if json:
        add_json(parser)
    else:
        parser.set_defaults(no_json=parser)
    return parser


def add_group(
    subparsers: Subparsers, name: str, help_: str, *, examples: Sequence[str], description: str = ""
) -> Subparsers:
    """Adds a verb with subcommands, such as ``images``. Returns the object to which they are added.

    Without a subcommand, the verb prints its help. The arguments are those of :func:`add_verb`.
    """
    parser = add_verb(subparsers, name, _print_help, help_, examples=examples, description=description)
    parser.set_defaults(group=parser)
    return parser.add_subparsers(dest="verb_of_group", metavar="VERB", title="verbs")


def _print_help(arguments: argparse.Namespace) -> int:
    if getattr(arguments, "json", False):
        arguments.group.error("missing: VERB")
    arguments.group.print_help()
    return 0


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json`` without a default, so that a ``--json`` before the verb is not overwritten."""
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON on stdout, and nothing else there"
    )


def add_run(parser: argparse.ArgumentParser, nargs: str | None = None, file: bool = False) -> None:
    """Adds ``RUN`` as ``run_dir``: a run directory, or ``latest`` for the newest run here (``DIR/latest``: in DIR).

    Args:
        nargs: As in ``add_argument``, for verbs that accept several runs.
        file: Whether a ``trajectories.h5`` is accepted too.
    """
    what = "run directory, a trajectories.h5" if file else "run directory"
    parser.add_argument(
        "run_dir", metavar="RUN", nargs=nargs, type=run_path, help=f"{what}, or latest: the newest here"
    )


def add_output(parser: argparse.ArgumentParser, what: str, required: bool = False, metavar: str = "PATH") -> None:
    """Adds ``-o``/``--output`` as ``output``.

    Args:
        what: The help text.
    """
    parser.add_argument("-o", "--output", metavar=metavar, required=required, help=what)


def run_path(text: str) -> str:
    """Parses a run directory. ``latest`` means the newest one here."""
    from megaflow_hpc.rundir import runs

    try:
        return str(runs.named(text))
    except MegaflowError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
