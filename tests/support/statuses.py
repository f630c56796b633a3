"""A planned run without rollouts, and its status without the values that depend on the time of the look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, write_run
from tests.support.ledgers import prepared


def make(path: Path) -> RunDir:
    """Make a planned run."""
    run = prepared(path)
    write_run(run, RunRecord(campaign={"name": "x"}, total=10_000))
    return run


def said(run: RunDir, listed: bool = False) -> dict[str, Any]:
    """Return the status of a first poll without the values that depend on its time."""
    monitor = Monitor(run)
    if listed:
        monitor.list_rollouts()
    status = monitor.status()
    told = {key: value for key, value in status.items() if key not in ("rate_per_s", "eta_s")}
    told["pods"] = [{key: value for key, value in pod.items() if key != "silent_s"} for pod in status["pods"]]
    told["first_failures"] = sorted(told["first_failures"], key=lambda cause: str(cause["kind"]))
    places = monitor.running.longest([pod["pod"] for pod in status["pods"]])
    badly = [event for event in monitor.rollouts.values() if event.status in ("failed", "cancelled")]
    return {
        **told,
        "places": places,
        "at_work": sorted(monitor.at_work()),
        "badly": sorted((event.id, event.status, event.kind, event.t, event.turns) for event in badly),
    }
