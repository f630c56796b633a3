"""Figures of a run, typed and bounded in size. ``report --json`` prints them. Charts and tables are built from
them::

    figures = figures_of("runs/fix-bugs-…")
    figures.policies[0].evaluation["mean"], figures.phases[0].seconds.p90

This module does not query Slurm. The caller passes in the accounting data.

All tasks and pods are included. Lists that could grow with the number of rollouts (errors, stragglers, jobs, curve
points) are capped by constants.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megaflow_hpc.config.campaign import pass_threshold_of
from megaflow_hpc.ledger.tasks import accepted_line
from megaflow_hpc.monitor.training import BY_AGENT, SHOWN
from megaflow_hpc.monitor.usage import JobUse
from megaflow_hpc.report.cost import Cost, Prices, cost_of
from megaflow_hpc.report.policies import (
    STATES,
    Arm,
    LatencyStage,
    PolicyFigures,
    RolloutPhase,
    TaskFigures,
    arms_of,
    phases_of,
    policy_figures,
    stages_of,
    tasks_of,
)
from megaflow_hpc.report.rollouts import RolloutColumns, attempt_spans, read_rollouts
from megaflow_hpc.report.series import Integers, significant, thinned
from megaflow_hpc.report.timeline import Concurrency, Events, PodFigures, concurrency_of, pods_of, read_events
from megaflow_hpc.rundir.budget import Used
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import RunRecord, read_jobs, read_run
from megaflow_hpc.rundir.training import TrainingView
from megaflow_hpc.trajectories.hdf5.file import attribute
from megaflow_hpc.trajectories.reading.sources import Hdf5Source
from megaflow_hpc.trajectories.reading.store import TrajectoryStore, open_trajectories

MAX_CURVE_POINTS = 500
MAX_COMMITS = 1_000_000


class TrainingCurve(msgspec.Struct, kw_only=True):
    """A metric of a policy over training steps."""

    policy: str
    metric: str
    """Name of the metric as in ``status --json``."""
    steps: list[int]
    values: list[float]


class RunFigures(msgspec.Struct, kw_only=True):
    """All figures of a run."""

    run: str
    """Name of the run directory or file."""
    campaign: str
    state: str
    versions: dict[str, Any]
    total: int
    """Number of planned rollouts, or of stored rollouts if that is larger."""
    stored: int
    states: dict[str, int]
    started_at: float
    """Start of the first rollout in Unix seconds. 0 if there are no rollouts."""
    seconds: float
    """Seconds from the start of the first rollout to the end of the last rollout."""
    tail_seconds: float
    """Seconds from the time when 95 % of the rollouts had ended to the end of the last rollout."""
    rollouts_per_hour: float
    policies: list[PolicyFigures]
    phases: list[RolloutPhase]
    stages: list[LatencyStage]
    """Mean stages of each policy's rollouts. Empty if the campaign trains a policy, or if its planning time is
    unknown."""
    unphased: int
    """Number of completed or truncated rollouts without recorded phases."""
    concurrency: Concurrency
    pods: list[PodFigures]
    tasks: list[TaskFigures]
    arms: list[Arm]
    failures: list[Failure]
    failures_by_kind: dict[str, int]
    failures_by_node: dict[str, int]
    repeated: dict[str, int]
    """Maps each cause to the number of failed attempts that were retried."""
    stragglers: list[Straggler]
    cost: Cost
    models: Used = {}
    """Maps each judge, external endpoint and priced model to its usage in stored rollouts."""
    training: list[TrainingCurve] = []


class LoadedRun:
    """A run with its figures and its open store. Use it as a context manager.

    Args:
        path: A run directory, finished or not, or a ``trajectories.h5``.
        uses: Accounting data of the run's jobs.

    Raises:
        ConfigError: ``path`` is neither a run nor a trajectory file, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], uses: Sequence[JobUse] = (), prices: Prices | None = None) -> None:
        path = Path(path)
        self.run = RunDir(path) if path.is_dir() else None
        record = read_run(self.run) if self.run else RunRecord()
        self.store = open_trajectories(path)
        try:
            self.rollouts = read_rollouts(self.store)
            self.events = read_events(self.run) if self.run else Events()
            self.figures = self._figures(path, record, uses, prices or Prices())
        except BaseException:
            self.store.close()
            raise

    def __enter__(self) -> LoadedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def _figures(self, path: Path, record: RunRecord, uses: Sequence[JobUse], prices: Prices) -> RunFigures:
        rows, events = self.rollouts, self.events
        self.threshold = threshold_of(record, self.store)
        """Minimum reward at which a rollout counts as passed."""
        policies = [policy_figures(rows, name, self.threshold) for name in rows.policy.names]
        began = seconds = tail_seconds = 0.0
        if len(rows):
            ended = np.sort(rows.finished_at)
            began = float(rows.started_at.min())
            seconds = float(ended[-1] - began)
            tail_seconds = float(ended[-1] - ended[int(0.95 * (len(rows) - 1))])
        grows = bool(record.campaign.get("training"))
        total = max(record.total, len(rows))
        passed = sum(policy.evaluation["passed"] for policy in policies if policy.evaluation)
        attempts = attempt_spans(self.store, rows) if uses else []
        failed = rows.status.where("failed")
        changed = accepted_line(self.run) if self.run else ""
        return RunFigures(
            run=path.resolve().name,
            campaign=self.store.campaign or record.name,
            state=self._state(),
            versions={**self.store.versions, **({"changed tasks": changed} if changed else {})},
            total=total,
            stored=len(rows),
            states={state: int(rows.status.where(state).sum()) for state in STATES},
            started_at=began,
            seconds=significant(seconds),
            tail_seconds=significant(tail_seconds),
            rollouts_per_hour=significant(len(rows) / seconds * 3600) if seconds else 0.0,
            policies=policies,
            phases=phases_of(rows),
            stages=[] if grows else stages_of(rows, record.planned_at, self._submitted_at()),
            unphased=int((rows.carried_out & np.isnan(rows.phases["environment"])).sum()),
            concurrency=concurrency_of(rows, events, total, grows),
            pods=pods_of(rows, events),
            tasks=tasks_of(rows, self.threshold),
            arms=arms_of(rows),
            failures=failures_of(rows),
            failures_by_kind=counted(rows.error_kind.names, rows.error_kind.codes[failed]),
            failures_by_node=counted(rows.node.names, rows.node.codes[failed]),
            repeated=dict(sorted(events.repeated.items())),
            stragglers=stragglers_of(rows),
            cost=cost_of(self.run, uses, attempts, prices, len(rows), passed),
            models=events.models,
            training=curves_of(self.run, record) if self.run else [],
        )

    def _submitted_at(self) -> float:
        """Returns the submission time of the first job in Unix seconds. 0 if unknown."""
        jobs = read_jobs(self.run).values() if self.run else ()
        return min((job.submitted_at for job in jobs if job.submitted_at), default=0.0)

    def _state(self) -> str:
        if self.run is None:
            return "a file"
        marks = Marks(self.run)
        if marks.finished:
            return "finished"
        return "cancelled" if marks.cancelled else "unfinished"


def figures_of(path: str | os.PathLike[str], uses: Sequence[JobUse] = (), prices: Prices | None = None) -> RunFigures:
    """Returns the figures of a run directory or a ``trajectories.h5``. See :class:`LoadedRun`."""
    with LoadedRun(path, uses, prices) as loaded:
        return loaded.figures


def threshold_of(record: RunRecord, store: TrajectoryStore) -> float:
    """Returns the campaign's ``pass_threshold``, or the default if none is recorded."""
    campaign = record.campaign
    if not campaign and isinstance(store.recorded, Hdf5Source):
        campaign = attribute(store.recorded.file, "config") or {}
    return pass_threshold_of(campaign)


def to_builtins(figures: Any) -> Any:
    """Converts figures to JSON-compatible values."""
    return msgspec.to_builtins(figures, enc_hook=str, str_keys=True)  # msgspec's encoder rejects lone surrogates


def curves_of(run: RunDir, record: RunRecord) -> list[TrainingCurve]:
    """Returns the curves of every trained policy, from its trainer's commits. Skips unreadable commits."""
    if not record.campaign.get("training") or not record.config.training:
        return []
    curves = []
    for policy in record.config.training.policies:
        commits = TrainingView(run, policy).commits(MAX_COMMITS)
        # (metric, name, series). If there are several agents, the rewards of each agent form a series.
        shown = [(metric, name, policy) for metric, name in SHOWN.items()]
        by_agent = sorted({metric for commit in commits for metric in commit.metrics if metric.startswith(BY_AGENT)})
        shown += [(metric, "reward", f"{policy}+{metric.removeprefix(BY_AGENT)}") for metric in by_agent]
        for metric, name, series in shown:
            points = []
            for commit in commits:
                value = commit.metrics.get(metric, math.nan)
                if math.isfinite(value):
                    points.append((commit.step, significant(value)))
            points = [points[index] for index in thinned(len(points), MAX_CURVE_POINTS).tolist()]
            if points:
                steps = [step for step, _ in points]
                values = [value for _, value in points]
                curves.append(TrainingCurve(policy=series, metric=name, steps=steps, values=values))
    return curves


# --- failures and stragglers ------------------------------------------------------------------------------------------

MAX_STRAGGLERS = 25
MAX_FAILURES = 40
"""Maximum number of failures, causes or nodes to list."""


class Failure(msgspec.Struct, kw_only=True):
    """Rollouts that failed with the same error. Numbers in the error are ignored."""

    kind: str
    error: str
    """Error of the first rollout in the group."""
    rollouts: int
    example: str
    """Id of the first rollout in the group."""
    nodes: int


class Straggler(msgspec.Struct, kw_only=True):
    """An unusually slow rollout."""

    rollout: str
    seconds: float
    usual: float
    """Median duration in seconds of the task if at least three samples ran, otherwise of the policy."""
    phase: str
    """The longest phase. Empty if unknown."""
    node: str


def failures_of(rows: RolloutColumns) -> list[Failure]:
    """Groups rollouts by kind and text of their error, ignoring numbers. Largest group first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for row in range(len(rows)):
        kind = rows.error_kind.of(row)
        if kind:
            pattern = re.sub(r"\d", "0", rows.error[row])
            groups.setdefault((kind, pattern), []).append(row)
    largest = sorted(groups.items(), key=lambda item: -len(item[1]))[:MAX_FAILURES]
    return [
        Failure(
            kind=kind,
            error=rows.error[own[0]],
            rollouts=len(own),
            example=rows.ids[own[0]],
            nodes=len({int(rows.node.codes[row]) for row in own}),
        )
        for (kind, _), own in largest
    ]


def stragglers_of(rows: RolloutColumns) -> list[Straggler]:
    """Returns the slowest completed or truncated rollouts, slowest first, with the usual duration for comparison."""
    seconds = rows.seconds
    carried_out = np.flatnonzero(rows.carried_out)
    slowest = carried_out[np.argsort(-seconds[carried_out], kind="stable")][:MAX_STRAGGLERS]
    stragglers = []
    for row in slowest.tolist():
        of_policy = rows.carried_out & (rows.policy.codes == rows.policy.codes[row])
        of_task = of_policy & (rows.task.codes == rows.task.codes[row])
        alike = of_task if of_task.sum() >= 3 else of_policy
        phases = {name: float(values[row]) for name, values in rows.phases.items() if not np.isnan(values[row])}
        stragglers.append(
            Straggler(
                rollout=rows.ids[row],
                seconds=significant(float(seconds[row])),
                usual=significant(float(np.median(seconds[alike]))),
                phase=max(phases, key=lambda name: phases[name]) if any(phases.values()) else "",
                node=rows.node.of(row),
            )
        )
    return stragglers


def counted(names: Sequence[str], codes: Integers) -> dict[str, int]:
    """Counts the occurrences of each name, most frequent first."""
    counts = Counter(names[code] for code in codes.tolist())
    return dict(counts.most_common(MAX_FAILURES))
