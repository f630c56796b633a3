"""``watch``: follows a run until it ends."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import note, print_json, say, status_line
from megaflow_hpc.cli.verb import above_zero, add_run, add_verb

if TYPE_CHECKING:
    from megaflow_hpc.campaign.run import Run

LINE_EVERY_S = 60.0
"""Maximum seconds between two lines, even if nothing has changed."""


def register(subparsers: Any) -> None:
    """Registers the verb ``watch``."""
    watch = add_verb(
        subparsers,
        "watch",
        _watch,
        "follow a run live: progress, rollouts, pods, engines, failures",
        description="Shows a run live on a terminal: progress and time left, rollouts with the slowest and the stuck "
        "at the top, pods, engines, failures by cause and node. Enter opens a rollout with its growing transcript "
        "and its log; ? lists the keys; q quits, and the campaign continues. Into a file or pipe, prints "
        "lines until the campaign ends. Reads only files, and queries Slurm at most twice a minute. While open, it "
        "submits pods that the site's limits did not allow before, and releases engine servers on demand.",
        examples=["watch RUN", "watch latest --json", "watch RUN --lines"],
    )
    add_run(watch)
    watch.add_argument("--every", type=above_zero, default=2.0, metavar="S", help="seconds between polls (2)")
    watch.add_argument("--lines", action="store_true", help="print lines on a terminal too")


def _watch(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    run = Run(arguments.run_dir)
    if arguments.json or arguments.lines or not _can_draw():
        return _follow(run, arguments)
    from megaflow_hpc.cli.view.app import WatchApp

    # A terminal without UTF-8 must not cause an error.
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.reconfigure(errors="replace")
    app = WatchApp(run, arguments.every)
    # Without mouse reporting, users can select and copy ids. The wheel still scrolls, because it sends arrow keys.
    app.run(mouse=False)
    if app.snapshot is not None:
        say(status_line(run.config.name, app.snapshot.status))
    if not app.over:
        note("the campaign continues")
    return app.return_code or 0


def _can_draw() -> bool:
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return terminal and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def _follow(run: Run, arguments: argparse.Namespace) -> int:
    """Prints a line or a JSON object after every change until the campaign ends."""
    shown, said_at = None, 0.0
    with run.tended() as tend:
        while True:
            status = run.status()
            tend()
            over, news = run.over(status), noteworthy(status)
            if arguments.json:
                if over or news != shown:
                    print_json(status, indent=None)
            elif over or news != shown or time.monotonic() - said_at > LINE_EVERY_S:
                said_at = time.monotonic()
                say(f"{time.strftime('%H:%M:%S')} {status_line(run.config.name, status)}")
            shown = news
            sys.stdout.flush()
            if over:
                return 0
            time.sleep(max(0.1, arguments.every))


def noteworthy(status: Mapping[str, Any]) -> Any:
    """Returns the parts of a status whose changes are worth a new line."""
    return (
        status["state"],
        status["rollouts"],
        [(group["role"], group["reason"]) for group in status["queue"]],
        {policy: state["step"] for policy, state in status.get("training", {}).items()},
    )
