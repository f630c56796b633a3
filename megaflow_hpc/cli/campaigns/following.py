"""Follows a campaign to its end: progress, Ctrl-C and the summary."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megaflow_hpc.cli.output import (
    FINAL,
    failure_lines,
    note,
    print_json,
    say,
    summary,
    training_lines,
    unstarted_lines,
)
from megaflow_hpc.cli.progress import ProgressLine, under_way
from megaflow_hpc.cli.values import whole
from megaflow_hpc.errors import MegaflowError, SiteError
from megaflow_hpc.texts import in_one_line


def start_and_follow(run: Any, arguments: argparse.Namespace, start: Callable[[], bool]) -> int:
    """Starts a run, follows it and prints its summary. Ctrl-C cancels the jobs, keeps results and prints how to resume.

    Args:
        start: Starts the run. Returns whether there is anything to follow.
    """
    progress = ProgressLine(run.config.name)
    messages: list[str] = []

    def interrupted() -> None:
        progress.close()
        what = "cancelling the jobs" if run.local is None else "the local pod stops within a minute"
        messages.append(f"interrupted: {what}; stored results stay (press Ctrl-C again to stop at once)")
        note(messages[-1])

    try:
        with under_way(f"starting {run.config.name}"):
            started = start()
        if not started:
            return 0
        run.follow(progress=progress, interrupted=interrupted)
        progress.close()
        with under_way(f"gathering {run.path}"):
            result = run.conclude()
        progress(result)
    except KeyboardInterrupt:
        try:
            if not messages:
                interrupted()
            for what, step in (("cancelling", run.cancel), ("gathering", run.gather)):
                try:
                    with under_way(f"{what} {run.path}"):
                        step()
                except MegaflowError as error:
                    note(f"{error}")
        except KeyboardInterrupt:
            note("stopped at once: nothing was gathered")
        note(f"continue with: megaflow-hpc resume {run.path}")
        return 130
    finally:
        progress.close()
    return _conclude(result, arguments.json)


def _conclude(result: dict[str, Any], as_json: bool) -> int:
    counts = result["rollouts"]
    missing = counts["total"] - sum(counts[state] for state in FINAL)
    if as_json:
        print_json(result)
    else:
        say(summary(result))
        if result["failures"]:
            say("failures: " + ", ".join(f"{kind} {n}" for kind, n in result["failures"].items()))
            say("\n".join(failure_lines(result)))
        for server in result["servers"]:
            if server["state"] == "failed":
                log = f"\n  log: {server['log']}" if server.get("log") else ""
                say(f"server {server['server']}: {server.get('cause', 'failed')}{log}")
        for line in [*training_lines(result), *unstarted_lines(result), *map(in_one_line, result["warnings"])]:
            say(line)
        if missing:
            say(
                f"{missing} of {counts['total']} rollouts are missing; "
                f"continue with: megaflow-hpc resume {result['run']}"
            )
        elif counts["failed"]:
            say(f"repeat the failed rollouts with: megaflow-hpc resume {result['run']} --failed")
        say(f"results: {result['run']}")
    if missing and result["unstarted"] and not result["pods"]:
        return SiteError.exit_status
    return 1 if missing or counts["failed"] else 0  # rollouts cancelled by the campaign's group rules are not failures


def say_notices(*of: Any) -> None:
    """Prints the pending notices of planning or of starting jobs, and clears them."""
    for each in of:
        for line in each.notices:
            note(line)
        each.notices.clear()


def add_launcher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=("auto", "local", "slurm"),
        default="auto",
        help="where pods and engines run; auto (the default): on Slurm if it is available",
    )
    parser.add_argument(
        "--ranks", type=whole(1), default=1, metavar="N", help="local only: MPI ranks of the pod (1: no MPI)"
    )
