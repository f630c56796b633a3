"""The command line ``megaflow-hpc``. Each group of verbs is a module with a function ``register(subparsers)``.

Results go to stdout, as pure JSON with ``--json``. Notes and errors go to stderr as text, even with ``--json``. A
program detects an error by the exit status and an empty stdout.

Verbs call other subpackages and compute nothing themselves. Only ``__main__``, the console script and tests call
:func:`main`.

Exit status: 0 if every rollout ran, whatever its reward; 1 if some rollouts could not run; 2 for an invalid file or
argument; 3 if the site lacks something or refuses a request; 130 if interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence

from megaflow_hpc.cli import confined
from megaflow_hpc.cli.output import LogFormatter, note
from megaflow_hpc.cli.parser import CommandParser, Parser
from megaflow_hpc.cli.verb import add_json
from megaflow_hpc.errors import ConfigError, MegaflowError, file_error
from megaflow_hpc.resources import __version__, missing_package

GROUPS = {
    "campaigns.start": ("recipes", "init", "check", "plan", "run", "submit"),
    "campaigns.control": ("resume", "extend", "scale", "cancel", "gather"),
    "runs.status": ("list", "status", "watch", "usage"),
    "doctor": ("doctor", "janitor"),
    "prove": ("prove",),
    "runs.logs": ("logs",),
    "runs.report": ("compare", "report", "track"),
    "runs.shell": ("shell",),
    "runs.show": ("show",),
    "runs.reverify": ("reverify",),
    "runs.diff": ("diff",),
    "files.export": ("export", "import"),
    "files.store": ("validate", "compact", "anonymise", "du"),
    "making.tasks": ("tasks",),
    "making.agents": ("agents",),
    "making.images": ("images",),
    "runs.weights": ("weights",),
    "runs.training": ("training",),
    "help": ("completion", "help"),
}
"""Maps each module in this package to the verbs that it adds. The ``help`` module needs the parser of every verb."""
SECTIONS = {
    "start a campaign": ("recipes", "init", "check", "plan", "run", "submit"),
    "inspect it": ("list", "status", "watch", "usage", "show", "diff", "logs", "shell"),
    "continue or end it": ("resume", "extend", "scale", "weights", "training", "cancel"),
    "results": (
        *("gather", "reverify", "report", "compare", "track", "export"),
        *("import", "validate", "compact", "anonymise", "du"),
    ),
    "tasks, agents and images": ("tasks", "agents", "images"),
    "the site and this program": ("doctor", "prove", "janitor", "completion", "help"),
}
"""Maps each section of ``--help`` to its verbs, in display order."""

EPILOG = """\
first steps:
  megaflow-hpc doctor                     check what this site has and lacks
  megaflow-hpc init                       write campaign.yaml for this site
  megaflow-hpc run campaign.yaml          submit, follow, gather, summarise
  megaflow-hpc status RUN                 show its progress

RUN is a run directory, or latest for the newest one here. megaflow-hpc help VERB shows a verb's arguments and examples,
megaflow-hpc help variables the environment variables.

exit status:
  0    every rollout was carried out, whatever its reward
  1    some rollouts could not be carried out
  2    a bad file or argument
  3    the site refused
  130  interrupted
"""


def build_parser(words: Sequence[str] = ()) -> CommandParser:
    """Builds the parser. The attribute ``run`` of parsed arguments is the function that implements the verb.

    Args:
        words: The command line. If it names a verb, only that verb's group is loaded. Loading all groups takes 0.1 s.
    """
    parser = CommandParser(
        SECTIONS,
        prog="megaflow-hpc",
        usage="megaflow-hpc [--json] [--debug] VERB …",
        description="LLM agent rollouts at scale on Slurm: model servers, sandboxes and MPI pods from one YAML file.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"megaflow-hpc {__version__}")
    add_json(parser)
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", prog=parser.prog, parser_class=Parser)
    for group in _groups_of(words):
        importlib.import_module(f"megaflow_hpc.cli.{group}").register(subparsers)
    parser.set_defaults(run=_help, root=parser, json=False, debug=False, no_json=None)
    return parser


def _groups_of(words: Sequence[str]) -> Iterable[str]:
    """Returns the groups to load: only the group of the verb in ``words``, or all groups if there is no verb or it
    belongs to ``help``."""
    verb = next((word for word in words if word not in ("--json", "--debug")), "")
    for group, verbs in GROUPS.items():
        if verb in verbs and group != "help":
            return [group]
    return GROUPS


def _help(arguments: argparse.Namespace) -> int:
    """Prints the help and returns 0, because new users start with the bare command."""
    if arguments.json:
        arguments.root.error("missing: VERB")
    arguments.root.print_help()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb and returns its exit status, which is 2 for invalid arguments."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter())
    try:
        words = sys.argv[1:] if argv is None else argv
        arguments = build_parser(words).parse_args(words)
        if arguments.json and arguments.no_json:
            arguments.no_json.error("--json: this verb prints no JSON")
        status = confined.carry_out(arguments, _carry_out)
    except SystemExit as ended:  # --help, --version or a wrong argument: argparse has printed the message
        status = int(ended.code is not None)
        if isinstance(ended.code, int):
            status = ended.code
    except KeyboardInterrupt:
        note("megaflow-hpc: interrupted")
        status = 130
    return _flushed(status)


def _carry_out(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run(arguments) or 0)
    except ModuleNotFoundError as error:
        lacking = missing_package(error)
        if arguments.debug or lacking is None:
            raise
        note(f"megaflow-hpc: {lacking}")
        return lacking.exit_status
    except BrokenPipeError:  # the reader closed the pipe; that is not an error
        _close_stdout()
        return 0
    except (MegaflowError, OSError) as error:
        if arguments.debug:
            raise
        note(f"megaflow-hpc: {file_error(error)}")
        return getattr(error, "exit_status", ConfigError.exit_status)


def _flushed(status: int) -> int:
    """Flushes stdout and returns the exit status. If Python flushed it at exit, an error would print a traceback."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
    except OSError as error:
        _close_stdout()
        note(f"megaflow-hpc: cannot write to standard output: {error.strerror}")
        return status or ConfigError.exit_status
    return status


def _close_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
