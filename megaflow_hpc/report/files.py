"""Writes the files of a report: ``index.html``, ``figures.json`` and a PNG per chart, or a single metrics file.

Publishes each file by rename, with the page last. A later report replaces only the files that it writes, and leaves
all other files alone, including PNGs of charts that it lacks.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import to_json, without_links, write_atomic
from megaflow_hpc.report.charts import Chart, charts_of
from megaflow_hpc.report.comparison import Difference, matrix_of
from megaflow_hpc.report.cost import HOUR
from megaflow_hpc.report.figures import LoadedRun, RunFigures, to_builtins
from megaflow_hpc.report.page import page
from megaflow_hpc.report.timeline import bars_of
from megaflow_hpc.report.transcripts import Wanted
from megaflow_hpc.rundir.layout import RunDir

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
    """Returns a comparison as JSON. ``comparison`` lists the differences, and ``matrix`` the rewards of tasks by
    arm."""
    return {"comparison": to_builtins(differences), "matrix": to_builtins(matrix_of(figures))}


def write_metrics(path: Path, figures: Sequence[RunFigures]) -> Path:
    """Writes a metrics file. It is world-readable, because the node exporter runs as another user.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path.suffix != ".prom":
        raise ConfigError(f"{path}: the node exporter reads files that end in .prom; name it so")
    try:
        write_atomic(path, prometheus_text(figures), mode=0o644)
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
    """Yields (file name, PNG bytes) for each chart."""
    for chart in charts:
        yield f"{file_name(chart.name)}.png", chart.png()


def file_name(name: str) -> str:
    """Converts a chart's name, which contains the campaign's name, to a safe file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "chart"


# --- metrics ----------------------------------------------------------------------------------------------------------

Sample = tuple[str, str, dict[str, str], float | None]
"""Sample of a metric as (name, help, labels, value). The value is ``None`` if unknown."""
NAMESPACE = "megaflow"


def prometheus_text(runs: Sequence[RunFigures]) -> str:
    """Formats the metrics of all runs in the Prometheus text format, for the node exporter's textfile collector.

    Names and units follow https://prometheus.io/docs/practices/naming/: base units, ``_total`` for counters, ``_ratio``
    for values from 0 to 1. Samples of the same metric are adjacent, as the format requires. They have no timestamps,
    because the textfile collector rejects them.
    """
    families: dict[str, list[str]] = {}
    names = [run.run for run in runs]
    for number, run in enumerate(runs, 1):
        name = run.run if names.count(run.run) == 1 else f"{run.run} ({number})"
        labels = {"campaign": run.campaign, "run": name}
        for metric, help_, more, value in _samples(run):
            if value is None or not math.isfinite(value):
                continue
            full = f"{NAMESPACE}_{metric}"
            kind = "counter" if metric.endswith("_total") else "gauge"
            lines = families.setdefault(full, [f"# HELP {full} {help_}", f"# TYPE {full} {kind}"])
            pairs = [f'{key}="{_escaped(text)}"' for key, text in {**labels, **more}.items()]
            lines.append(f"{full}{{{','.join(pairs)}}} {value:.12g}")
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _samples(run: RunFigures) -> Iterator[Sample]:
    yield "run_finished", "Whether the campaign has finished.", {}, float(run.state == "finished")
    yield "report_timestamp_seconds", "Unix time at which these metrics were computed.", {}, time.time()
    yield "rollouts_planned", "Rollouts of the campaign.", {}, run.total
    for policy in run.policies:
        own = {"policy": policy.policy}
        for state, count in policy.states.items():
            yield "rollouts_stored_total", "Rollouts stored, by status.", {**own, "status": state}, count
        evaluation = policy.evaluation or {}
        yield "rollouts_passed_total", "Rollouts that passed.", own, evaluation.get("passed")
        yield "reward_mean", "Mean reward over tasks.", own, evaluation.get("mean")
        for k, point in evaluation.get("pass_at", {}).items():
            yield (
                "pass_at_k_ratio",
                "Probability that at least one of k samples passes.",
                {**own, "k": k},
                point["value"],
            )
        yield "tokens_total", "Tokens, including prompts.", own, policy.tokens.total
        yield "token_sequences_total", "Token sequences, whose prompts overlap.", own, policy.sequences.total
        yield "sampled_tokens_total", "Tokens that a model sampled.", own, policy.sampled_tokens.total
        yield "rollout_cpu_seconds_total", "CPU seconds of sandboxes.", own, policy.cpu_s.total
        peak = 1e6 * policy.memory_peak_mb.max
        yield "rollout_memory_peak_bytes", "Peak memory of a rollout's sandbox.", own, peak
        yield "model_calls_total", "Model calls.", own, policy.turns.total
        for quantile, value in (("0.5", policy.seconds.p50), ("0.9", policy.seconds.p90), ("0.99", policy.seconds.p99)):
            quantiles = {**own, "quantile": quantile}
            yield "rollout_duration_quantile_seconds", "Durations of rollouts.", quantiles, value
    for phase in run.phases:
        labels = {"policy": phase.policy, "phase": phase.phase}
        yield "phase_seconds_total", "Seconds of rollouts, by phase.", labels, phase.seconds.total
    for stage in run.stages:
        labels = {"policy": stage.policy, "stage": stage.stage}
        about = "Seconds from planning to the end of rollouts."
        yield "stage_seconds_total", about, labels, stage.seconds.total
    for cause, count in run.failures_by_kind.items():
        yield "rollouts_failed_total", "Rollouts that failed, by cause.", {"cause": cause}, count
    for cause, count in run.repeated.items():
        yield "attempts_repeated_total", "Failed attempts that were retried.", {"cause": cause}, count
    yield "rollouts_running_peak", "Maximum number of concurrent rollouts.", {}, run.concurrency.peak
    yield "slot_use_ratio", "Share of the slots' time during which a rollout ran.", {}, run.concurrency.slot_use
    for role in run.cost.roles:
        own = {"role": role.role}
        yield "core_seconds_total", "Core-seconds held.", own, role.core_hours * HOUR
        yield "gpu_seconds_total", "GPU-seconds held.", own, role.gpu_hours * HOUR
        yield "price_total", "Price of the held hours.", {**own, "currency": run.cost.currency}, role.price
    yield "cpu_efficiency_ratio", "CPU time divided by held core time.", {}, run.cost.cpu_efficiency
    yield "memory_efficiency_ratio", "Peak memory divided by requested memory.", {}, run.cost.memory_efficiency
    steps: dict[str, int] = {}
    for curve in run.training:
        labels = {"policy": curve.policy, "metric": curve.metric}
        yield "training_step_value", "A metric of the last step of training.", labels, curve.values[-1]
        steps.setdefault(curve.policy, curve.steps[-1])
    for policy_name, step in steps.items():
        yield "training_steps_total", "Steps of training.", {"policy": policy_name}, step


def _escaped(value: str) -> str:
    """Escapes a label value and makes it valid UTF-8."""
    text = value.encode("utf-8", "replace").decode()
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
