"""Limits of a whole campaign, summed over what its pods have said."""

from __future__ import annotations

import json
import time
from pathlib import Path

from megaflow_hpc.pod.budget import Budget, cores_of
from megaflow_hpc.rundir import RunDir


def said(run: RunDir, pod: str, *core_s: float, began: float | None = None) -> Path:
    file = run.event_file(pod, "0")
    first = {"t": time.time() if began is None else began, "event": "pod"}
    lines = [first, *({"t": 0, "event": "progress", "core_s": value} for value in core_s), {"t": 0, "event": "claim"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"t": 1, "event": "prog')
    return file


def test_core_hours_are_summed_over_pods_from_the_last_that_each_has_said(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    budget = Budget(run, core_hours=2.0, wall_h=None)
    assert budget.exceeded() == ""
    said(run, "a", 10, 3600)
    said(run, "b", 3000)
    assert budget.exceeded() == ""
    said(run, "b", 3000, 3700)
    assert budget.exceeded() == "2.03 core-hours are used, limits.core_hours is 2"


def test_the_wall_limit_counts_from_the_first_pod(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    budget = Budget(run, core_hours=None, wall_h=1.0)
    said(run, "b")
    assert budget.exceeded() == ""
    said(run, "a", began=time.time() - 5400)
    assert budget.exceeded() == "the first pod started 1.50 hours ago, limits.wall is 1"


def test_cores_are_those_of_the_whole_allocation() -> None:
    assert cores_of({"SLURM_JOB_CPUS_PER_NODE": "8(x3),4"}) == 28
    assert cores_of({}) >= 1
