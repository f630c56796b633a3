"""Builds charts of figures as Vega-Lite specifications.

A specification is a plain dictionary. The page passes it to Vega in the browser. ``report.files`` renders it with
the same Vega without a browser. Charts show values from the figures and compute nothing themselves.

Colours come from the two themes and from :data:`PALETTE`, which is safe for colour-blind readers (Okabe and Ito
2008). Text from tasks and agents appears only in the data, which Vega treats as plain text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from megaflow_hpc.report.comparison import Difference, compare, labels_of
from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.policies import STAGES
from megaflow_hpc.report.rollouts import PHASES
from megaflow_hpc.report.timeline import MAX_POD_ROWS, Bar, PodFigures
from megaflow_hpc.texts import in_one_line

Spec = dict[str, Any]
Data = list[dict[str, Any]]
"""Rows of a chart's data, each with the values by field."""
Named = Sequence[tuple[str, RunFigures]]
"""Runs, each as (label in charts, figures)."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#8A8A8A")
ON_DARK = ("#56B4E9", "#E69F00", "#2CC295", "#E08FC0", "#8FA8FF", "#FF8A4C", "#D9CB3A", "#B0B0B0")
"""The hues of :data:`PALETTE` in the same order, lightened for a dark background."""
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


PICTURE_WIDTH = 720
"""Width in pixels of a picture, if the chart fills its container in the page. The PNG has twice as many pixels."""


class Chart(msgspec.Struct, kw_only=True):
    """A chart of a report: a Vega-Lite specification with title and caption."""

    name: str
    """Base name of the PNG, and element id in the page."""
    title: str
    note: str
    """Caption in one sentence."""
    spec: Spec
    wide: bool = False

    def png(self) -> bytes:
        """Returns the chart in the light theme as a PNG. Renders it with an embedded engine, without network access."""
        import vl_convert

        spec = {**self.spec, "config": theme(dark=False), "title": {"text": self.title}, "padding": 16}
        if spec.get("width") == "container":
            spec["width"] = PICTURE_WIDTH
        picture: bytes = vl_convert.vegalite_to_png(spec, scale=2, allowed_base_urls=[])
        return picture

    _repr_png_ = png
    """Jupyter calls this to display the chart."""


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
        "headerRow": {"labelOrient": "top", "labelAnchor": "start", "labelAngle": 0, "labelPadding": 4},
        "title": {"color": text, "fontSize": 13, "anchor": "start"},
        "text": {"color": text},
        "range": {"category": list(ON_DARK if dark else PALETTE)},
        "line": {"strokeWidth": 2},
        "point": {"size": 40, "filled": True},
    }


def spec_of(values: Data, **more: Any) -> Spec:
    """Builds a specification over data rows. The chart fills the width of its container."""
    return {"$schema": SCHEMA, "data": {"values": values}, "width": "container", "height": 240, **more}


def height_of(values: Data, field: str, each: int) -> int:
    """Returns the height of a chart with ``each`` pixels per distinct value of a field."""
    return each * len({value[field] for value in values})


def channel(field: str, kind: str = "Q", title: str | None = "", **more: Any) -> Spec:
    """Builds an encoding channel.

    Args:
        kind: Q (quantitative), N (nominal) or O (ordinal).
        title: Title of the channel. ``None`` means no title, and an empty string means the field's name.
    """
    kinds = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}
    spec: Spec = {"field": field, "type": kinds[kind]}
    if title != "":
        spec["title"] = title
    return spec | more


def tooltip(**fields: str) -> list[Spec]:
    """Builds tooltip channels. Each keyword is a field. Its value is ``N`` for text, or a number format that may be
    empty."""
    channels = []
    for field, kind in fields.items():
        if kind == "N":
            channels.append(channel(field, "N"))
        else:
            channels.append(channel(field, format=kind) if kind else channel(field))
    return channels


def chart_of(name: str, title: str, note: str, values: Data, *, wide: bool = False, **more: Any) -> Chart | None:
    """Builds a chart of data rows. Returns ``None`` if there are none. :func:`spec_of` gets the other arguments."""
    return Chart(name=name, title=title, note=note, spec=spec_of(values, **more), wide=wide) if values else None


def labelled(runs: Named, path: str, name: str = "policy") -> Iterator[tuple[str, Any]]:
    """Yields the items of a list in every run's figures, each with its shortest unambiguous label.

    Args:
        path: The list's attribute in the figures, such as ``cost.roles``.
        name: Attribute of an item that labels it within its run.
    """
    for label, run in runs:
        for item in attrgetter(path)(run):
            own = getattr(item, name)
            yield own if len(runs) == 1 else f"{label}: {own}", item


def by_series() -> Spec:
    """Builds the colour channel that distinguishes policies and runs."""
    return channel("series", "N", None)


def pass_at(runs: Named) -> Chart | None:
    """Charts pass@k over k. If no task has two samples, charts pass@1 of each policy."""
    values = _of_policies(runs, "pass_at")
    if not values:
        return None
    scale = {"domain": [0, 1]}
    tip = tooltip(series="N", k="", value=".3f", low=".3f", high=".3f")
    if max(value["k"] for value in values) == 1:  # a curve needs two points
        spec = _intervals(values, channel("low", title="pass@1", scale=scale), "value", tip)
    else:
        x = channel("k", title="k samples", scale={"type": "log", "base": 2}, axis={"tickMinStep": 1, "format": "d"})
        band = {"y": channel("low", title="probability that one passes", scale=scale), "y2": channel("high")}
        line = {"y": channel("value"), "tooltip": tip}
        spec = spec_of(
            values,
            encoding={"x": x, "color": by_series()},
            layer=[
                {"mark": {"type": "area", "opacity": 0.18}, "encoding": band},
                {"mark": {"type": "rule", "opacity": 0.5}, "encoding": band},
                {"mark": {"type": "line", "point": True}, "encoding": line},
            ],
        )
    note = "The unbiased estimate over tasks, with its 95 % interval (Wilson, clustered by task)."
    return Chart(name="pass-at-k", title="pass@k", note=note, spec=spec)


def mean_differences(of_runs: Sequence[Difference]) -> Chart | None:
    """Charts each difference of mean rewards with its confidence interval."""
    values = []
    for one in of_runs:
        if one.difference is not None:
            numbers = {"difference": one.difference, "low": one.low, "high": one.high, "p": one.p, "tasks": one.tasks}
            values.append({"series": f"{one.label} − {one.against}", **numbers})
    if not values:
        return None
    x = channel("low", title="difference of mean reward")
    tip = tooltip(series="N", difference="+.3f", low="+.3f", high="+.3f", p=".3f", tasks="")
    spec = _intervals(values, x, "difference", tip)
    zero = {"mark": {"type": "rule", "strokeDash": [4, 4], "color": "#8A8A8A"}, "encoding": {"x": {"datum": 0}}}
    spec["layer"].insert(0, zero)
    note = "Paired by task, with the 95 % interval of the mean difference over tasks."
    for layer in spec["layer"][1:]:
        layer["encoding"]["y"] |= {"axis": {"labelLimit": 480}, "sort": None}
    return Chart(name="difference", title="Difference", note=note, spec=spec, wide=True)


def _intervals(values: Data, x: Spec, value: str, tip: Sequence[Spec]) -> Spec:
    """Charts each series as a point on a line from ``low`` to ``high``."""
    encoding = {"y": channel("series", "N", None), "color": {**by_series(), "legend": None}, "tooltip": list(tip)}
    return spec_of(
        values,
        height=height_of(values, "series", 34),
        layer=[
            {"mark": {"type": "rule", "strokeWidth": 3}, "encoding": {**encoding, "x": x, "x2": channel("high")}},
            {"mark": {"type": "point", "size": 90}, "encoding": {**encoding, "x": channel(value)}},
        ],
    )


def _of_policies(runs: Named, name: str) -> Data:
    """Flattens the list field ``name`` of every policy's figures into data rows."""
    return [
        {"series": series, **msgspec.to_builtins(item)}
        for series, policy in labelled(runs, "policies")
        for item in getattr(policy, name)
    ]


def _histogram(
    name: str, title: str, note: str, values: Data, runs: Named, scale: dict[str, Any] | None = None
) -> Chart | None:
    axis = {}
    lows = {value["low"] for value in values}
    bars_of_one = [value for value in values if value["high"] - value["low"] == 1]
    whole_numbers = {(value["low"] + value["high"]) / 2 for value in bars_of_one}
    if len(whole_numbers) == len(lows) <= 16:
        axis = {"values": sorted(whole_numbers), "format": "d"}
    encoding = {
        "x": channel("low", title=name, bin={"binned": True}, axis=axis, scale=scale or {}),
        "x2": channel("high"),
        # Bars of different runs have different edges, so they cannot be stacked.
        "y": channel("count", title="rollouts", stack=None if len(runs) > 1 else "zero"),
        "color": by_series(),
        "tooltip": [
            channel("series", "N"),
            channel("low", title="from"),
            channel("high", title="to"),
            channel("count"),
        ],
    }
    mark = {"type": "bar", "opacity": 0.65 if len(runs) > 1 else 1.0, "binSpacing": 1}
    return chart_of(title.lower(), title, note, values, mark=mark, encoding=encoding)


def rewards(runs: Named) -> Chart | None:
    """Charts the distribution of rewards."""
    note = "Rollouts by reward, without those that were not verified."
    values = _of_policies(runs, "rewards")
    for low, high in ((0.0, 1.0), (-0.5, 1.5)):  # shares, or only 0 and 1: show both ends even if all passed
        if all(low <= value["low"] and value["high"] <= high for value in values):
            return _histogram("reward", "Rewards", note, values, runs, {"domain": [low, high]})
    return _histogram("reward", "Rewards", note, values, runs)


def tokens(runs: Named) -> Iterator[Chart | None]:
    """Yields charts of the distributions of tokens and model calls. Yields nothing if no policy calls a model."""
    if any(policy.turns.max for _, run in runs for policy in run.policies):
        note = "Tokens of each completed or truncated rollout, including prompts."
        yield _histogram("tokens", "Tokens", note, _of_policies(runs, "token_bins"), runs)
        note = "Model calls of each completed or truncated rollout."
        yield _histogram("model calls", "Turns", note, _of_policies(runs, "turn_bins"), runs)


def use(runs: Named) -> Iterator[Chart | None]:
    """Yields charts of the distributions of CPU time and memory of rollouts."""
    note = "CPU seconds of the sandboxes of each completed or truncated rollout, including the verifier's."
    yield _histogram("CPU seconds", "CPU of rollouts", note, _of_policies(runs, "cpu_bins"), runs)
    note = "Peak memory of the sandboxes of each completed or truncated rollout."
    yield _histogram("MB", "Memory of rollouts", note, _of_policies(runs, "memory_bins"), runs)


def training(runs: Named) -> Iterator[Chart | None]:
    """Yields a chart of each training metric over training steps."""
    titles = {"reward": "Reward", "passed": "Share that passed", "staleness": "Staleness", "entropy": "Entropy"}
    titles |= {"clipped": "Share clipped", "mismatch": "Mismatch", "tokens_per_s": "Tokens per second"}
    for metric, title in titles.items():
        values = [
            {"series": series, "step": step, "value": value}
            for series, curve in labelled(runs, "training")
            if curve.metric == metric
            for step, value in zip(curve.steps, curve.values, strict=True)
        ]
        tiny: dict[str, Any] = {"axis": {"format": "~e"}} if metric == "mismatch" else {}
        encoding = {
            "x": channel("step"),
            "y": channel("value", title=metric, **tiny),
            "color": by_series(),
            "tooltip": tooltip(series="N", step="", value=".4g"),
        }
        how: Spec = {"mark": {"type": "line"}, "encoding": encoding, "height": 180}
        note = "One value for each committed step."
        yield chart_of(f"training-{metric}", f"{title} over steps", note, values, **how)


TASKS_SHOWN = 40
MAX_HEIGHT = 1000
"""Height in pixels that the rows of a timeline share. Each row gets at least 12."""
FACET_WIDTH = {"width": 340}
"""Width in pixels of faceted charts, which Vega cannot fit to their container."""
UNITS = ((10_000.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""Units of a time axis, each as (minimum seconds, seconds per unit, name)."""


def timeline(label: str, run: RunFigures, bars: Sequence[Bar], several: bool) -> Chart | None:
    """Charts the rollouts of a run over time, with a row for each pod."""
    if not bars:
        return None
    shown = {bar.pod for bar in bars}
    if len(shown) < MAX_POD_ROWS:
        shown.update(pod.pod for pod in run.pods[: MAX_POD_ROWS - len(shown)])
    seconds, unit = _unit(run.seconds)
    values = [msgspec.to_builtins(bar) for bar in bars]
    pods = [msgspec.to_builtins(pod) for pod in run.pods if pod.pod in shown]
    for value in (*values, *pods):
        value["start"] /= seconds
        value["end"] /= seconds
    lanes = 1 + max(bar.lane for bar in bars)
    height = len(shown) * max(12, min(120, 8 * lanes, MAX_HEIGHT // len(shown)))
    outcomes = [outcome for outcome in OUTCOMES if any(bar.outcome == outcome for bar in bars)]
    scale = {"domain": outcomes, "range": [OUTCOMES[outcome] for outcome in outcomes]}
    y = channel("pod", "N", None, sort=[pod for pod in _by_element(run.pods) if pod in shown])
    x = channel("start", title=f"{unit} from the first rollout's start")
    x2 = channel("end")
    about_pod = tooltip(pod="N", node="N", state="N", why="N", slots="", rollouts="")
    layers: list[Spec] = [
        {
            "data": {"values": pods},
            "mark": {"type": "bar", "opacity": 0.12, "color": "#8A8A8A"},
            "encoding": {"y": y, "x": x, "x2": x2, "tooltip": about_pod},
        },
        {
            "data": {"values": values},
            "mark": {"type": "bar", "minBandSize": 1},
            "encoding": {
                "y": y,
                "yOffset": channel("lane", "O", scale={"paddingInner": 0.15}),
                "x": x,
                "x2": x2,
                "color": channel("outcome", "N", None, scale=scale),
                "tooltip": tooltip(rollout="N", outcome="N", start=".2f", end=".2f", pod="N"),
            },
        },
    ]
    killed = [pod for pod in pods if pod["state"] == "gone"]
    if killed:  # Vega warns about layers without data
        layers.append(
            {
                "data": {"values": killed},
                "mark": {"type": "point", "shape": "cross", "angle": 45, "size": 90, "color": OUTCOMES["failed"]},
                "encoding": {"y": y, "x": {**x2, "title": x["title"]}, "tooltip": about_pod},
            }
        )
    note = (
        "Each row is one start of a pod, and each bar a rollout. A pod was idle where its row is grey. A cross marks "
        "the last event of a pod that was killed."
    )
    if run.stored != len(bars):
        note += f" {len(bars)} of {run.stored} rollouts are shown."
    return Chart(
        name=f"timeline-{label}" if several else "timeline",
        title=f"Timeline of {label}" if several else "Timeline",
        note=note,
        spec=spec_of([], height=height, layer=layers),
        wide=True,
    )


def _by_element(pods: Sequence[PodFigures]) -> list[str]:
    """Returns pod names ordered by first start. All starts of an array element follow each other."""
    first: dict[str, float] = {}
    for pod in pods:
        first.setdefault(_element(pod), pod.start)
    order = sorted(pods, key=lambda pod: (first[_element(pod)], _element(pod), pod.start))
    return [pod.pod for pod in order]


def _element(pod: PodFigures) -> str:
    return pod.pod.rpartition(".")[0]


def concurrency(runs: Named) -> Chart | None:
    """Charts running rollouts, waiting rollouts and slots over time."""
    seconds, unit = _unit(max(run.seconds for _, run in runs))
    values = []
    for label, run in runs:
        for series in ("running", "waiting", "slots"):
            for at, value in zip(run.concurrency.at, getattr(run.concurrency, series), strict=False):
                values.append({"run": label, "series": series, "at": at / seconds, "value": value})
    encoding = {
        "x": channel("at", title=f"{unit} from the first rollout's start"),
        "y": channel("value", title="rollouts", scale={"type": "symlog"}),
        "color": by_series(),
        "tooltip": tooltip(series="N", at="", value=".1f"),
    }
    if len(runs) > 1:
        encoding["strokeDash"] = channel("run", "N", None)
    note = (
        "Running rollouts, rollouts that have not started, and slots of all workers. Attempts that were lost with "
        "their pod are not counted."
    )
    mark = {"type": "line", "interpolate": "step-after"}
    return chart_of("concurrency", "Concurrency and queue", note, values, wide=True, mark=mark, encoding=encoding)


def _unit(seconds: float) -> tuple[float, str]:
    """Returns (seconds per unit, unit name) for a time axis of ``seconds``."""
    return next((size, unit) for least, size, unit in UNITS if seconds >= least)


def phases(runs: Named) -> Chart | None:
    """Charts the mean seconds of each phase of a rollout."""
    note = (
        "Environment: preparation of the sandbox and its files. Model: calls, including waits for an engine. Agent: "
        "its own work and its commands. Evaluation: the verifier. Other: the rest, until the rollout ended."
    )
    return _stacked("phases", "Where the seconds go", note, runs, "phase", PHASE_COLOURS)


def stages(runs: Named) -> Chart | None:
    """Charts the mean seconds of each stage between planning the campaign and the end of a rollout."""
    note = (
        "From the planning of the campaign to each rollout's end, in the four phases of the MegaFlow paper (arXiv "
        "2601.07526, figure 5). Scheduling: Slurm's queue, the start of pods and engines, the wait for a slot."
    )
    return _stacked("latency", "Latency", note, runs, "stage", STAGE_COLOURS)


def _stacked(name: str, title: str, note: str, runs: Named, part: str, colours: Mapping[str, str]) -> Chart | None:
    """Charts a stacked bar for each policy with the mean seconds of each part. ``part`` is ``phase`` or ``stage``."""
    values = []
    for series, item in labelled(runs, f"{part}s"):
        own, seconds = getattr(item, part), item.seconds
        row = {"series": series, "part": own, "order": list(colours).index(own), "share": item.share}
        values.append({**row, "mean": seconds.mean, "p50": seconds.p50, "p90": seconds.p90})
    scale = {"domain": list(colours), "range": list(colours.values())}
    encoding = {
        "y": channel("series", "N", None),
        "x": channel("mean", title="mean seconds of a rollout", stack="zero"),
        "color": channel("part", "N", None, scale=scale),
        "order": channel("order"),
        "tooltip": tooltip(series="N", part="N", mean=".2f", p50=".2f", p90=".2f", share=".1%"),
    }
    height = height_of(values, "series", 34)
    return chart_of(name, title, note, values, mark="bar", encoding=encoding, height=height)


def failures(runs: Named) -> Chart | None:
    """Charts failures and retries by cause."""
    values = []
    for label, run in runs:
        for what, counts in (("failed", run.failures_by_kind), ("repeated", run.repeated)):
            for cause, count in counts.items():
                values.append({"run": label, "cause": cause or "unknown", "what": what, "count": count})
    scale = {"domain": ["failed", "repeated"], "range": [OUTCOMES["failed"], OUTCOMES["truncated"]]}
    encoding = {
        "y": channel("cause", "N", None, sort="-x"),
        "x": channel("count", title="failed rollouts, repeated attempts"),
        "color": channel("what", "N", None, scale=scale),
        "tooltip": tooltip(run="N", cause="N", what="N", count=""),
    }
    how: Spec = {"mark": "bar", "encoding": encoding, "height": height_of(values, "cause", 26)}
    if len(runs) > 1:
        encoding["row"] = channel("run", "N", None)
        how |= FACET_WIDTH
    return chart_of("failures", "Failures", "By cause. A repeated attempt may have succeeded.", values, **how)


def tasks(runs: Named) -> Chart | None:
    """Charts the slowest tasks by policy. Only for a single run, because a table compares the tasks of several runs."""
    if len(runs) > 1:
        return None
    values = []
    for task in sorted(runs[0][1].tasks, key=lambda task: -task.seconds)[:TASKS_SHOWN]:
        numbers = {"seconds": task.seconds, "mean": task.mean, "samples": task.samples}
        values.append({"task": task.task, "series": task.policy, **numbers})
    encoding = {
        "y": channel("task", "N", None, sort="-x"),
        "x": channel("seconds", title="median seconds of a rollout"),
        "color": by_series(),
        "tooltip": tooltip(task="N", series="N", seconds="", mean="", samples=""),
    }
    mark = {"type": "point", "opacity": 0.8, "size": 70}
    how: Spec = {"mark": mark, "encoding": encoding, "height": height_of(values, "task", 16)}
    return chart_of("slow-tasks", "Slowest tasks", "Median over a task's samples.", values, **how)


def cost(runs: Named) -> Chart | None:
    """Charts the hours that jobs of each role held."""
    values: Data = []
    for name, role in labelled(runs, "cost.roles", "role"):
        values += _hours(name, "core-hours", role.core_hours, role.idle_core_hours)
        values += _hours(name, "GPU-hours", role.gpu_hours, role.idle_gpu_hours)
    encoding = {
        "y": channel("role", "N", None),
        "x": channel("hours", title="hours"),
        "row": channel("what", "N", None),
        "color": by_series(),
        "tooltip": tooltip(role="N", what="N", series="N", hours=".4f"),
    }
    how: Spec = {"mark": "bar", "encoding": encoding, "height": {"step": 26}, **FACET_WIDTH}
    how["resolve"] = {"scale": {"x": "independent"}}
    note = (
        "Hours held by jobs, by role, and with accounting the idle part: a pod is idle while none of its rollouts runs."
    )
    return chart_of("cost", "Core-hours and GPU-hours", note, values, **how)


def _hours(role: str, what: str, hours: float, idle: float | None) -> Data:
    parts = {"held": hours} if idle is None else {"in use": hours - idle, "idle": idle}
    return [{"role": role, "what": what, "series": name, "hours": value} for name, value in parts.items() if value]


def efficiency(runs: Named) -> Chart | None:
    """Charts the share of held resources that jobs used."""
    values = []
    for series, job in labelled(runs, "cost.jobs", "role"):
        shares = {"cpu used of held": job.cpu_efficiency, "memory peak of asked": job.memory_efficiency}
        for what, share in shares.items():
            if share is not None:
                row = {"series": series, "what": what, "share": share}
                values.append({**row, "job": job.job, "hours": job.seconds / 3600})
    encoding = {
        "x": channel("share", title=None, axis={"format": "%"}, scale={"domainMin": 0}),
        "y": channel("series", "N", None),
        "color": by_series(),
        "row": channel("what", "N", None),
        "tooltip": tooltip(job="N", share=".1%", hours=".3f"),
    }
    mark = {"type": "tick", "thickness": 2}
    how: Spec = {"mark": mark, "encoding": encoding, "height": {"step": 30}, **FACET_WIDTH}
    note = "One mark for each start of a job, with the numbers that seff shows."
    return chart_of("efficiency", "CPU and memory of jobs", note, values, **how)


def charts_of(
    runs: Sequence[RunFigures],
    bars: Sequence[Sequence[Bar]] | None = None,
    differences: Sequence[Difference] | None = None,
) -> list[Chart]:
    """Returns the charts for which these runs have data, in page order. Jupyter shows each as a picture.

    >>> {chart.name: chart for chart in charts_of([figures_of("runs/fix-bugs")])}["pass-at-k"]   # doctest: +SKIP

    Args:
        bars: Timeline bars of each run. By default, no timeline is drawn.
        differences: Result of :func:`compare`. Default: all differences of the runs.
    """
    bars = [[]] * len(runs) if bars is None else bars
    differences = compare(runs) if differences is None else differences
    named = list(zip(labels_of(runs), runs, strict=True))
    several = len(runs) > 1
    charts = (
        pass_at(named),
        mean_differences(differences),
        rewards(named),
        *(timeline(label, run, own, several) for (label, run), own in zip(named, bars, strict=True)),
        concurrency(named),
        phases(named),
        stages(named),
        *tokens(named),
        *use(named),
        failures(named),
        tasks(named),
        cost(named),
        efficiency(named),
        *training(named),
    )
    return [_printable(chart) for chart in charts if chart]


LEGEND_WIDTH, CHARACTER_WIDTH, SYMBOL_WIDTH = 360, 6, 30
"""Widths in pixels of the narrowest chart's legend, of a character and of a symbol with its margin."""


def _with_legend(spec: Spec) -> Spec:
    """Sets the number of columns of a chart's legend, so that no name is cut off."""
    for part in (spec, *spec.get("layer", ())):
        colour = part.get("encoding", {}).get("color", {})
        if colour.get("type") == "nominal" and colour.get("legend", {}) is not None:
            rows = part.get("data", spec["data"])["values"]
            names = colour.get("scale", {}).get("domain") or {str(row.get(colour["field"])) for row in rows}
            longest = max(map(len, names), default=1)
            columns = max(1, LEGEND_WIDTH // (CHARACTER_WIDTH * longest + SYMBOL_WIDTH))
            colour["legend"] = {"columns": columns, "labelLimit": LEGEND_WIDTH, "title": None}
    return spec


def _printable(chart: Chart) -> Chart:
    """Returns the chart without control characters, NaN and infinity. SVG and JSON cannot represent them."""
    return msgspec.structs.replace(chart, title=in_one_line(chart.title), spec=_clean(_with_legend(chart.spec)))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return in_one_line(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
