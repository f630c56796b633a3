"""Renders a report as a single HTML file that works offline.

Text from tasks, agents and models is untrusted. The template escapes it in markup. Data of charts, rollouts and
transcripts is gzipped and base64-encoded, so it cannot contain markup, and the page's script inserts it as text. Images
are ``data:`` URLs of one of the four supported types, which the script sets as the source of an image element.

The page's Content-Security-Policy allows only the two scripts whose digests it lists, and no network requests.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from megaflow_hpc.report.charts import Chart, theme
from megaflow_hpc.report.comparison import Difference, labels_of, matrix_of
from megaflow_hpc.report.figures import LoadedRun
from megaflow_hpc.report.series import significant
from megaflow_hpc.report.transcripts import Transcript, Wanted, chosen, transcripts
from megaflow_hpc.resources import __version__
from megaflow_hpc.texts import number, printable
from megaflow_hpc.trajectory import Image

MAX_LISTED_ROLLOUTS = 20_000
CHUNK_CHARS = 400_000
"""Approximate number of transcript characters that the page unpacks at once."""
MAX_TASKS, MAX_PODS = 1000, 200
"""Maximum number of rows in the tables of tasks and pods."""


def page(
    runs: Sequence[LoadedRun], charts: Sequence[Chart], differences: Sequence[Difference], wanted: Wanted = "some"
) -> str:
    """Renders the page.

    Args:
        wanted: Transcripts to include.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return printable(value) if is_text else value

    environment = Environment(
        loader=PackageLoader("megaflow_hpc.report", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters |= {"utc": _utc, "duration": duration, "number": number}
    environment.globals |= {"link": _link, "shade": _shade}
    figures = [run.figures for run in runs]
    labels = labels_of(figures)
    library = _vega()
    script = _web_file("page.js")
    listed, chunks, images, explanation = _browser(runs, labels, wanted)
    payloads: dict[str, Any] = {
        "charts": {"charts": [chart.spec for chart in charts], "themes": {"dark": theme(True), "light": theme(False)}},
        "rollouts": listed,
    }
    for place, chunk in enumerate(chunks):
        payloads[f"transcripts-{place}"] = chunk
    return environment.get_template("page.html.j2").render(
        title=f"{labels[0]}: report" if len(runs) == 1 else " and ".join(labels),
        policy=_policy(library, script),
        css=Markup(_web_file("page.css")),
        runs=list(zip(labels, figures, strict=True)),
        differences=differences,
        matrix=matrix_of(figures),
        charts=charts,
        tasks_shown=MAX_TASKS,
        pods_shown=MAX_PODS,
        browsable=explanation,
        made_at=time.time(),
        version=__version__,
        payloads=[(name, packed(data)) for name, data in payloads.items()],
        images=[(name, image.url) for name, image in images.items()],
        library=Markup(library),
        script=Markup(script),
    )


def packed(value: Any) -> str:
    """Encodes a value as JSON, gzip and base64. The result contains only letters, digits, ``+``, ``/`` and ``=``.

    Raises:
        ValueError: The value contains NaN or infinity, which JSON does not support.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def duration(seconds: float) -> str:
    """Formats seconds as ``12.3 s``, ``4:05 min`` or ``1:02:03 h``."""
    if abs(seconds) < 60:
        return f"{seconds:.1f} s"
    sign = "-" if seconds < 0 else ""
    minutes, rest = divmod(round(abs(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{sign}{hours}:{minutes:02d}:{rest:02d} h"
    return f"{sign}{minutes}:{rest:02d} min"


def _link(**wanted: str) -> str:
    """Returns a link within the page, to a rollout or to a selection of rollouts by run, task and policy."""
    return f"#{urlencode(wanted, quote_via=quote, errors='replace')}"


def _shade(mean: float | None) -> str:
    """Returns the CSS class of a mean reward, by tenths from 0 to 1."""
    return "" if mean is None else f"r{round(10 * min(1.0, max(0.0, mean)))}"


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "–"


@functools.cache
def _vega() -> str:
    """Bundles Vega, Vega-Lite and vega-embed, which takes two seconds."""
    import vl_convert

    library: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return library


def _web_file(name: str) -> str:
    return resources.files("megaflow_hpc.report").joinpath("web", name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Returns a Content-Security-Policy that allows only these scripts and no network requests."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _rounded(value: float, digits: int) -> float | None:
    return round(float(value), digits) if np.isfinite(value) else None


_COLUMNS = (
    *("run", "id", "task", "policy", "status", "kind", "node", "reward", "seconds"),
    *("turns", "tokens", "sequences", "attempts", "cpu", "memory", "place"),
)
"""Fields of a row in the page's list of rollouts."""


class _Chunks:
    """Groups of transcripts. The page unpacks a whole group when the user opens any of its transcripts."""

    def __init__(self) -> None:
        self.lists: list[list[Transcript]] = []
        self._size = CHUNK_CHARS

    def add(self, transcript: Transcript) -> tuple[int, int]:
        """Adds a transcript. Returns (number of its group, index in the group)."""
        if self._size >= CHUNK_CHARS:
            self.lists.append([])
            self._size = 0
        self.lists[-1].append(transcript)
        self._size += sum(len(text) for message in transcript for text in message.values())
        return len(self.lists) - 1, len(self.lists[-1]) - 1


def _browser(
    runs: Sequence[LoadedRun], labels: Sequence[str], wanted: Wanted
) -> tuple[dict[str, Any], list[list[Transcript]], dict[str, Image], str]:
    """Returns the data of the page's browser: columns of the rollout list, groups of transcripts, their images, and a
    sentence about omitted transcripts."""
    names: dict[str, dict[str, int]] = {key: {} for key in ("tasks", "policies", "statuses", "kinds", "nodes")}
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    errors: dict[str, str] = {}
    chunks = _Chunks()
    images: dict[str, Image] = {}
    listed = carried = 0
    for place, run in enumerate(runs):
        rows = run.rollouts
        texts, shown_in = transcripts(run.store, rows, wanted, len(runs))
        images |= shown_in
        shown = {*itertools.islice(chosen(rows), MAX_LISTED_ROLLOUTS // len(runs)), *texts}
        carried += len(texts)
        for row in sorted(shown):
            if rows.error[row]:
                errors[str(listed)] = rows.error[row]
            reward = rows.reward[row]
            entry = {
                "run": place,
                "id": rows.ids[row],
                "task": _code(names["tasks"], rows.task.of(row)),
                "policy": _code(names["policies"], rows.policy.of(row)),
                "status": _code(names["statuses"], rows.status.of(row)),
                "kind": _code(names["kinds"], rows.error_kind.of(row)),
                "node": _code(names["nodes"], rows.node.of(row)),
                "reward": significant(float(reward)) if np.isfinite(reward) else None,
                "seconds": round(float(rows.seconds[row]), 2),
                "turns": int(rows.turns[row]),
                "tokens": int(rows.tokens[row]),
                "sequences": int(rows.sequences[row]),
                "attempts": int(rows.attempts[row]),
                "cpu": _rounded(rows.cpu_s[row], 1),
                "memory": _rounded(rows.memory_peak_mb[row], 0),
                "place": chunks.add(texts[row]) if row in texts else None,
            }
            for name, value in entry.items():
                columns[name].append(value)
            listed += 1
    stored = sum(len(run.rollouts) for run in runs)
    explanation = f"{carried} of {stored} transcripts are in this page"
    if listed < stored:
        explanation += f", and {listed} of the rollouts in its list"
    explanation += ": failures, the best and worst, the longest and slowest first." if 0 < carried < stored else "."
    distinct = {key: list(codes) for key, codes in names.items()}
    return {**columns, **distinct, "error": errors, "runs": list(labels)}, chunks.lists, images, explanation


def _code(codes: dict[str, int], name: str) -> int:
    return codes.setdefault(name, len(codes))
