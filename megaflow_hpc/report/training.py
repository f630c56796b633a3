"""How training went: metrics of each policy's steps, as its trainer committed them."""

from __future__ import annotations

import math

import msgspec

from megaflow_hpc.monitor.training import SHOWN
from megaflow_hpc.report.series import significant, thinned
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.rundir.training import TrainingView

STEPS = 500
"""Points of a curve."""
MOST = 1_000_000


class TrainingCurve(msgspec.Struct, kw_only=True):
    """One metric of one policy, step by step."""

    policy: str
    metric: str
    """One of the names that ``status --json`` gives them."""
    steps: list[int]
    values: list[float]


def curves_of(run: RunDir, record: RunRecord) -> list[TrainingCurve]:
    """Returns the curves of every policy that learns; a commit that cannot be read is left out."""
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
