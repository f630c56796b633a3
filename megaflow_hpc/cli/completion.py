"""``completion``: prints a script for shell completion."""

from __future__ import annotations

import argparse

from megaflow_hpc.cli.parser import verbs_of
from megaflow_hpc.cli.verb import Subparsers, add_verb

DESCRIPTION = """\
Prints a script that makes a shell complete verbs, options, choices and paths. Repeat this after an upgrade.

  bash   megaflow-hpc completion bash > ~/.local/share/bash-completion/completions/megaflow-hpc
  zsh    megaflow-hpc completion zsh > DIR/_megaflow-hpc      # DIR: one of $fpath, before compinit
  tcsh   megaflow-hpc completion tcsh > ~/.megaflow-hpc.csh   # and source it in ~/.tcshrc
"""
DIRECTORIES = ("RUN", "DIR")
FILES = ("CAMPAIGN", "FILE", "FILE.h5", "FILE.sif", "SIF", "SOURCE", "PATH", "X.jsonl", "BUGS.yaml", "IMAGE")
"""Metavars of arguments that are paths."""


def register(subparsers: Subparsers) -> None:
    """Adds ``completion``."""
    parser = add_verb(
        subparsers,
        "completion",
        _completion,
        "print a script for shell completion",
        examples=["completion bash > ~/.local/share/bash-completion/completions/megaflow-hpc", "completion zsh"],
        description=DESCRIPTION,
        json=False,
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh")


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    _name_paths(arguments.root)
    print(shtab.complete(arguments.root, shell=arguments.shell))
    return 0


def _name_paths(parser: argparse.ArgumentParser) -> None:
    """Tells ``shtab`` which arguments are paths."""
    import shtab

    for action in parser._actions:
        if action.metavar in DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    for below in verbs_of(parser).values():
        _name_paths(below)
