"""``help VERB`` prints the same text as ``VERB --help``. ``help variables`` describes environment variables."""

from __future__ import annotations

import argparse
import shutil
import textwrap

from megaflow_hpc.cli.output import say
from megaflow_hpc.cli.parser import verbs_of
from megaflow_hpc.cli.verb import Subparsers, add_verb


def register(subparsers: Subparsers) -> None:
    """Adds ``help``."""
    parser = add_verb(
        subparsers,
        "help",
        _help,
        "print the help of the command line or of one verb, or list all variables",
        examples=["help", "help run", "help images build", "help variables"],
        description="Prints the same text as VERB --help. The word variables lists every environment variable that "
        "can be set.",
        json=False,
    )
    parser.add_argument(
        "words", metavar="VERB", nargs="*", help="a verb, possibly followed by a verb of its group; or variables"
    )


def _help(arguments: argparse.Namespace) -> int:
    if arguments.words == ["variables"]:
        say(variables(shutil.get_terminal_size().columns))
        return 0
    parser: argparse.ArgumentParser = arguments.root
    for word in arguments.words:
        verbs = verbs_of(parser)
        if not verbs:
            parser.error(f"{word}: one argument too many")
        if word not in verbs:
            parser.parse_args([word])  # fails with an error that suggests similar verbs
        parser = verbs[word]
    parser.print_help()
    return 0


def variables(width: int) -> str:
    """Formats all user-settable variables with their meaning, default and readers."""
    from megaflow_hpc.config.variables import PREFIX, VARIABLES

    lines = []
    for title, rows in VARIABLES.items():
        lines += [f"{title}:", ""]
        for variable in rows:
            text = f"{variable.meaning}. Default: {variable.default}. Read by: {variable.reader}."
            wrapped = textwrap.wrap(text, max(40, width - 6), break_on_hyphens=False)
            lines += [f"  {PREFIX}{variable.name}", *(f"      {line}" for line in wrapped)]
        lines.append("")
    return "\n".join(lines[:-1])
