"""Defines chart colours, the two themes, and building blocks of Vega-Lite specifications.

Specifications contain data but no colours. Colours come from the themes and from :data:`PALETTE`, which is safe for
colour-blind readers (Okabe and Ito 2008). Text from tasks and agents appears only in the data, which Vega treats as
plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.policies import STAGES
from megaflow_hpc.report.rollouts import PHASES

Spec = dict[str, Any]
Data = list[dict[str, Any]]
"""Data rows of a chart."""
Named = Sequence[tuple[str, RunFigures]]
"""(label in charts, figures) of each run."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#8A8A8A")
ON_DARK = ("#56B4E9", "#E69F00", "#2CC295", "#E08FC0", "#8FA8FF", "#FF8A4C", "#D9CB3A", "#B0B0B0")
"""The same hues in the same order, lightened for a dark background."""
OUTCOMES = {
    "passed": "#009E73",
    "not passed": "#56B4E9",
    "completed": "#56B4E9",
    "truncated": "#E69F00",
    "failed": "#D55E00",
    "cancelled": "#8A8A8A",
}
PHASE_COLOURS = dict(zip((*PHASES, "other"), ("#E69F00", "#0072B2", "#56B4E9", "#009E73", "#8A8A8A"), strict=True))
STAGE_COLOURS = dict(zip(STAGES, ("#CC79A7", "#8A8A8A", "#E69F00", "#0072B2"), strict=True))
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"


class Chart(msgspec.Struct, kw_only=True):
    """A chart of a report, as a Vega-Lite specification with its texts."""

    name: str
    """Base name of the PNG and element id in the page."""
    title: str
    note: str
    """One-sentence caption."""
    spec: Spec
    wide: bool = False


def theme(dark: bool) -> Spec:
    """Returns Vega's ``config`` for the light or dark theme."""
    text, faint, line = ("#e6e8eb", "#a4acb6", "#39424d") if dark else ("#1f2328", "#59636e", "#e1e5ea")
    axis = {"labelColor": faint, "titleColor": faint, "gridColor": line, "domainColor": line, "tickColor": line}
    return {
        "background": "transparent" if dark else "#ffffff",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {**axis, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11, "labelLimit": 220},
        "legend": {"labelColor": text, "titleColor": faint, "labelFontSize": 11, "orient": "top", "title": None},
        "header": {"labelColor": text, "titleColor": faint, "labelFontSize": 12, "title": None},
        "title": {"color": text, "fontSize": 13, "anchor": "start"},
        "text": {"color": text},
        "range": {"category": list(ON_DARK if dark else PALETTE)},
        "line": {"strokeWidth": 2},
        "point": {"size": 40, "filled": True},
    }


def spec_of(values: Data, **more: Any) -> Spec:
    """Builds a specification over data rows that fills the width of its container."""
    return {"$schema": SCHEMA, "data": {"values": values}, "width": "container", "height": 240, **more}


def height_of(values: Data, field: str, each: int) -> int:
    """Returns the chart height in pixels, with ``each`` pixels per distinct value of a field."""
    return each * len({value[field] for value in values})


def channel(field: str, kind: str = "Q", title: str | None = "", **more: Any) -> Spec:
    """Builds an encoding channel: field, type (Q quantitative, N nominal, O ordinal) and title (``None``: no title)."""
    kinds = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}
    spec: Spec = {"field": field, "type": kinds[kind]}
    if title != "":
        spec["title"] = title
    return spec | more


def tooltip(**fields: str) -> list[Spec]:
    """Builds tooltip channels. Each field maps to ``N`` (a name) or to a number format, which may be empty."""
    channels = []
    for field, kind in fields.items():
        if kind == "N":
            channels.append(channel(field, "N"))
        else:
            channels.append(channel(field, format=kind) if kind else channel(field))
    return channels


def series_name(label: str, policy: str, runs: Named) -> str:
    """Returns the shortest unambiguous label for a policy of a run."""
    return policy if len(runs) == 1 else f"{label}: {policy}"


def by_series(title: str | None = None) -> Spec:
    """Builds the channel that distinguishes policies and runs."""
    return channel("series", "N", title)
