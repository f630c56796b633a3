"""``help``: what ``--help`` prints, for who writes the words the other way round."""

from __future__ import annotations

import argparse

from megaflow_hpc.cli.parser import verbs_of
from megaflow_hpc.cli.verb import Subparsers, add_verb


def register(subparsers: Subparsers) -> None:
    """Adds ``help``."""
    parser = add_verb(
        subparsers,
        "help",
        _help,
        "print the help of the command line or of one verb",
        examples=["help", "help run", "help images build"],
        json=False,
    )
    parser.add_argument("words", metavar="VERB", nargs="*", help="a verb, and the verb of its own that it may have")


def _help(arguments: argparse.Namespace) -> int:
    parser: argparse.ArgumentParser = arguments.root
    for word in arguments.words:
        verbs = verbs_of(parser)
        if not verbs:
            parser.error(f"{word}: one argument too many")
        if word not in verbs:
            parser.parse_args([word])  # says that there is none, and which is spelled alike
        parser = verbs[word]
    parser.print_help()
    return 0
