"""How a verb joins the command line: the same help, the same names of arguments, for every verb.

A group's ``register`` adds each of its verbs by :func:`add_verb`, which asks for what no help may lack: a line of what
it does and an example that can be copied. A verb with verbs of its own is added by :func:`add_group`. Arguments that
several verbs take are added by a function of their own here, so that they are spelled alike: ``RUN`` (:func:`add_run`),
``-o`` (:func:`add_output`), ``--json`` (:func:`add_json`). ``tests/cli/test_help.py`` reads the help of every verb.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from megaflow_hpc.cli.parser import HelpFormatter
from megaflow_hpc.errors import MegaflowError

Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns; argparse does not name its type in public."""


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
    """Adds one verb and returns its parser, to which the caller adds the verb's own arguments.

    Args:
        function: carries the verb out; returns the exit status.
        help_: one line without a full stop, for the list of verbs.
        examples: command lines without ``megaflow-hpc``, which stands before them unless they contain it; at least one.
        description: whole sentences for the verb's own help; ``help_`` where empty. Paragraphs are filled to the
            terminal, indented lines stay as they are.
        json: whether it takes ``--json``; every verb that prints does.
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
    """Adds a verb that has verbs of its own, such as ``images``, and returns what these are added to.

    Without a word more it prints its help. Arguments are those of :func:`add_verb`.
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
    """Adds ``--json``, which may stand before the verb too: where it is absent here, that is not said."""
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON on stdout, and nothing else there"
    )


def add_run(parser: argparse.ArgumentParser, nargs: str | None = None, file: bool = False) -> None:
    """Adds ``RUN`` as ``run_dir``: a run directory, or ``latest`` for the newest one here (``DIR/latest``: there).

    Args:
        nargs: as of ``add_argument``, for verbs that take several.
        file: whether a ``trajectories.h5`` is taken too.
    """
    what = "run directory, a trajectories.h5" if file else "run directory"
    parser.add_argument(
        "run_dir", metavar="RUN", nargs=nargs, type=run_path, help=f"{what}, or latest: the newest here"
    )


def add_output(parser: argparse.ArgumentParser, what: str, required: bool = False, metavar: str = "PATH") -> None:
    """Adds ``-o``/``--output`` as ``output``; ``what`` says in a line what is written there."""
    parser.add_argument("-o", "--output", metavar=metavar, required=required, help=what)


def run_path(text: str) -> str:
    """The value of an argument that is a run directory: ``latest`` stands for the newest one here."""
    from megaflow_hpc.rundir import runs

    try:
        return str(runs.named(text))
    except MegaflowError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
