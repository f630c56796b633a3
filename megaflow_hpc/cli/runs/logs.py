"""``logs``: lists the logs of a run, prints the end of a log, or prints all log lines about a rollout."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.runs.show import VERIFIER_LOG, find
from megaflow_hpc.cli.verb import add_run, add_verb, whole
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.rundir import logs
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.types import RolloutName

LINES = 200
"""Default number of lines to print from the end of a log."""
POLL_INTERVAL_S = 0.5
QUIET_S = 5.0
"""After the end of the campaign, a log counts as complete once it has not grown for this many seconds."""


def register(subparsers: Any) -> None:
    """Registers the verb ``logs``."""
    parser = add_verb(
        subparsers,
        "logs",
        _logs,
        "list the logs of a run, print one, or print the log lines of one rollout",
        examples=[
            "logs RUN",
            "logs RUN pod --follow",
            "logs latest fix-humanize/default/0",
            "logs RUN 8123_4 --tail 50",
        ],
        description="Lists the logs of a run with their sizes and last lines. Prints the end of the log of a job, pod "
        "or server. For a rollout's id, prints its events, its lines in pods' logs, and the end of its "
        "verifier's log. Times are UTC. --follow ends with the campaign, or with Ctrl-C.",
    )
    add_run(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="a log, job, pod, server, or a rollout's id")
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    parser.add_argument("--tail", metavar="N", type=whole(), default=LINES, help=f"print the last N lines ({LINES})")
    parser.add_argument("--all", action="store_true", help="print all lines")


def _logs(arguments: argparse.Namespace) -> int:
    run = RunDir(arguments.run_dir)
    planned = read_run(run)
    if arguments.name is None:
        if arguments.follow:
            raise ConfigError("--follow: name the log to follow")
        return _list(run, arguments.json)
    if "/" not in arguments.name:
        return _one(run, arguments)
    name = RolloutName.parse(arguments.name)
    known = name.policy in planned.policies and name.task_id in planned_tasks(run, planned)
    return _rollout(run, arguments, known)


def _list(run: RunDir, as_json: bool) -> int:
    entries = logs.all_logs(run)
    if as_json:
        print_json(
            [
                {"name": log.name, "path": str(log.path), "role": log.role}
                | {"bytes": log.bytes, "changed_at": log.changed_at, "last": log.last}
                for log in entries
            ]
        )
    elif entries:
        last = [(log.name, log.bytes, log.last if len(log.last) < 100 else f"{log.last[:100]} …") for log in entries]
        say(table(("log", "bytes", "last line"), last))
        note(f"print one with: megaflow-hpc logs {run} {entries[0].name}")
    else:
        note("there is no log: no job of this run has started")
    return 0


def _one(run: RunDir, arguments: argparse.Namespace) -> int:
    log = logs.find_log(run, arguments.name)
    end = logs.tail(log.path, arguments.tail)
    if arguments.json and not arguments.follow:
        lines = list(logs.whole(log.path)) if arguments.all else end.lines
        print_json({"log": str(log.path), "lines": lines, "bytes_before": 0 if arguments.all else end.before})
        return 0
    if not log.bytes:
        note(f"{log.path}: the log is still empty")
    growing = logs.GrowingLog(log.path, 0 if arguments.all else end.offset)
    if arguments.all:
        while lines := growing.read():
            _print(lines, arguments.json)
    else:
        if end.before:
            note(f"{end.before} bytes before this are left out (--tail N, --all): {log.path}")
        _print(end.lines, arguments.json)
    if arguments.follow:
        _follow(run, growing.read, arguments.json)
    _print(growing.rest(), arguments.json)
    return 0


def _rollout(run: RunDir, arguments: argparse.Namespace, planned: bool) -> int:
    log = logs.RolloutLog(run, arguments.name)
    lines = log.read()
    verifier = _verifier_log(run, arguments.name, bool(lines) or planned)
    if log.skipped:
        note(f"{log.skipped} bytes of older logs were not searched: {run.logs}")
    if arguments.json and not arguments.follow:
        print_json({"rollout": arguments.name, "lines": lines, "verifier_log": verifier})
        return 0
    shown = lines if arguments.all else lines[max(0, len(lines) - arguments.tail) :]
    if len(shown) < len(lines):
        note(f"{len(lines) - len(shown)} lines before this are left out (--tail N, --all)")
    _print(shown, arguments.json)
    if not lines and verifier is None:
        note(f"{arguments.name}: nothing is logged about it yet")
    if arguments.follow and not log.ended:
        _follow(run, log.read, arguments.json, lambda: log.ended)
        verifier = _verifier_log(run, arguments.name, True)
    if verifier and not arguments.json:
        end = verifier.splitlines()
        say(f"{VERIFIER_LOG}:")
        _print(end if arguments.all else end[max(0, len(end) - arguments.tail) :], False)
    return 0


def _verifier_log(run: RunDir, rollout: str, exists: bool) -> str | None:
    """Returns the verifier log of a stored rollout. ``None`` if it has no log.

    Args:
        exists: Whether the rollout exists. If so, also returns ``None`` if it is not stored yet.

    Raises:
        ConfigError: There is no such rollout.
    """
    from megaflow_hpc.trajectories import open_trajectories

    with open_trajectories(run.path) as store:
        if exists and rollout not in store:
            return None
        row = find(store, rollout)
        outputs = [artifact.data for artifact in row.artifacts if artifact.name == VERIFIER_LOG]
    return outputs[-1].decode("utf-8", "surrogateescape") if outputs else None


def _print(lines: Iterable[str], as_json: bool) -> None:
    for line in lines:
        if as_json:
            print_json({"line": line}, indent=None)
        else:
            say(line)


def _follow(
    run: RunDir, read: Callable[[], list[str]], as_json: bool, ended: Callable[[], bool] = lambda: False
) -> None:
    """Prints new lines from ``read`` until the campaign has ended and the log is complete.

    Args:
        ended: Returns whether to stop before that.
    """
    marks, said_at = Marks(run), time.monotonic()
    while True:
        if lines := read():
            said_at = time.monotonic()
            _print(lines, as_json)
            sys.stdout.flush()
            continue
        if ended() or (marks.over and time.monotonic() - said_at > QUIET_S):
            return
        time.sleep(POLL_INTERVAL_S)
