"""Adds verbs to the command line with uniform help, argument names and argument types.

A group's ``register`` adds each of its verbs with :func:`add_verb`, which requires a one-line help and an example.
:func:`add_group` adds a verb with subcommands.

Arguments that several verbs share have functions in this module, so that their names agree: ``RUN``
(:func:`add_run`), ``-o`` (:func:`add_output`), ``--json`` (:func:`add_json`). ``tests/cli/test_help.py`` checks the
help of every verb.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.cli.parser import HelpFormatter
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.rundir.budget import LIMITS

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
        function: Implements the verb. Returns the exit status.
        help_: One line without a full stop, for the list of verbs.
        examples: At least one command line. ``megaflow-hpc`` is prepended to lines that do not contain it.
        description: Text for the verb's own help. Paragraphs are wrapped to the terminal's width, and indented lines
            are left unchanged. Default: ``help_``.
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
    """Adds a verb with subcommands, such as ``images``. Returns the object to which subcommands are added.

    Without a subcommand, the verb prints its help. Takes the arguments of :func:`add_verb`.
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
    """Adds ``--json``. It has no default, so that it does not overwrite a ``--json`` before the verb."""
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON on stdout, and nothing else there"
    )


def add_run(parser: argparse.ArgumentParser, nargs: str | None = None, file: bool = False) -> None:
    """Adds the positional argument ``RUN`` as ``run_dir``: a run directory, or ``latest``.

    ``latest`` is the newest run in the default location, ``DIR/latest`` the newest run in DIR.

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


def output_file(path: str | Path) -> Path:
    """Creates the parent directory of an output file and returns its path. Call it once all other arguments are
    validated."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def run_path(text: str) -> str:
    """Converts an argument to the path of a run directory. ``latest`` selects the newest run.

    Raises:
        ArgumentTypeError: There is no such run.
    """
    from megaflow_hpc.rundir import runs

    try:
        return str(runs.named(text))
    except MegaflowError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


ROLES = ("pods", "servers", "trainer", "gather")
"""Kinds of jobs in a campaign, named as in the ``slurm`` section."""


def whole(least: int = 0) -> Callable[[str], int]:
    """Returns an argument type for integers of at least ``least``."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: give a whole number of at least {least}")
        return int(text)

    return read


def above_zero(text: str) -> float:
    """Parses a positive number, such as a time in seconds.

    Raises:
        ArgumentTypeError: The text is not a positive number.
    """
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value


def zero_or_more(text: str) -> float:
    """Parses a non-negative number.

    Raises:
        ArgumentTypeError: The text is not a non-negative number.
    """
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number of at least 0")
    return value


def share(text: str) -> tuple[int, int]:
    """Parses a share such as ``3/16``, the third of sixteen, into ``(3, 16)``.

    Raises:
        ArgumentTypeError: The text is malformed, or the share is out of range.
    """
    number, _, shares = text.partition("/")
    if not (number.isdecimal() and shares.isdecimal() and 1 <= int(number) <= int(shares)):
        raise argparse.ArgumentTypeError(f"{text}: give a share and the number of shares, from 1/16 to 16/16")
    return int(number), int(shares)


def limit(text: str) -> tuple[str, float | None]:
    """Parses the value of ``--limit``, such as ``core_hours=100`` or ``wall=none``, into name and number. ``None``
    means no limit.

    Raises:
        ArgumentTypeError: The limit is unknown, or the number is not positive.
    """
    name, _, number = text.partition("=")
    if name not in LIMITS:
        raise argparse.ArgumentTypeError(f"{text}: expected {', '.join(LIMITS[:-1])} or {LIMITS[-1]}, as wall=24")
    if number == "none":
        return name, None
    try:
        return name, above_zero(number)
    except argparse.ArgumentTypeError:
        unit = "dollars" if name == "usd" else "hours"
        message = f"{text}: expected {unit} above 0, as {name}=100, or {name}=none"
        raise argparse.ArgumentTypeError(message) from None


def request(key: str) -> Callable[[str], tuple[str, str, str | None]]:
    """Returns the argument type of ``--time``, ``--mem`` and ``--partition``: ``8:00:00`` or ``servers=8:00:00``.

    The parsed value is ``(role, key, value)``. The default role is ``pods``.

    Args:
        key: ``time``, ``mem`` or ``partition``.
    """

    def read(text: str) -> tuple[str, str, str | None]:
        role, separator, value = text.rpartition("=")
        role = role if separator else "pods"
        if role not in ROLES:
            raise argparse.ArgumentTypeError(f"{text}: expected a value, or {', '.join(f'{r}=…' for r in ROLES)}")
        if value == "none":
            return role, key, None
        return role, key, value

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
