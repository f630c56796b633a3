"""Charts of time and means: timeline, concurrency, phases, failures, slow tasks, hours held and efficiency."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megaflow_hpc.report.charts.specs import (
    OUTCOMES,
    PHASE_COLOURS,
    STAGE_COLOURS,
    Chart,
    Named,
    by_series,
    channel,
    height_of,
    series_name,
    spec_of,
)
from megaflow_hpc.report.figures import RunFigures
from megaflow_hpc.report.policies import LatencyStage, RolloutPhase
from megaflow_hpc.report.timeline import PODS, Bar

TASKS_SHOWN = 40
TALLEST = 1000
"""Maximum height of a timeline in pixels, unless it has very many pods."""
OF_ROWS = {"width": 420}
"""Width in pixels of faceted charts, which Vega cannot fit into a place."""
UNITS = ((10_000.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""Minimum number of seconds for each unit of a time axis."""


def timeline(label: str, run: RunFigures, bars: Sequence[Bar], several: bool) -> Chart | None:
    """Returns the rollouts of one run over time, one row per pod."""
    if not bars:
        return None
    shown = {bar.pod for bar in bars}
    shown |= {pod.pod for pod in run.pods[: PODS - len(shown)]} if len(shown) < PODS else set()
    divided, unit = _unit(run.seconds)
    values = [msgspec.to_builtins(bar) for bar in bars]
    pods = [msgspec.to_builtins(pod) for pod in run.pods if pod.pod in shown]
    for value in (*values, *pods):
        value |= {"start": value["start"] / divided, "end": value["end"] / divided}
    rows = {pod: 1 + max((bar.lane for bar in bars if bar.pod == pod), default=0) for pod in shown}
    height = len(shown) * max(12, min(120, 8 * max(rows.values()), TALLEST // len(shown)))
    outcomes = [outcome for outcome in OUTCOMES if any(bar.outcome == outcome for bar in bars)]
    scale = {"domain": outcomes, "range": [OUTCOMES[outcome] for outcome in outcomes]}
    first = {pod.pod.rpartition(".")[0]: pod.start for pod in reversed(run.pods)}
    order = sorted(run.pods, key=lambda pod: (first[pod.pod.rpartition(".")[0]], pod.pod.rpartition(".")[0], pod.start))
    y = channel("pod", "N", None, sort=[pod.pod for pod in order if pod.pod in shown])
    x, x2 = channel("start", title=f"{unit} from the first rollout's start"), channel("end")
    when = [channel(name, format=".2f") for name in ("start", "end")]
    tip = [channel("rollout", "N"), channel("outcome", "N"), *when, channel("pod", "N")]
    told = [*(channel(name, "N") for name in ("pod", "node", "state", "why")), channel("slots"), channel("rollouts")]
    spec = spec_of(
        [],
        height=height,
        layer=[
            {
                "data": {"values": pods},
                "mark": {"type": "bar", "opacity": 0.12, "color": "#8A8A8A"},
                "encoding": {"y": y, "x": x, "x2": x2, "tooltip": told},
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
                    "tooltip": tip,
                },
            },
        ],
    )
    if killed := [pod for pod in pods if pod["state"] == "gone"]:  # Vega warns about a layer without data
        mark = {"type": "point", "shape": "cross", "angle": 45, "size": 90, "color": OUTCOMES["failed"]}
        encoding = {"y": y, "x": {**channel("end"), "title": x["title"]}, "tooltip": told}
        spec["layer"].append({"data": {"values": killed}, "mark": mark, "encoding": encoding})
    left_out = run.stored - len(bars)
    note = (
        "Each bar is a rollout, each row a start of a pod, grey where it was there and had nothing to do; a cross is "
    )
    note += "the last sign of one that was killed."
    note += f" {len(bars)} of {run.stored} rollouts are shown." if left_out else ""
    name = f"timeline-{label}" if several else "timeline"
    title = f"Timeline of {label}" if several else "Timeline"
    return Chart(name=name, title=title, note=note, spec=spec, wide=True)


def concurrency(runs: Named) -> Chart | None:
    """Returns the numbers of running and waiting rollouts and of slots over time."""
    divided, unit = _unit(max(run.seconds for _, run in runs))
    values = [
        {"run": label, "series": series, "at": at / divided, "value": value}
        for label, run in runs
        for series in ("running", "waiting", "slots")
        for at, value in zip(run.concurrency.at, getattr(run.concurrency, series), strict=False)
    ]
    if not values:
        return None
    encoding = {
        "x": channel("at", title=f"{unit} from the first rollout's start"),
        "y": channel("value", title="rollouts", scale={"type": "symlog"}),
        "color": by_series(),
        "tooltip": [channel("series", "N"), channel("at"), channel("value", format=".1f")],
        **({"strokeDash": channel("run", "N", None)} if len(runs) > 1 else {}),
    }
    mark = {"type": "line", "interpolate": "step-after"}
    note = (
        "Rollouts that run, rollouts that wait to be started, and slots of all workers. Attempts that were lost with "
    )
    note += "their pod are not counted."
    spec = spec_of(values, mark=mark, encoding=encoding)
    return Chart(name="concurrency", title="Concurrency and queue", note=note, spec=spec, wide=True)


def _unit(seconds: float) -> tuple[float, str]:
    return next((divided, unit) for least, divided, unit in UNITS if seconds >= least)


def phases(runs: Named) -> Chart | None:
    """Returns the mean seconds of each phase of a rollout."""
    note = "Environment: sandbox and files made ready. Model: calls, waiting for an engine included. Agent: its own "
    note += "work and its commands. Evaluation: the verifier. Other: what remains until the rollout has ended."
    known = [(label, phase, phase.phase) for label, run in runs for phase in run.phases]
    return _stacked("phases", "Where the seconds go", note, known, PHASE_COLOURS, runs)


def stages(runs: Named) -> Chart | None:
    """Returns the mean seconds of each stage from the planning of the campaign to the end of a rollout."""
    note = "From the planning of the campaign to each rollout's end, in the four phases of the MegaFlow paper (arXiv "
    note += "2601.07526, figure 5). Scheduling: Slurm's queue, pods and engines that start, the wait for a slot."
    known = [(label, stage, stage.stage) for label, run in runs for stage in run.stages]
    return _stacked("latency", "Latency", note, known, STAGE_COLOURS, runs)


def _stacked(
    name: str,
    title: str,
    note: str,
    known: Sequence[tuple[str, RolloutPhase | LatencyStage, str]],
    colours: dict[str, str],
    runs: Named,
) -> Chart | None:
    """Returns a bar for each policy with the mean seconds of its parts.

    Args:
        known: run, part, name of the part.
    """
    values = [
        {
            "series": series_name(label, part.policy, runs),
            "part": said,
            "order": list(colours).index(said),
            "share": part.share,
            "mean": part.seconds.mean,
            "p50": part.seconds.p50,
            "p90": part.seconds.p90,
        }
        for label, part, said in known
    ]
    if not values:
        return None
    scale = {"domain": list(colours), "range": list(colours.values())}
    tip = [channel("series", "N"), channel("part", "N"), channel("mean", format=".2f"), channel("p50", format=".2f")]
    encoding = {
        "y": channel("series", "N", None),
        "x": channel("mean", title="mean seconds of a rollout", stack="zero"),
        "color": channel("part", "N", None, scale=scale),
        "order": channel("order"),
        "tooltip": [*tip, channel("p90", format=".2f"), channel("share", format=".1%")],
    }
    spec = spec_of(values, mark="bar", encoding=encoding, height=height_of(values, "series", 34))
    return Chart(name=name, title=title, note=note, spec=spec)


def failures(runs: Named) -> Chart | None:
    """Returns failures and repeated attempts by cause."""
    values = [
        {"run": label, "cause": cause or "unknown", "what": what, "count": count}
        for label, run in runs
        for what, counts in (("failed", run.failures_by_kind), ("repeated", run.repeated))
        for cause, count in counts.items()
    ]
    if not values:
        return None
    scale = {"domain": ["failed", "repeated"], "range": [OUTCOMES["failed"], OUTCOMES["truncated"]]}
    encoding = {
        "y": channel("cause", "N", None, sort="-x"),
        "x": channel("count", title="rollouts that failed, attempts that were repeated"),
        "color": channel("what", "N", None, scale=scale),
        "tooltip": [channel("run", "N"), channel("cause", "N"), channel("what", "N"), channel("count")],
        **({"row": channel("run", "N", None)} if len(runs) > 1 else {}),
    }
    spec = spec_of(values, mark="bar", encoding=encoding, height=height_of(values, "cause", 26))
    if len(runs) > 1:
        spec |= OF_ROWS
    return Chart(name="failures", title="Failures", note="By cause; what was repeated may have succeeded.", spec=spec)


def tasks(runs: Named) -> Chart | None:
    """Returns the slowest tasks by policy. Only one run is drawn, since the table compares several."""
    if len(runs) > 1 or not runs[0][1].tasks:
        return None
    tasks = sorted(runs[0][1].tasks, key=lambda task: -task.seconds)[:TASKS_SHOWN]
    values = [
        {"task": task.task, "series": task.policy, "seconds": task.seconds, "mean": task.mean, "samples": task.samples}
        for task in tasks
    ]
    encoding = {
        "y": channel("task", "N", None, sort="-x"),
        "x": channel("seconds", title="median seconds of a rollout"),
        "color": by_series(),
        "tooltip": [
            channel("task", "N"),
            channel("series", "N"),
            channel("seconds"),
            channel("mean"),
            channel("samples"),
        ],
    }
    spec = spec_of(values, mark={"type": "point", "opacity": 0.8, "size": 70}, encoding=encoding)
    spec["height"] = height_of(values, "task", 16)
    return Chart(name="slow-tasks", title="Slowest tasks", note="Median over a task's samples.", spec=spec)


def cost(runs: Named) -> Chart | None:
    """Returns hours held by role."""
    values = []
    for label, run in runs:
        for role in run.cost.roles:
            for what, hours, idle in (
                ("core-hours", role.core_hours, role.idle_core_hours),
                ("GPU-hours", role.gpu_hours, role.idle_gpu_hours),
            ):
                row = {"role": series_name(label, role.role, runs), "what": what}
                parts = {"held": hours} if idle is None else {"in use": hours - idle, "idle": idle}
                values += [{**row, "series": name, "hours": value} for name, value in parts.items() if value]
    if not values:
        return None
    encoding = {
        "y": channel("role", "N", None),
        "x": channel("hours", title="hours"),
        "row": channel("what", "N", None),
        "color": by_series(),
        "tooltip": [channel("role", "N"), channel("what", "N"), channel("series", "N"), channel("hours", format=".4f")],
    }
    spec = spec_of(values, mark="bar", encoding=encoding, height={"step": 26}, resolve={"scale": {"x": "independent"}})
    spec |= OF_ROWS
    note = (
        "What jobs held, by role; with accounting also how much of it was idle: pods while none of their rollouts ran."
    )
    return Chart(name="cost", title="Core-hours and GPU-hours", note=note, spec=spec)


def efficiency(runs: Named) -> Chart | None:
    """Returns how much of the held resources jobs used."""
    values = [
        {
            "series": series_name(label, job.role, runs),
            "what": what,
            "share": share,
            "job": job.job,
            "hours": job.seconds / 3600,
        }
        for label, run in runs
        for job in run.cost.jobs
        for what, share in (("cpu used of held", job.cpu_efficiency), ("memory peak of asked", job.memory_efficiency))
        if share is not None
    ]
    if not values:
        return None
    encoding = {
        "x": channel("share", title=None, axis={"format": "%"}, scale={"domainMin": 0}),
        "y": channel("series", "N", None),
        "color": by_series(),
        "row": channel("what", "N", None),
        "tooltip": [channel("job", "N"), channel("share", format=".1%"), channel("hours", format=".3f")],
    }
    spec = spec_of(values, mark={"type": "tick", "thickness": 2}, encoding=encoding, height={"step": 30})
    spec |= OF_ROWS
    note = "One line for each start of a job, as seff would show it."
    return Chart(name="efficiency", title="CPU and memory of jobs", note=note, spec=spec)
