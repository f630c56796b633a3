"""The figures of one run, typed and bounded. ``report --json`` prints them; charts and tables are made from them.

    figures = figures_of("runs/fix-bugs-…")
    figures.policies[0].evaluation["mean"], figures.phases[0].seconds.p90

This module does not query Slurm; the caller passes its accounting. All tasks and pods are included. Lists that could
grow with the rollouts (errors, stragglers, jobs, points of curves) are bounded by constants of their modules.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megaflow_hpc.config.campaign import pass_threshold_of
from megaflow_hpc.monitor.usage import JobUse
from megaflow_hpc.report.cost import Cost, Prices, cost_of
from megaflow_hpc.report.pods import Events, read_events
from megaflow_hpc.report.policies import (
    STATES,
    LatencyStage,
    PolicyFigures,
    RolloutPhase,
    TaskFigures,
    phases_of,
    policy_figures,
    stages_of,
    tasks_of,
)
from megaflow_hpc.report.rollouts import read_rollouts, worked
from megaflow_hpc.report.series import significant
from megaflow_hpc.report.timeline import Concurrency, PodFigures, concurrency_of, pods_of
from megaflow_hpc.report.training import TrainingCurve, curves_of
from megaflow_hpc.report.troubles import Failure, Straggler, counted, failures_of, stragglers_of
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, read_jobs, read_run
from megaflow_hpc.trajectories.hdf5.file import attribute
from megaflow_hpc.trajectories.reading.sources import Hdf5Source
from megaflow_hpc.trajectories.reading.store import TrajectoryStore, open_trajectories


class RunFigures(msgspec.Struct, kw_only=True):
    """The figures of one run."""

    run: str
    """Name of the run directory, or of the file."""
    campaign: str
    state: str
    versions: dict[str, Any]
    total: int
    """Rollouts of the campaign, as far as known."""
    stored: int
    states: dict[str, int]
    started_at: float
    """Start of the first rollout, seconds UTC; 0 without one."""
    seconds: float
    """Seconds from the start of the first rollout to the end of the last one."""
    tail_seconds: float
    """Seconds from the moment when 95 % of the rollouts had ended to the end of the last one."""
    rollouts_per_hour: float
    policies: list[PolicyFigures]
    phases: list[RolloutPhase]
    stages: list[LatencyStage]
    """Empty if rollouts are added while the campaign runs, or if its planning time is unknown."""
    unphased: int
    """Rollouts that were carried out and have no recorded phases."""
    concurrency: Concurrency
    pods: list[PodFigures]
    tasks: list[TaskFigures]
    failures: list[Failure]
    failures_by_kind: dict[str, int]
    failures_by_node: dict[str, int]
    repeated: dict[str, int]
    """Failed attempts that were repeated, by cause."""
    stragglers: list[Straggler]
    cost: Cost
    training: list[TrainingCurve] = []


class LoadedRun:
    """A run with its figures and the open store behind them. A context manager.

    Args:
        path: a run directory, finished or not, or a ``trajectories.h5``.
        uses: accounting of its jobs.

    Raises:
        ConfigError: ``path`` is neither, or is damaged.
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
        """Minimum reward of a rollout that has passed."""
        policies = [policy_figures(rows, name, self.threshold) for name in rows.policy.names]
        states = {state: int(rows.status.where(state).sum()) for state in STATES}
        began = float(rows.started_at.min()) if len(rows) else 0.0
        submitted = [job.submitted_at for job in (read_jobs(self.run) if self.run else {}).values() if job.submitted_at]
        submitted_at = min(submitted, default=0.0)
        ended = np.sort(rows.finished_at)
        seconds = float(ended[-1] - began) if len(rows) else 0.0
        passed = sum(p.evaluation["passed"] for p in policies if p.evaluation)
        total = max(record.total, len(rows))
        failed = rows.status.where("failed")
        grows = bool(record.campaign.get("training"))
        return RunFigures(
            run=path.resolve().name,
            campaign=self.store.campaign or record.name,
            state=self._state(record),
            versions=self.store.versions,
            total=total,
            stored=len(rows),
            states=states,
            started_at=began,
            seconds=significant(seconds),
            tail_seconds=significant(float(ended[-1] - ended[int(0.95 * (len(rows) - 1))])) if len(rows) else 0.0,
            rollouts_per_hour=significant(len(rows) / seconds * 3600) if seconds else 0.0,
            policies=policies,
            phases=phases_of(rows),
            stages=[] if grows else stages_of(rows, record.planned_at, submitted_at),
            unphased=int((rows.carried_out & np.isnan(rows.phases["environment"])).sum()),
            concurrency=concurrency_of(rows, events, total, grows),
            pods=pods_of(rows, events),
            tasks=tasks_of(rows, self.threshold),
            failures=failures_of(rows),
            failures_by_kind=counted(rows.error_kind.names, rows.error_kind.codes[failed]),
            failures_by_node=counted(rows.node.names, rows.node.codes[failed]),
            repeated=dict(sorted(events.repeated.items())),
            stragglers=stragglers_of(rows),
            cost=cost_of(self.run, uses, worked(self.store, rows) if uses else [], prices, len(rows), passed),
            training=curves_of(self.run, record) if self.run else [],
        )

    def _state(self, record: RunRecord) -> str:
        if self.run is None:
            return "a file"
        from megaflow_hpc.rundir.marks import Marks

        marks = Marks(self.run)
        if marks.finished:
            return "finished"
        return "cancelled" if marks.cancelled else "unfinished"


def figures_of(path: str | os.PathLike[str], uses: Sequence[JobUse] = (), prices: Prices | None = None) -> RunFigures:
    """Returns the figures of a run directory or a ``trajectories.h5``; see :class:`LoadedRun`."""
    with LoadedRun(path, uses, prices) as loaded:
        return loaded.figures


def threshold_of(record: RunRecord, store: TrajectoryStore) -> float:
    """Returns the campaign's ``pass_threshold``, or the default if the file has no campaign."""
    campaign = record.campaign
    if not campaign and isinstance(store.source, Hdf5Source):
        campaign = attribute(store.source.file, "config") or {}
    return pass_threshold_of(campaign)


def to_builtins(figures: Any) -> Any:
    """Returns figures as values that JSON can represent."""
    return msgspec.to_builtins(
        figures, enc_hook=str, str_keys=True
    )  # not with msgspec's encoder, because texts may be invalid UTF-8
