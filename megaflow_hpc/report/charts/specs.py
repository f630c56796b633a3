"""What charts are built of: colours, the two themes, and the pieces of a Vega-Lite specification.

A specification holds its data and no colours: those are of :data:`PALETTE`, which people with any colour vision can
tell apart (Okabe and Ito 2008), and of the themes. Texts of tasks and agents stand in the data alone, where Vega takes
them for nothing but text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.policies import STAGES
from megaflow_hpc.report.rollouts import PHASES

Spec = dict[str, Any]
Named = Sequence[tuple[str, RunFigures]]
"""Runs, and what each is called in charts."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#8A8A8A")
ON_DARK = ("#56B4E9", "#E69F00", "#2CC295", "#E08FC0", "#8FA8FF", "#FF8A4C", "#D9CB3A", "#B0B0B0")
"""The same order of hues, light enough for a dark page."""
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
    """One chart."""

    name: str
    """Of its PNG and of its place in the page."""
    title: str
    note: str
    """What it shows, in a sentence."""
    spec: Spec
    wide: bool = False


def theme(dark: bool) -> Spec:
    """Returns Vega's ``config`` of one of the two themes."""
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


def spec_of(values: Sequence[dict[str, Any]], **more: Any) -> Spec:
    """Returns a specification over rows of data, as wide as its place."""
    return {"$schema": SCHEMA, "data": {"values": list(values)}, "width": "container", "height": 240, **more}


def height_of(values: Sequence[dict[str, Any]], field: str, each: int) -> int:
    """Returns the pixels of a chart with a row of ``each`` for every name in a field."""
    return each * len({value[field] for value in values})


def channel(field: str, kind: str = "Q", title: str | None = "", **more: Any) -> Spec:
    """Returns a channel: a field, its kind (Q a quantity, N a name, O in order) and its title, ``None`` for none."""
    kinds = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}
    return {"field": field, "type": kinds[kind], **({"title": title} if title != "" else {}), **more}


def series_name(label: str, policy: str, runs: Named) -> str:
    """Returns the name of a policy of a run, as short as it can be told from others."""
    return policy if len(runs) == 1 else f"{label}: {policy}"


def by_series(title: str | None = None) -> Spec:
    """Returns the channel that tells policies and runs apart."""
    return channel("series", "N", title)
