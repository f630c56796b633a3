"""Charts of time and resources: timeline, concurrency, phases, failures, slow tasks, hours held and efficiency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megaflow_hpc.report.charts.specs import (
    OUTCOMES,
    PHASE_COLOURS,
    STAGE_COLOURS,
    Chart,
    Data,
    Named,
    Spec,
    by_series,
    channel,
    height_of,
    series_name,
    spec_of,
    tooltip,
)
from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.series import Spread
from megaflow_hpc.report.timeline import MAX_POD_ROWS, Bar, PodFigures

TASKS_SHOWN = 40
MAX_HEIGHT = 1000
"""Maximum height of a timeline in pixels, unless it has very many pods."""
FACET_WIDTH = {"width": 420}
"""Width in pixels of faceted charts, which Vega cannot fit to their container."""
UNITS = ((10_000.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""(minimum seconds, seconds per unit, name) for each unit of a time axis."""


def timeline(label: str, run: RunFigures, bars: Sequence[Bar], several: bool) -> Chart | None:
    """Charts the rollouts of one run over time, one row per pod."""
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
        "Each bar is a rollout, each row a start of a pod, grey where it was there and had nothing to do; a cross is "
        "the last sign of one that was killed."
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
    """Returns pod names ordered by first start, with all starts of an array element next to each other."""
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
    if not values:
        return None
    encoding = {
        "x": channel("at", title=f"{unit} from the first rollout's start"),
        "y": channel("value", title="rollouts", scale={"type": "symlog"}),
        "color": by_series(),
        "tooltip": tooltip(series="N", at="", value=".1f"),
    }
    if len(runs) > 1:
        encoding["strokeDash"] = channel("run", "N", None)
    note = (
        "Rollouts that run, rollouts that wait to be started, and slots of all workers. Attempts that were lost with "
        "their pod are not counted."
    )
    spec = spec_of(values, mark={"type": "line", "interpolate": "step-after"}, encoding=encoding)
    return Chart(name="concurrency", title="Concurrency and queue", note=note, spec=spec, wide=True)


def _unit(seconds: float) -> tuple[float, str]:
    """Returns (seconds per unit, unit name) for a time axis of this length."""
    return next((size, unit) for least, size, unit in UNITS if seconds >= least)


def phases(runs: Named) -> Chart | None:
    """Charts the mean seconds of each rollout phase."""
    note = (
        "Environment: sandbox and files made ready. Model: calls, waiting for an engine included. Agent: its own "
        "work and its commands. Evaluation: the verifier. Other: what remains until the rollout has ended."
    )
    values = []
    for label, run in runs:
        for phase in run.phases:
            series = series_name(label, phase.policy, runs)
            values.append(_stack_row(series, phase.phase, phase.seconds, phase.share, PHASE_COLOURS))
    return _stacked("phases", "Where the seconds go", note, values, PHASE_COLOURS)


def stages(runs: Named) -> Chart | None:
    """Charts the mean seconds of each stage, from planning the campaign to the end of a rollout."""
    note = (
        "From the planning of the campaign to each rollout's end, in the four phases of the MegaFlow paper (arXiv "
        "2601.07526, figure 5). Scheduling: Slurm's queue, pods and engines that start, the wait for a slot."
    )
    values = []
    for label, run in runs:
        for stage in run.stages:
            series = series_name(label, stage.policy, runs)
            values.append(_stack_row(series, stage.stage, stage.seconds, stage.share, STAGE_COLOURS))
    return _stacked("latency", "Latency", note, values, STAGE_COLOURS)


def _stack_row(series: str, part: str, seconds: Spread, share: float, colours: Mapping[str, str]) -> dict[str, Any]:
    order = list(colours).index(part)
    numbers = {"mean": seconds.mean, "p50": seconds.p50, "p90": seconds.p90}
    return {"series": series, "part": part, "order": order, "share": share, **numbers}


def _stacked(name: str, title: str, note: str, values: Data, colours: Mapping[str, str]) -> Chart | None:
    """Charts one stacked bar per policy, with the mean seconds of its parts."""
    if not values:
        return None
    scale = {"domain": list(colours), "range": list(colours.values())}
    encoding = {
        "y": channel("series", "N", None),
        "x": channel("mean", title="mean seconds of a rollout", stack="zero"),
        "color": channel("part", "N", None, scale=scale),
        "order": channel("order"),
        "tooltip": tooltip(series="N", part="N", mean=".2f", p50=".2f", p90=".2f", share=".1%"),
    }
    spec = spec_of(values, mark="bar", encoding=encoding, height=height_of(values, "series", 34))
    return Chart(name=name, title=title, note=note, spec=spec)


def failures(runs: Named) -> Chart | None:
    """Charts failures and retries by cause."""
    values = []
    for label, run in runs:
        for what, counts in (("failed", run.failures_by_kind), ("repeated", run.repeated)):
            for cause, count in counts.items():
                values.append({"run": label, "cause": cause or "unknown", "what": what, "count": count})
    if not values:
        return None
    scale = {"domain": ["failed", "repeated"], "range": [OUTCOMES["failed"], OUTCOMES["truncated"]]}
    encoding = {
        "y": channel("cause", "N", None, sort="-x"),
        "x": channel("count", title="rollouts that failed, attempts that were repeated"),
        "color": channel("what", "N", None, scale=scale),
        "tooltip": tooltip(run="N", cause="N", what="N", count=""),
    }
    spec = spec_of(values, mark="bar", encoding=encoding, height=height_of(values, "cause", 26))
    if len(runs) > 1:
        encoding["row"] = channel("run", "N", None)
        spec |= FACET_WIDTH
    return Chart(name="failures", title="Failures", note="By cause; what was repeated may have succeeded.", spec=spec)


def tasks(runs: Named) -> Chart | None:
    """Charts the slowest tasks by policy, for a single run only. Several runs are compared in the table instead."""
    if len(runs) > 1 or not runs[0][1].tasks:
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
    spec = spec_of(values, mark={"type": "point", "opacity": 0.8, "size": 70}, encoding=encoding)
    spec["height"] = height_of(values, "task", 16)
    return Chart(name="slow-tasks", title="Slowest tasks", note="Median over a task's samples.", spec=spec)


def cost(runs: Named) -> Chart | None:
    """Charts hours held by role."""
    values: Data = []
    for label, run in runs:
        for role in run.cost.roles:
            name = series_name(label, role.role, runs)
            values += _hours(name, "core-hours", role.core_hours, role.idle_core_hours)
            values += _hours(name, "GPU-hours", role.gpu_hours, role.idle_gpu_hours)
    if not values:
        return None
    encoding = {
        "y": channel("role", "N", None),
        "x": channel("hours", title="hours"),
        "row": channel("what", "N", None),
        "color": by_series(),
        "tooltip": tooltip(role="N", what="N", series="N", hours=".4f"),
    }
    spec = spec_of(values, mark="bar", encoding=encoding, height={"step": 26}, resolve={"scale": {"x": "independent"}})
    spec |= FACET_WIDTH
    note = (
        "What jobs held, by role; with accounting also how much of it was idle: pods while none of their rollouts ran."
    )
    return Chart(name="cost", title="Core-hours and GPU-hours", note=note, spec=spec)


def _hours(role: str, what: str, hours: float, idle: float | None) -> Data:
    parts = {"held": hours} if idle is None else {"in use": hours - idle, "idle": idle}
    return [{"role": role, "what": what, "series": name, "hours": value} for name, value in parts.items() if value]


def efficiency(runs: Named) -> Chart | None:
    """Charts the share of the held resources that jobs used."""
    values = []
    for label, run in runs:
        for job in run.cost.jobs:
            shares = {"cpu used of held": job.cpu_efficiency, "memory peak of asked": job.memory_efficiency}
            for what, share in shares.items():
                if share is not None:
                    row = {"series": series_name(label, job.role, runs), "what": what, "share": share}
                    values.append({**row, "job": job.job, "hours": job.seconds / 3600})
    if not values:
        return None
    encoding = {
        "x": channel("share", title=None, axis={"format": "%"}, scale={"domainMin": 0}),
        "y": channel("series", "N", None),
        "color": by_series(),
        "row": channel("what", "N", None),
        "tooltip": tooltip(job="N", share=".1%", hours=".3f"),
    }
    spec = spec_of(values, mark={"type": "tick", "thickness": 2}, encoding=encoding, height={"step": 30})
    spec |= FACET_WIDTH
    note = "One line for each start of a job, as seff would show it."
    return Chart(name="efficiency", title="CPU and memory of jobs", note=note, spec=spec)
