"""Writes the files of a report: ``index.html``, ``figures.json`` and a PNG per chart, or a single metrics file.

Publishes each file by rename, with the page last. A later report replaces only the files that it writes, and leaves
all other files alone, including PNGs of charts that it lacks.

vl-convert renders the PNGs with an embedded engine, without a browser or network access.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import to_json, without_links, write_atomic
from megaflow_hpc.report import prometheus
from megaflow_hpc.report.charts import Chart, charts_of, theme
from megaflow_hpc.report.comparison import Difference, matrix_of
from megaflow_hpc.report.figures import LoadedRun, RunFigures, to_builtins
from megaflow_hpc.report.page import page
from megaflow_hpc.report.timeline import bars_of
from megaflow_hpc.report.transcripts import Wanted
from megaflow_hpc.rundir.layout import RunDir

PICTURE_WIDTH = 720
"""Width in pixels of a chart that fills its container. The PNG has twice as many pixels."""

Say = Callable[[str], object]


def default_folder(path: Path) -> Path:
    """Returns the default report directory for a run directory or a trajectory file."""
    return RunDir(path).report if path.is_dir() else path.absolute().parent / "report"


def write_report(
    folder: Path,
    runs: Sequence[LoadedRun],
    differences: Sequence[Difference],
    wanted: Wanted = "some",
    with_pictures: bool = True,
    say: Say = lambda text: None,
) -> list[Path]:
    """Writes a report. Returns the paths of its files, with the page last.

    Args:
        wanted: Transcripts to include in the page.
        say: Called with each line of progress.

    Raises:
        ConfigError: The directory is not writable.
    """
    bars = [bars_of(run.rollouts, run.events, run.threshold) for run in runs]
    figures = [run.figures for run in runs]
    charts = charts_of(figures, bars, differences)
    written: list[Path] = []
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with without_links(folder) as opened:

            def put(name: str, data: bytes | str) -> None:
                write_atomic(opened / name, data)
                written.append(folder / name)

            put("figures.json", to_json({"runs": to_builtins(figures), **comparison_json(figures, differences)}))
            if with_pictures:
                for name, data in pictures(charts):
                    say(f"report: {name}")
                    put(name, data)
            say("report: index.html")
            put("index.html", page(runs, charts, differences, wanted))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); name another directory with -o") from None
    return written


def comparison_json(figures: Sequence[RunFigures], differences: Sequence[Difference]) -> dict[str, Any]:
    """Returns the JSON of a comparison: ``comparison``, and the ``matrix`` of tasks and arms."""
    return {"comparison": to_builtins(differences), "matrix": to_builtins(matrix_of(figures))}


def write_metrics(path: Path, figures: Sequence[RunFigures]) -> Path:
    """Writes a metrics file. It is world-readable, because the node exporter runs as another user.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path.suffix != ".prom":
        raise ConfigError(f"{path}: the node exporter reads files that end in .prom; name it so")
    try:
        write_atomic(path, prometheus.text(figures), mode=0o644)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def check_installed() -> None:
    """Imports the libraries that a report needs, so that a missing one is reported before any run is read.

    Raises:
        ModuleNotFoundError: A library is not installed.
    """
    import jinja2  # noqa: F401
    import vl_convert  # noqa: F401


def pictures(charts: Sequence[Chart]) -> Iterator[tuple[str, bytes]]:
    """Yields (file name, PNG bytes) for each chart, in the light theme."""
    import vl_convert

    for chart in charts:
        spec = {**chart.spec, "config": theme(dark=False), "title": {"text": chart.title}, "padding": 16}
        if spec.get("width") == "container":
            spec["width"] = PICTURE_WIDTH
        yield f"{file_name(chart.name)}.png", vl_convert.vegalite_to_png(spec, scale=2, allowed_base_urls=[])


def file_name(name: str) -> str:
    """Converts a chart's name, which contains the campaign's name, to a safe file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "chart"
