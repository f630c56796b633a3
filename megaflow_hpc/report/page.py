"""Makes the page: one HTML file that a browser shows without a network.

Texts of tasks, agents and models are hostile. The template escapes them in the markup. The data of charts, rollouts
and transcripts are stored as gzip in base64, which cannot contain markup, and the page's script inserts them as text.
The Content-Security-Policy of the page allows only the two scripts whose digests it names, and no requests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from megaflow_hpc.report.charts.specs import Chart, theme
from megaflow_hpc.report.comparison import Difference, labels_of
from megaflow_hpc.report.figures import LoadedRun
from megaflow_hpc.report.series import significant
from megaflow_hpc.report.transcripts import Wanted, chosen, transcripts
from megaflow_hpc.texts import printable
from megaflow_hpc.version import __version__

ROWS = 20_000
"""Rollouts in the list of transcripts."""
CHUNK = 400_000
"""Characters of transcripts that the page unpacks together."""
TASKS, PODS = 1000, 200
"""Rows of these tables."""


def page(
    runs: Sequence[LoadedRun], charts: Sequence[Chart], differences: Sequence[Difference], wanted: Wanted = "some"
) -> str:
    """Returns the page about some runs.

    Args:
        wanted: the transcripts in it.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def plain(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=PackageLoader("megaflow_hpc.report", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=plain,
    )
    environment.filters |= {"utc": _utc, "duration": duration}
    figures = [run.figures for run in runs]
    labels = labels_of(figures)
    library, script = _library(), _own("page.js")
    rows, chunks, told = _browser(runs, labels, wanted)
    payloads = [
        (
            "charts",
            {"charts": [chart.spec for chart in charts], "themes": {"dark": theme(True), "light": theme(False)}},
        ),
        ("rollouts", rows),
        *((f"transcripts-{number}", chunk) for number, chunk in enumerate(chunks)),
    ]
    return environment.get_template("page.html.j2").render(
        title=f"{labels[0]}: report" if len(runs) == 1 else " and ".join(labels),
        policy=_policy(library, script),
        css=Markup(_own("page.css")),
        runs=list(zip(labels, figures, strict=True)),
        differences=differences,
        charts=charts,
        tasks_shown=TASKS,
        pods_shown=PODS,
        browsable=told,
        made_at=time.time(),
        version=__version__,
        payloads=[(name, packed(data)) for name, data in payloads],
        library=Markup(library),
        script=Markup(script),
    )


def packed(value: Any) -> str:
    """Returns a value as JSON, gzip and base64: only letters, digits, ``+``, ``/`` and ``=``.

    Raises:
        ValueError: it contains NaN or an infinity, which JSON lacks.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def duration(seconds: float) -> str:
    """Returns a number of seconds as ``12.3 s``, ``4:05 min`` or ``1:02:03 h``."""
    if abs(seconds) < 60:
        return f"{seconds:.1f} s"
    sign, whole = "-" if seconds < 0 else "", round(abs(seconds))
    hours, rest = divmod(whole, 3600)
    minutes = f"{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
    return f"{sign}{hours}:{minutes} h" if hours else f"{sign}{minutes} min"


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "–"


def _own(name: str) -> str:
    return resources.files("megaflow_hpc.report").joinpath("web", name).read_text(encoding="utf-8")


def _library() -> str:
    """Returns Vega, Vega-Lite and vega-embed as one script, from vl-convert."""
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _known(value: float, digits: int) -> float | None:
    return round(float(value), digits) if np.isfinite(value) else None


def _browser(
    runs: Sequence[LoadedRun], labels: Sequence[str], wanted: Wanted
) -> tuple[dict[str, Any], list[list[Any]], str]:
    """Returns the columns of the list of rollouts, the chunks of transcripts, and a sentence about those left out."""
    names: dict[str, dict[str, int]] = {key: {} for key in ("policies", "statuses", "kinds", "nodes")}
    columns = (
        "run",
        "id",
        "policy",
        "status",
        "kind",
        "node",
        "reward",
        "seconds",
        "turns",
        "tokens",
        "attempts",
        "cpu",
        "memory",
        "place",
    )
    found: dict[str, Any] = {name: [] for name in columns}
    error: dict[str, str] = {}
    chunks: list[list[Any]] = []
    size, stored = CHUNK, 0
    for number, run in enumerate(runs):
        rows = run.rollouts
        stored += len(rows)
        texts = transcripts(run.store, rows, wanted, len(runs))
        shown = {row for row, _ in zip(chosen(rows), range(ROWS // len(runs)), strict=False)} | texts.keys()
        seconds = rows.seconds
        for row in sorted(shown):
            place = None
            if row in texts:
                if size >= CHUNK:
                    chunks.append([])
                    size = 0
                place = (len(chunks) - 1, len(chunks[-1]))
                chunks[-1].append(texts[row])
                size += sum(len(text) for message in texts[row] for text in message.values())
            if rows.error[row]:
                error[str(len(found["id"]))] = rows.error[row]
            reward = rows.reward[row]
            values = (
                number,
                rows.ids[row],
                names["policies"].setdefault(rows.policy.of(row), len(names["policies"])),
                names["statuses"].setdefault(rows.status.of(row), len(names["statuses"])),
                names["kinds"].setdefault(rows.error_kind.of(row), len(names["kinds"])),
                names["nodes"].setdefault(rows.node.of(row), len(names["nodes"])),
                significant(float(reward)) if np.isfinite(reward) else None,
                round(float(seconds[row]), 2),
                int(rows.turns[row]),
                int(rows.tokens[row]),
                int(rows.attempts[row]),
                _known(rows.cpu_s[row], 1),
                _known(rows.memory_peak_mb[row], 0),
                place,
            )
            for name, value in zip(columns, values, strict=True):
                found[name].append(value)
    carried = sum(place is not None for place in found["place"])
    told = f"{carried} of {stored} transcripts are in this page"
    told += f", and {len(found['id'])} of the rollouts in its list" if len(found["id"]) < stored else ""
    told += ": failures, the best and worst, the longest and slowest first." if 0 < carried < stored else "."
    return (
        {**found, **{key: list(known) for key, known in names.items()}, "error": error, "runs": list(labels)},
        chunks,
        told,
    )
