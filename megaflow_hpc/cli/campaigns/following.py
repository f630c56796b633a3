"""Follows a campaign to its end: shows progress, handles Ctrl-C and prints the summary."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from megaflow_hpc.cli.output import (
    FINAL,
    failure_lines,
    note,
    print_json,
    say,
    stop_lines,
    summary,
    training_lines,
    unstarted_lines,
)
from megaflow_hpc.cli.progress import ProgressLine, under_way
from megaflow_hpc.cli.verb import whole
from megaflow_hpc.errors import MegaflowError, SiteError, file_error
from megaflow_hpc.texts import in_one_line


def start_and_follow(run: Any, arguments: argparse.Namespace, start: Callable[[], bool]) -> int:
    """Starts a run, follows it and prints its summary.

    On Ctrl-C, cancels the jobs, keeps results and prints how to resume.

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
    except BrokenPipeError:  # the reader closed the pipe
        raise
    except OSError as error:  # a full disk, for example
        raise SiteError(f"{file_error(error)}; then continue with: megaflow-hpc resume {run.path}") from error
    except KeyboardInterrupt:
        try:
            if not messages:
                interrupted()
            for what, step in (("cancelling", run.cancel), ("gathering", run.gather)):
                try:
                    with under_way(f"{what} {run.path}"):
                        step()
                except (OSError, MegaflowError) as error:
                    note(file_error(error))
        except KeyboardInterrupt:
            note("stopped at once: nothing was gathered")
        note(f"continue with: megaflow-hpc resume {run.path}")
        return 130
    finally:
        progress.close()
    changed = bool("user" in result["failures"] and run.edits.tasks())
    return _conclude(result, arguments.json, changed)


def _conclude(result: dict[str, Any], as_json: bool, changed: bool) -> int:
    """Prints the result of a run. Returns the exit status.

    Args:
        changed: Whether task files were edited after planning.
    """
    counts = result["rollouts"]
    missing = counts["total"] - sum(counts[state] for state in FINAL)
    if as_json:
        print_json(result)
    else:
        say(summary(result))
        if result["failures"]:
            say("failures: " + ", ".join(f"{kind} {n}" for kind, n in result["failures"].items()))
            say("\n".join(failure_lines(result)))
        if result["errors"]:
            counted = ", ".join(f"{cause['kind']} {cause['count']}" for cause in result["errors"])
            say(f"errors in verified rollouts: {counted}")
            say("\n".join(failure_lines(result, "errors")))
        for server in result["servers"]:
            if server["state"] == "failed":
                log = f"\n  log: {server['log']}" if server.get("log") else ""
                say(f"server {server['server']}: {server.get('cause', 'failed')}{log}")
        for line in [*training_lines(result), *unstarted_lines(result), *map(in_one_line, result["warnings"])]:
            say(line)
        stops = stop_lines(result) if missing else []
        for line in [*stops, *next_step(result, missing, bool(stops), changed)]:
            say(line)
        say(f"results: {result['run']}")
    if missing and result["unstarted"] and not result["pods"]:
        return SiteError.exit_status
    return 1 if missing or counts["failed"] else 0  # rollouts cancelled by the campaign's group rules are not failures


def next_step(result: Mapping[str, Any], missing: int, broken: bool, changed: bool) -> list[str]:
    """Returns lines that tell the user how to continue the run.

    Args:
        missing: Number of rollouts without a stored result.
        broken: Whether pods ended for a reason that the user must correct before continuing.
        changed: Whether rollouts fail until the user accepts edited task files.
    """
    run, counts = result["run"], result["rollouts"]
    lines = []
    if missing:
        lines.append(f"{missing} of {counts['total']} rollouts are missing")
    if set(result["failures"]) == {"agent"}:  # a run keeps the command and the images with which it was planned
        return [*lines, "the agent's program could not be started: correct its command or the image; plan a new run"]
    if missing:
        first = "once that is corrected, " if broken or result["unstarted"] else ""
        return [f"{lines[0]}; {first}continue with: megaflow-hpc resume {run}"]
    if counts["failed"]:
        accept = " --accept-changes" if changed else ""
        lines.append(f"repeat the failed rollouts with: megaflow-hpc resume {run} --failed{accept}")
    return lines


def say_notices(*of: Any) -> None:
    """Prints and clears the pending notices of campaigns and jobs."""
    for each in of:
        for line in each.notices:
            note(line)
        each.notices.clear()


def add_launcher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=("auto", "local", "slurm"),
        default="auto",
        help="where pods and engines run; auto (the default): here if the run has only run here, else on Slurm if it "
        "is available, else here, unless the file has a slurm: section",
    )
    parser.add_argument(
        "--ranks", type=whole(1), default=1, metavar="N", help="with --launcher local: MPI ranks of the pod (1: no MPI)"
    )
