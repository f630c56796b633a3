"""``report`` writes a campaign report as a web page, plots, JSON, or metrics for a node exporter. ``compare`` prints
paired differences between runs, policies, agents or roles. ``track`` sends a run's metrics to experiment trackers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import estimate, note, print_json, print_result, say, table
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.verb import above_zero, add_output, add_run, add_verb, zero_or_more
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.texts import number

if TYPE_CHECKING:
    from megaflow_hpc.monitor.usage import JobUse
    from megaflow_hpc.report.comparison import Difference
    from megaflow_hpc.report.figures import LoadedRun, RunFigures
    from megaflow_hpc.report.trackers import Tracker
    from megaflow_hpc.report.tracking import PointLog

DESCRIPTION = """\
Writes a page about one run, or about several compared with the first: index.html, which opens offline, figures.json and
a PNG of each chart. It shows rewards, time, failures, cost, training and transcripts. Works while a campaign runs."""


COMPARE_DESCRIPTION = """\
Compares runs, or the policies, agents and roles within a run, with the first one or with --against. Prints the
difference of the mean reward over the tasks that both sides have rated, with its 95 % interval (paired, Student's t
over tasks), the p-value of a sign-flip test, and wins and losses; then the mean reward of each task, tasks that differ
most first."""

TRACK_DESCRIPTION = """\
Sends training steps, rewards, pass rates, tokens and durations of a run to Weights & Biases, MLflow, Trackio or
TensorBoard, by policy (and by agent if a policy has several). Repeated, it sends only what is new.

Each tracker stores below RUN/track unless --online is given. It then uses its own settings: WANDB_API_KEY,
MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL. Install the tracker's package where megaflow-hpc is.
"""


def register(subparsers: Any) -> None:
    """Registers the verbs ``compare``, ``report`` and ``track``."""
    compare = add_verb(
        subparsers,
        "compare",
        _compare,
        "compare runs, policies, agents or roles, task by task",
        examples=[
            "compare RUN",
            "compare runs/fix-bugs-… runs/fix-bugs-again-…",
            "compare RUN --by agent --against mini-swe-agent --tasks all",
            "compare RUN --json | jq '.comparison[] | {name, against, difference, low, high, p}'",
        ],
        description=COMPARE_DESCRIPTION,
    )
    add_run(compare, "+", file=True)
    compare.add_argument(
        "--by",
        choices=("run", "policy", "agent", "role"),
        help="what to compare; default: all with several values",
    )
    compare.add_argument("--against", metavar="NAME", help="run, policy, agent or role to compare the others with")
    compare.add_argument(
        "--tasks",
        type=_number_or("a number or all", "all"),
        default=20,
        metavar="N|all",
        help="number of tasks to print; default: 20; JSON has all",
    )
    report = add_verb(
        subparsers,
        "report",
        _report,
        "write a page of figures, charts and transcripts of one or several runs",
        examples=[
            "report latest",
            "report runs/fix-bugs-… runs/fix-bugs-again-… -o comparison",
            "report RUN --core-hour 0.02 --gpu-hour 1.80 --currency EUR",
            "report RUN --json | jq '.runs[0].policies[].evaluation'",
            "report RUN --prometheus /var/lib/node_exporter/megaflow.prom",
        ],
        description=DESCRIPTION,
    )
    add_run(report, "+", file=True)
    add_output(report, "directory to write; default: report/ in the (first) run directory")
    report.add_argument(
        "--transcripts",
        type=_number_or("a number, all or none", "all", "none", "some"),
        default="some",
        metavar="N|all|none",
        help="number of transcripts in the page; default: the most interesting ones, at most 1.4 MB",
    )
    report.add_argument("--core-hour", type=zero_or_more, metavar="PRICE", help="price of an hour of one core")
    report.add_argument("--gpu-hour", type=zero_or_more, metavar="PRICE", help="price of an hour of one GPU")
    report.add_argument("--currency", default="", metavar="NAME", help="currency to show with prices")
    report.add_argument("--no-pictures", action="store_true", help="write no PNGs")
    report.add_argument(
        "--prometheus", metavar="FILE", help="write only metrics, for the node exporter's textfile collector"
    )

    track = add_verb(
        subparsers,
        "track",
        _track,
        "send a run's metrics to wandb, mlflow, trackio or tensorboard",
        examples=[
            "track latest --to tensorboard",
            "track RUN --to wandb,mlflow --follow",
            "track RUN --to wandb --online --project my-project",
        ],
        description=TRACK_DESCRIPTION,
    )
    add_run(track)
    track.add_argument(
        "--to", required=True, metavar="T[,T…]", help="wandb, mlflow, trackio, tensorboard; separated by commas"
    )
    track.add_argument("--follow", action="store_true", help="send what is new until the campaign ends")
    track.add_argument(
        "--poll", type=above_zero, default=30.0, metavar="SECONDS", help="time between looks with --follow (30)"
    )
    track.add_argument("--online", action="store_true", help="send to the tracker's server instead of to files")
    track.add_argument("--project", metavar="NAME", help="project or experiment in the tracker (the campaign's name)")
    add_output(track, "directory of points and local trackers (RUN/track)", metavar="DIR")


def _number_or(expected: str, *words: str) -> Callable[[str], int | str]:
    """Returns an argument type for whole numbers and some words."""

    def read(text: str) -> int | str:
        if text not in words and not text.isdigit():
            raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
        return text if text in words else int(text)

    return read


def _report(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.report import files
    from megaflow_hpc.report.comparison import compare
    from megaflow_hpc.report.cost import Prices
    from megaflow_hpc.report.figures import LoadedRun, to_builtins

    paths = _paths(arguments)
    if not arguments.prometheus:
        files.check_installed()
    prices = Prices(core_hour=arguments.core_hour, gpu_hour=arguments.gpu_hour, currency=arguments.currency)
    with ExitStack() as stack, PlanProgress() as watch:
        runs: list[LoadedRun] = []
        for path in paths:
            watch.step(f"report: reading {path}")
            runs.append(stack.enter_context(LoadedRun(path, _job_uses(path), prices)))
        figures = [run.figures for run in runs]
        differences = compare(figures)
        if arguments.prometheus:
            written = [files.write_metrics(Path(arguments.prometheus), figures)]
        else:
            folder = Path(arguments.output) if arguments.output else files.default_folder(paths[0])
            written = files.write_report(
                folder, runs, differences, arguments.transcripts, not arguments.no_pictures, watch.step
            )
    compared = files.comparison_json(figures, differences)
    result = {"runs": to_builtins(figures), **compared, "files": list(map(str, written))}
    print_result(arguments.json, result, f"{_summary(figures)}\nreport: {written[-1]}")
    return 0


def _paths(arguments: argparse.Namespace) -> list[Path]:
    paths = [Path(path) for path in arguments.run_dir]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"{arguments.verb}: a run is named twice; name each run once")
    return paths


def _compare(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.report.comparison import compare, matrix_of
    from megaflow_hpc.report.figures import figures_of
    from megaflow_hpc.report.files import comparison_json

    runs = [figures_of(path) for path in _paths(arguments)]
    differences = compare(runs, arguments.by, arguments.against)
    if arguments.json:
        print_json(comparison_json(runs, differences))
        return 0
    if differences:
        say(table(_HEAD, map(_difference_row, differences)))
    else:
        say("nothing to compare: one run with one policy, agent and role; name a second run")
    matrix = matrix_of(runs)
    if len(matrix.arms) > 1 and arguments.tasks != 0:
        shown = slice(None if arguments.tasks == "all" else arguments.tasks)
        means = [["-" if mean is None else f"{mean:.3f}" for mean in row] for row in matrix.means[shown]]
        say()
        heads = matrix.arms
        if sum(map(len, heads)) > MAX_HEAD_CHARS:
            heads = [f"({place})" for place in range(1, len(heads) + 1)]
            say("\n".join(f"{head} {arm}" for head, arm in zip(heads, matrix.arms, strict=True)))
        say(table(("task", *heads), ([task, *row] for task, row in zip(matrix.tasks[shown], means, strict=True))))
        if len(matrix.tasks) > len(means):
            say(f"{len(matrix.tasks) - len(means)} more tasks, which differ less (--tasks all)")
    return 0


MAX_HEAD_CHARS = 60
"""Maximum total length of a matrix's column headings. Longer headings are replaced by numbers, which a list above the
matrix explains."""
_HEAD = ("by", "name", "against", "tasks", "mean", "its mean", "difference", "p", "better", "worse")


def _difference_row(one: Difference) -> tuple[Any, ...]:
    front = (one.axis, one.label, one.against, one.tasks)
    if one.difference is None:
        return (*front, "-", "-", "-", "-", 0, 0)
    interval = f"{one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
    return (*front, f"{one.mean:.3f}", f"{one.against_mean:.3f}", interval, f"{one.p:.3f}", one.better, one.worse)


def _job_uses(path: Path) -> Sequence[JobUse]:
    """Returns the Slurm accounting data of a run's jobs. Empty if unavailable."""
    if not path.is_dir():
        return ()
    from megaflow_hpc.campaign.facade import Run

    try:
        return Run(path).job_uses()
    except (ConfigError, SiteError) as error:
        note(f"report: without Slurm's accounting: {error}")
        return ()


def _summary(figures: Sequence[RunFigures]) -> str:
    rows = []
    for run in figures:
        core_hours = number(run.cost.core_hours) if run.cost.source != "none" else "-"
        for policy in run.policies:
            passed = reward = "-"
            if evaluation := policy.evaluation:
                passed = f"{evaluation['passed']} of {evaluation['samples']}"
                reward = estimate(evaluation["mean"], evaluation["low"], evaluation["high"])
            median = f"{policy.seconds.p50:.1f}"
            rows.append((run.run, policy.policy, policy.rollouts, passed, reward, median, core_hours))
    head = ("run", "policy", "rollouts", "passed", "mean reward", "median s", "core-hours of the run")
    return table(head, rows)


def _track(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.report import trackers
    from megaflow_hpc.report.tracking import open_points
    from megaflow_hpc.rundir.layout import RunDir

    names = list(dict.fromkeys(name.strip() for name in arguments.to.split(",") if name.strip()))
    unknown = [name for name in names or [arguments.to] if name not in trackers.PACKAGES]
    if unknown:
        raise ConfigError(f"--to {unknown[0]}: expected {', '.join(trackers.PACKAGES)}, separated by commas")
    run = RunDir(Path(arguments.run_dir))
    folder = Path(arguments.output) if arguments.output else run.path / "track"
    with open_points(run, folder) as points:
        project = arguments.project or points.record.name or "megaflow-hpc"
        made = {name: trackers.make(name, points, project, arguments.online) for name in names}
        sent = dict.fromkeys(names, 0)
        try:
            _send(points, made, sent, arguments.follow, arguments.poll)
        finally:
            for name, tracker in made.items():
                with trackers.reported(name, points):
                    tracker.close(points.is_over)
        stored = {name: {"place": tracker.place, "sent": sent[name]} for name, tracker in made.items()}
        count = points.position.points
        lines = [f"{name}: {entry['sent']} new of {count} points in {entry['place']}" for name, entry in stored.items()]
        found = {"points": count, "file": str(points.path), "trackers": stored}
        print_result(arguments.json, found, "\n".join(lines))
    return 0


def _send(points: PointLog, made: dict[str, Tracker], sent: dict[str, int], follow: bool, poll_s: float) -> None:
    """Sends new points to all trackers. With ``follow``, continues until the campaign is over and all points are
    sent."""
    from megaflow_hpc.report.trackers import reported

    last_failure = ""
    while True:
        over = points.is_over
        try:
            new = points.collect(final=over)
        except OSError as error:
            if not follow:
                raise
            note(f"track: {points.run.path} does not answer ({error.strerror}); trying again")
            time.sleep(poll_s)
            continue
        failure: SiteError | None = None
        for name, tracker in made.items():
            try:
                with reported(name, points):
                    sent[name] += tracker.send(points)
            except SiteError as error:
                failure = error
                if follow and not over and str(error) != last_failure:
                    note(f"track: {error}")
                last_failure = str(error)
        if not follow or (over and not new):
            if failure:
                raise failure
            return
        time.sleep(poll_s)
