"""Charts as PNG without a browser: vl-convert runs Vega in its own engine, without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from megaflow_hpc.report.charts.specs import Chart, theme

WIDTH = 720
"""Width in pixels of a chart that fills its place. PNGs have twice as many."""


def check_installed() -> None:
    """Imports the drawing library before anything is read.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    import jinja2  # noqa: F401
    import vl_convert  # noqa: F401


def pictures(charts: Sequence[Chart]) -> Iterator[tuple[str, bytes]]:
    """Yields the file name and the bytes of each chart's PNG, in the light theme."""
    import vl_convert

    for chart in charts:
        spec = {**chart.spec, "config": theme(dark=False), "title": {"text": chart.title}, "padding": 16}
        if spec.get("width") == "container":
            spec["width"] = WIDTH
        yield f"{file_name(chart.name)}.png", vl_convert.vegalite_to_png(spec, scale=2, allowed_base_urls=[])


def file_name(name: str) -> str:
    """Returns a safe file name; the name of a campaign may contain anything."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "chart"
