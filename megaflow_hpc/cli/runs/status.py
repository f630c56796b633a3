"""``list``, ``status``, ``watch`` and ``usage``: print the state of runs and their use of resources, once or until a
run ends."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megaflow_hpc.cli.output import (
    FINAL,
    failure_lines,
    note,
    print_json,
    print_result,
    queue_lines,
    say,
    seconds,
    status_line,
    table,
    training_lines,
    unstarted_lines,
)
from megaflow_hpc.cli.progress import under_way
from megaflow_hpc.cli.verb import Subparsers, above_zero, add_run, add_verb, whole
from megaflow_hpc.rundir import runs
from megaflow_hpc.rundir.budget import use_lines
from megaflow_hpc.texts import in_one_line

if TYPE_CHECKING:
    from megaflow_hpc.campaign.run import Run

STATES = ("planned", "queued", "running", "waiting", "serving", "stopped", "cancelled", "finished", "broken", "unknown")

HEAD = ("run", "core-hours", "idle", "GPU-hours", "idle GPU-hours")
LIST = f"""\
Lists the runs here, or under each DIR, newest first, with state, stored and planned rollouts, age and size. Searches
{runs.DEPTH} directories deep and follows links. The size of a large run is omitted; --bytes measures all.

states:
  planned    no job has been submitted
  queued     its jobs wait in Slurm's queue
  running    a pod is running
  serving    an engine pool has registered servers
  waiting    every rollout is stored, and a trainer may add more
  stopped    no pod is left, and rollouts are missing: megaflow-hpc resume
  cancelled  megaflow-hpc cancel ended it
  finished   every rollout is stored
  broken     its files are damaged
  unknown    Slurm does not respond
"""


def register(subparsers: Subparsers) -> None:
    """Registers the verbs ``list``, ``status``, ``watch`` and ``usage``."""
    listing = add_verb(
        subparsers,
        "list",
        _list,
        "list the runs here or under a directory, newest first",
        examples=["list", "list /scratch/$USER --depth 5", "list --state running --json"],
        description=LIST,
    )
    listing.add_argument(
        "directories", metavar="DIR", nargs="*", default=["."], help="directory to search; default: here"
    )
    listing.add_argument("-n", "--newest", metavar="N", type=whole(1), help="only the N newest")
    listing.add_argument("--state", metavar="STATE", choices=STATES, help="only those in this state")
    listing.add_argument(
        "--depth", metavar="N", type=whole(), default=runs.DEPTH, help=f"maximum depth of the search ({runs.DEPTH})"
    )
    listing.add_argument("--bytes", action="store_true", help="measure every run, however long it takes")

    status = add_verb(
        subparsers,
        "status",
        _status,
        "show counts by state, pods, servers, failures by cause",
        examples=["status RUN", "status latest --json", "status RUN --usage"],
        description="Shows counts by state, rate, remaining time, pods (also silent ones), servers and "
        "failures by cause. Queries Slurm once for all jobs.",
    )
    add_run(status)
    status.add_argument("--rollouts", action="store_true", help="list every stored rollout")
    status.add_argument(
        "--usage", action="store_true", help="add core-hours and GPU-hours, in total and idle (seconds in JSON)"
    )

    watch = add_verb(
        subparsers,
        "watch",
        _watch,
        "follow a run live: progress, rollouts, pods, engines, failures",
        description="Shows a run live on a terminal: progress, rollouts (the slowest and the stuck first), pods, "
        "engines and failures. Enter opens a rollout's transcript and log; ? lists the keys; q quits, and the campaign "
        "continues. Into a file or pipe, prints lines until the campaign ends. While open, it submits pods that the "
        "site's limits did not allow before, and releases engine servers on demand.",
        examples=["watch RUN", "watch latest --json", "watch RUN --lines"],
    )
    add_run(watch)
    watch.add_argument("--every", type=above_zero, default=2.0, metavar="S", help="seconds between polls (2)")
    watch.add_argument("--lines", action="store_true", help="print lines on a terminal too")

    usage = add_verb(
        subparsers,
        "usage",
        _usage,
        "show core-hours and GPU-hours of runs, and their sum",
        examples=["usage RUN", "usage runs/*", "usage latest --json"],
        description="Sums what the jobs of each run held, according to Slurm's accounting. A pod is idle while none of "
        "its rollouts runs, an engine server while no rollout runs at all. JSON values are in seconds.",
    )
    add_run(usage, nargs="+")


def _list(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign import overview

    paths: dict[Path, None] = {}
    cut = unreadable = 0
    for directory in arguments.directories:
        search = runs.find(directory, arguments.depth)
        paths |= dict.fromkeys(search.runs)
        cut, unreadable = cut + search.cut, unreadable + len(search.unreadable)
    glances = sorted(overview.glances(paths), key=lambda glance: -glance.planned_at)
    shown = [glance for glance in glances if arguments.state in (None, glance.state)][: arguments.newest]
    overview.measure(shown, None if arguments.bytes else overview.SIZED_ENTRIES)
    if arguments.json:
        print_json([{**asdict(glance), "path": str(glance.path.absolute())} for glance in shown])
    elif shown:
        rows = [
            (
                _short_path(glance.path),
                glance.name,
                glance.state,
                "?" if glance.total is None else f"{glance.done}/{glance.total}",
                _age(time.time() - glance.planned_at),
                "-" if glance.bytes is None else _size(glance.bytes),
            )
            for glance in shown
        ]
        say(table(("run", "campaign", "state", "rollouts", "age", "bytes"), rows))
    else:
        note(f"no run in {', '.join(arguments.directories)} or {arguments.depth} levels below")
    for cause in dict.fromkeys(glance.cause for glance in shown if glance.cause):
        note(cause)
    if cut:
        note("the search stopped because there are too many files; name the directory of your runs")
    if unreadable:
        note(f"{unreadable} directories are unreadable and were skipped")
    return 0


def _short_path(path: Path) -> str:
    """Returns the path relative to the working directory if it is inside, otherwise unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _status(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    with under_way(f"reading {arguments.run_dir}"):
        run = Run(arguments.run_dir)
        if arguments.rollouts:
            run.monitor.list_rollouts()
        status = run.status()
        if arguments.usage:
            status["usage"] = run.usage()
    if arguments.rollouts:
        status["rollout_list"] = [msgspec.to_builtins(event) for _, event in sorted(run.stored_rollouts().items())]
    if arguments.json:
        print_json(status)
    else:
        say(shown(run.config.name, status))
    return 0


def shown(name: str, status: Mapping[str, Any]) -> str:
    """Formats the status of the campaign ``name`` as several lines."""
    counts = status["rollouts"]
    lines = [f"{name}: {status['state']}    {status['run']}"]
    lines.append("  ".join(f"{state} {counts[state]}" for state in ("total", "pending", "running", *FINAL)))
    if status.get("waits_for"):
        lines.append(f"waits for {', '.join(status['waits_for'])} to add rollouts")
    if status["rate_per_s"] and status["eta_s"]:
        lines.append(f"rate {status['rate_per_s']:.2f}/s, about {seconds(status['eta_s'])} to go")
    lines += use_lines(status["models"])
    if spent := status.get("spent"):
        lines.append(
            f"spent {spent['usd']:.2f} of {spent['limit']:g} US dollars (limits.usd), failed attempts included"
        )
    if status["tokens_per_s"]:
        lines.append(f"tokens sampled {status['tokens_per_s']:,.0f}/s")
    for key, words in (("failures", "failures by cause"), ("retries", "retried by cause")):
        if status[key]:
            lines.append(f"{words}: " + ", ".join(f"{kind} {n}" for kind, n in status[key].items()))
    lines += failure_lines(status)
    lines += [in_one_line(warning) for warning in status.get("warnings", ())]
    lines += queue_lines(status)
    lines += training_lines(status)
    lines += unstarted_lines(status)
    silent = [pod for pod in status["pods"] if pod["state"] == "silent"]
    lines += [f"pod {pod['pod']} on {pod['node']} is silent for {pod['silent_s']} s" for pod in silent]
    if "usage" in status:
        cores, idle, gpus, idle_gpus = hours(status["usage"])
        lines.append(f"core-hours {cores}, idle {idle}; GPU-hours {gpus}, idle {idle_gpus}")
    if status["pods"]:
        again = ["starts"] if any(pod.get("starts", 1) > 1 for pod in status["pods"]) else []
        columns = ("pod", "state", "node", "workers", "slots", "running", "stored", *again, "why")
        lines.append(_table(status["pods"], *columns))
    if status["servers"]:
        columns = ("server", "state", "policy", "node", "weight_version", "template", "cause", "log")
        lines.append(_table(status["servers"], *columns))
    if "rollout_list" in status:
        columns = ("id", "status", "reward", "turns", "seconds", "cpu_s", "memory_peak_mb", "kind", "error")
        lines.append(_table(status["rollout_list"], *columns))
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], *columns: str) -> str:
    optional = ("why", "template", "cause", "log")
    columns = tuple(c for c in columns if c not in optional or any(row.get(c) for row in rows))
    return "\n" + table(columns, [[row.get(column) for column in columns] for row in rows])


def _usage(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run
    from megaflow_hpc.monitor.usage import added

    totals = {}
    for run in arguments.run_dir:
        with under_way(f"accounting for {run}"):
            totals[run] = Run(run).usage()
        if not totals[run]["core_seconds"]:
            note(f"{run}: Slurm's accounting has no started job of it; report shows what its pods recorded themselves")
    total = added(totals.values())
    rows = [(Path(run).name, *hours(used)) for run, used in totals.items()]
    text = table(HEAD, [*rows, ("total", *hours(total))] if len(rows) > 1 else rows)
    each = [{"run": str(Path(run).absolute()), **used} for run, used in totals.items()]
    print_result(arguments.json, {"runs": each, "total": total}, text)
    return 0


def hours(usage: Mapping[str, Any]) -> list[str]:
    """Formats core-hours, idle core-hours, GPU-hours and idle GPU-hours."""
    names = ("core_seconds", "idle_core_seconds", "gpu_seconds", "idle_gpu_seconds")
    return [f"{usage[name] / 3600:.2f}" for name in names]


LINE_EVERY_S = 60.0
"""Maximum seconds between two lines, even if nothing has changed."""


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
    before, said_at = None, 0.0
    with run.tended() as tend:
        while True:
            status = run.status()
            tend()
            over, news = run.over(status), noteworthy(status)
            if arguments.json:
                if over or news != before:
                    print_json(status, indent=None)
            elif over or news != before or time.monotonic() - said_at > LINE_EVERY_S:
                said_at = time.monotonic()
                say(f"{time.strftime('%H:%M:%S')} {status_line(run.config.name, status)}")
            before = news
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
