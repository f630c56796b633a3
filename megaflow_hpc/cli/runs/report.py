"""``report``: writes a campaign report as a web page, plots, JSON, or metrics for a node exporter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import estimate, note, print_json, say, table
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.cli.verb import add_output, add_run, add_verb, zero_or_more
from megaflow_hpc.errors import ConfigError, SiteError

if TYPE_CHECKING:
    from megaflow_hpc.monitor.usage import JobUse
    from megaflow_hpc.report.figures import LoadedRun, RunFigures

DESCRIPTION = """\
Writes a page about one run, or about several compared with the first. It opens offline and shows rewards and pass@k
with their intervals, timeline, concurrency, time per phase, tokens, failures, stragglers, cost, efficiency as in seff,
training, and transcripts. Writes index.html, figures.json and a PNG of each chart. Works while a campaign runs. Queries
Slurm's accounting if there is one, and changes nothing else."""


def register(subparsers: Any) -> None:
    """Registers the verb ``report``."""
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
        type=_wanted,
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


def _wanted(text: str) -> int | str:
    if text in ("all", "none", "some"):
        return text
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected a number, all or none")
    return int(text)


def _report(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.report import files
    from megaflow_hpc.report.comparison import compare
    from megaflow_hpc.report.cost import Prices
    from megaflow_hpc.report.figures import LoadedRun, to_builtins

    paths = [Path(path) for path in arguments.run_dir]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("report: a run is named twice; name each run once")
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
    if arguments.json:
        compared = to_builtins(differences)
        print_json({"runs": to_builtins(figures), "comparison": compared, "files": list(map(str, written))})
    else:
        say(_summary(figures))
        say(f"report: {written[-1]}")
    return 0


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
        core_hours = f"{run.cost.core_hours:.4g}" if run.cost.source != "none" else "-"
        for policy in run.policies:
            passed = reward = "-"
            if evaluation := policy.evaluation:
                passed = f"{evaluation['passed']} of {evaluation['samples']}"
                reward = estimate(evaluation["mean"], evaluation["low"], evaluation["high"])
            median = f"{policy.seconds.p50:.1f}"
            rows.append((run.run, policy.policy, policy.rollouts, passed, reward, median, core_hours))
    head = ("run", "policy", "rollouts", "passed", "mean reward", "median s", "core-hours of the run")
    return table(head, rows)
