"""Training curves: metrics of each policy's steps, from the commits of its trainer."""

from __future__ import annotations

import math

import msgspec

from megaflow_hpc.monitor.training import SHOWN
from megaflow_hpc.report.series import significant, thinned
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.rundir.training import TrainingView

STEPS = 500
"""Maximum number of points of a curve."""
MOST = 1_000_000


class TrainingCurve(msgspec.Struct, kw_only=True):
    """One metric of one policy by step."""

    policy: str
    metric: str
    """Name of the metric in ``status --json``."""
    steps: list[int]
    values: list[float]


def curves_of(run: RunDir, record: RunRecord) -> list[TrainingCurve]:
    """Returns the curves of every trained policy. Unreadable commits are left out."""
    if not record.campaign.get("training"):
        return []
    found = []
    for policy in record.config.training.policies if record.config.training else ():
        commits = TrainingView(run, policy).commits(MOST)
        for metric, name in SHOWN.items():
            points = [(commit.step, commit.metrics[metric]) for commit in commits if metric in commit.metrics]
            points = [(step, value) for step, value in points if math.isfinite(value)]
            points = [points[place] for place in thinned(len(points), STEPS).tolist()]
            if points:
                steps, values = [step for step, _ in points], [significant(value) for _, value in points]
                found.append(TrainingCurve(policy=policy, metric=name, steps=steps, values=values))
    return found
