"""``help VERB`` and ``help variables`` print help. ``completion`` prints a shell completion script."""

from __future__ import annotations

import argparse
import shutil
import textwrap

from megaflow_hpc.cli.output import say
from megaflow_hpc.cli.parser import verbs_of
from megaflow_hpc.cli.verb import Subparsers, add_verb

COMPLETION = """\
Prints a script that makes a shell complete verbs, options, choices and paths. Repeat this after an upgrade.

  bash   megaflow-hpc completion bash > ~/.local/share/bash-completion/completions/megaflow-hpc
  zsh    megaflow-hpc completion zsh > DIR/_megaflow-hpc      # DIR: one of $fpath, before compinit
  tcsh   megaflow-hpc completion tcsh > ~/.megaflow-hpc.csh   # and source it in ~/.tcshrc
"""
DIRECTORIES = ("RUN", "DIR")
"""Metavars of arguments that expect a directory."""
FILES = ("CAMPAIGN", "FILE", "FILE.h5", "FILE.sif", "SIF", "SOURCE", "PATH", "X.jsonl", "BUGS.yaml", "IMAGE")
"""Metavars of arguments that expect a file."""


def register(subparsers: Subparsers) -> None:
    """Registers the verbs ``help`` and ``completion``."""
    help_ = add_verb(
        subparsers,
        "help",
        _help,
        "print the help of the command line or of one verb, or list all variables",
        examples=["help", "help run", "help images build", "help variables"],
        description="Prints the same text as VERB --help. The word variables lists every environment variable that "
        "can be set.",
        json=False,
    )
    help_.add_argument(
        "words", metavar="VERB", nargs="*", help="a verb, possibly followed by a verb of its group; or variables"
    )
    completion = add_verb(
        subparsers,
        "completion",
        _completion,
        "print a script for shell completion",
        examples=["completion bash > ~/.local/share/bash-completion/completions/megaflow-hpc", "completion zsh"],
        description=COMPLETION,
        json=False,
    )
    completion.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh")


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
    """Formats all variables that users may set. Each has its meaning, its default and the parts that read it."""
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


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    _name_paths(arguments.root)
    print(shtab.complete(arguments.root, shell=arguments.shell))
    return 0


def _name_paths(parser: argparse.ArgumentParser) -> None:
    """Marks the arguments that are paths, for completion by ``shtab``."""
    import shtab

    for action in parser._actions:
        if action.metavar in DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    for below in verbs_of(parser).values():
        _name_paths(below)
