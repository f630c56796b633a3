"""Writes the files of a report: ``index.html``, ``figures.json`` and a PNG of each chart; or one file of metrics.

Each file is published by a rename, the page last. A second report replaces the files that it writes and leaves all
others, including PNGs of charts that it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import to_json, without_links, write_atomic
from megaflow_hpc.report import prometheus
from megaflow_hpc.report.charts.every import charts_of
from megaflow_hpc.report.charts.pictures import pictures
from megaflow_hpc.report.comparison import Difference
from megaflow_hpc.report.figures import LoadedRun, RunFigures, to_builtins
from megaflow_hpc.report.page import page
from megaflow_hpc.report.timeline import bars_of
from megaflow_hpc.report.transcripts import Wanted
from megaflow_hpc.rundir.layout import RunDir

Say = Callable[[str], object]


def default_folder(path: Path) -> Path:
    """Returns the folder for the report on a run directory or a file."""
    return RunDir(path).report if path.is_dir() else path.absolute().parent / "report"


def write_report(
    folder: Path,
    runs: Sequence[LoadedRun],
    differences: Sequence[Difference],
    wanted: Wanted = "some",
    with_pictures: bool = True,
    say: Say = lambda said: None,
) -> list[Path]:
    """Writes a report and returns its files, the page last.

    Args:
        wanted: the transcripts in the page.
        say: gets lines of progress.

    Raises:
        ConfigError: the folder cannot be written.
    """
    bars = [bars_of(run.rollouts, run.events, run.threshold) for run in runs]
    figures = [run.figures for run in runs]
    charts = charts_of(figures, bars, differences)
    written: list[Path] = []

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with without_links(folder) as place:

            def put(name: str, data: bytes | str) -> None:
                write_atomic(place / name, data)
                written.append(folder / name)

            told = {"runs": to_builtins(figures), "comparison": to_builtins(differences)}
            put("figures.json", to_json(told))
            for name, data in pictures(charts) if with_pictures else ():
                say(f"report: {name}")
                put(name, data)
            say("report: index.html")
            put("index.html", page(runs, charts, differences, wanted))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); name another directory with -o") from None
    return written


def write_metrics(path: Path, figures: Sequence[RunFigures]) -> Path:
    """Writes a file of metrics that every user may read, because the node exporter runs as another user.

    Raises:
        ConfigError: it cannot be written.
    """
    if path.suffix != ".prom":
        raise ConfigError(f"{path}: the node exporter reads files that end in .prom; name it so")
    try:
        write_atomic(path, prometheus.text(figures), mode=0o644)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    return path
