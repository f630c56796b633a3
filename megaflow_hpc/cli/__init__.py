"""The command line ``megaflow-hpc``: one module per group of verbs, each with ``register(subparsers)``.

Words of the command line come in; what a verb found goes to stdout, as JSON alone under ``--json``, and what a person
should know to stderr. Verbs call the other rooms and compute nothing themselves; only ``__main__``, the console script
and tests call :func:`main`. Exit status: 0 every rollout was carried out, whatever its reward;
1 some could not be; 2 a bad file or argument; 3 the site refused; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from megaflow_hpc.cli.output import LogFormatter, note
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.version import __version__

GROUPS = (
    "campaigns.campaign",
    "runs.listing",
    "runs.status",
    "runs.watch",
    "doctor",
    "runs.logs",
    "runs.show",
    "runs.diff",
    "files.export",
    "files.store",
    "making.tasks",
    "making.images",
    "runs.weights",
    "janitor",
    "bench",
)

EPILOG = """\
first steps:
  megaflow-hpc doctor                     what this site has and lacks
  megaflow-hpc run campaign.yaml          submit, follow, gather, summarise
  megaflow-hpc status RUN                 how far it is

exit status: 0 every rollout was carried out, 1 some could not be, 2 bad file or argument, 3 the site refused,
130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; ``run`` of its result is the function that carries out the verb."""
    parser = argparse.ArgumentParser(
        prog="megaflow-hpc",
        description="LLM agent rollouts at scale on Slurm: model servers, sandboxes and MPI pods from one YAML file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megaflow-hpc {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for group in GROUPS:
        importlib.import_module(f"megaflow_hpc.cli.{group}").register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit status; wrong words end the process with status 2, as argparse does."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter())
    try:
        return int(arguments.run(arguments) or 0)
    except MegaflowError as error:
        if arguments.debug:
            raise
        note(f"megaflow-hpc: {error}")
        return error.exit_status
    except BrokenPipeError:  # the reader of our output left; nothing to complain about
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if arguments.debug:
            raise
        said = f"{error.filename}: {error.strerror}; correct the path or its permissions" if error.filename else error
        note(f"megaflow-hpc: {said}")
        return ConfigError.exit_status
    except KeyboardInterrupt:
        note("megaflow-hpc: interrupted")
        return 130
