"""Charts of results: pass@k, differences, rewards, tokens and turns, training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from megaflow_hpc.report.charts.specs import (
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
from megaflow_hpc.report.comparison import Difference


def pass_at(runs: Named) -> Chart | None:
    """Charts pass@k over k, or pass@1 of each policy if no task has two samples."""
    values = _of_policies(runs, "pass_at")
    if not values:
        return None
    scale = {"domain": [0, 1]}
    tip = tooltip(series="N", k="", value=".3f", low=".3f", high=".3f")
    if max(value["k"] for value in values) == 1:  # a curve needs two points
        spec = _intervals(values, channel("low", title="pass@1", scale=scale), "value", tip)
    else:
        x = channel("k", title="k samples", scale={"type": "log", "base": 2}, axis={"tickMinStep": 1, "format": "d"})
        band = {"y": channel("low", title="chance that one passes", scale=scale), "y2": channel("high")}
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


def differences(of_runs: Sequence[Difference]) -> Chart | None:
    """Charts the difference of each run from the first, with its interval."""
    values = []
    for one in of_runs:
        if one.difference is not None:
            numbers = {"difference": one.difference, "low": one.low, "high": one.high, "tasks": one.tasks}
            values.append({"series": f"{one.run}: {one.policy}", **numbers})
    if not values:
        return None
    x = channel("low", title=f"difference of mean reward from {of_runs[0].against_run}")
    tip = tooltip(series="N", difference="+.3f", low="+.3f", high="+.3f", tasks="")
    spec = _intervals(values, x, "difference", tip)
    zero = {"mark": {"type": "rule", "strokeDash": [4, 4], "opacity": 0.5}, "encoding": {"x": {"datum": 0}}}
    spec["layer"].insert(0, zero)
    note = "Paired by task, with the 95 % interval of the mean difference over tasks."
    return Chart(name="difference", title="Difference", note=note, spec=spec)


def _intervals(values: Data, x: Spec, value: str, tip: Sequence[Spec]) -> Spec:
    """Charts a point on a line from ``low`` to ``high`` for each series."""
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
    """Flattens a list field of every policy's figures into data rows."""
    rows = []
    for label, run in runs:
        for policy in run.policies:
            series = series_name(label, policy.policy, runs)
            rows += [{"series": series, **msgspec.to_builtins(item)} for item in getattr(policy, name)]
    return rows


def _histogram(
    name: str, title: str, note: str, values: Data, runs: Named, scale: dict[str, Any] | None = None
) -> Chart | None:
    if not values:
        return None
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
    return Chart(name=title.lower(), title=title, note=note, spec=spec_of(values, mark=mark, encoding=encoding))


def rewards(runs: Named) -> Chart | None:
    """Charts the distribution of rewards."""
    note = "Rollouts by reward, those without a verdict left out."
    values = _of_policies(runs, "rewards")
    for low, high in ((0.0, 1.0), (-0.5, 1.5)):  # shares, or only 0 and 1: show both ends even if all passed
        if all(low <= value["low"] and value["high"] <= high for value in values):
            return _histogram("reward", "Rewards", note, values, runs, {"domain": [low, high]})
    return _histogram("reward", "Rewards", note, values, runs)


def tokens(runs: Named) -> Iterator[Chart | None]:
    """Yields charts of the distributions of tokens and model calls; none if no policy calls a model."""
    if any(policy.turns.max for _, run in runs for policy in run.policies):
        note = "Of each rollout that was carried out, prompts included."
        yield _histogram("tokens", "Tokens", note, _of_policies(runs, "token_bins"), runs)
        note = "Model calls of each rollout that was carried out."
        yield _histogram("model calls", "Turns", note, _of_policies(runs, "turn_bins"), runs)


def use(runs: Named) -> Iterator[Chart | None]:
    """Yields charts of the distributions of CPU time and memory of rollouts."""
    note = "CPU seconds of the sandboxes of each rollout that was carried out, the verifier's included."
    yield _histogram("CPU seconds", "CPU of rollouts", note, _of_policies(runs, "cpu_bins"), runs)
    note = "The most memory that the sandboxes of each rollout were seen to hold."
    yield _histogram("MB", "Memory of rollouts", note, _of_policies(runs, "memory_bins"), runs)


def training(runs: Named) -> Iterator[Chart]:
    """Yields one chart per metric: its curve over training steps."""
    titles = {"reward": "Reward", "passed": "Share that passed", "staleness": "Staleness", "entropy": "Entropy"}
    titles |= {"clipped": "Share clipped", "mismatch": "Mismatch", "tokens_per_s": "Tokens per second"}
    for metric, title in titles.items():
        values = []
        for label, run in runs:
            for curve in run.training:
                if curve.metric == metric:
                    series = series_name(label, curve.policy, runs)
                    for step, value in zip(curve.steps, curve.values, strict=True):
                        values.append({"series": series, "step": step, "value": value})
        if values:
            encoding = {
                "x": channel("step"),
                "y": channel("value", title=metric),
                "color": by_series(),
                "tooltip": tooltip(series="N", step="", value=".4g"),
            }
            spec = spec_of(values, mark={"type": "line"}, encoding=encoding, height=180)
            note = "As the trainer committed it."
            yield Chart(name=f"training-{metric}", title=f"{title} over steps", note=note, spec=spec)
