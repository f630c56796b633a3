"""The first step of a campaign, as a bridge receives it while pods work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaflow_hpc.training.dataflow import Dataflow, Step
from tests.support.training import Pods, meanwhile, training_run

TRAINING = {"staleness": 0, "batch": 2, "steps": 3}


def first_step(path: Path, samples: int = 4, **training: Any) -> Step:
    """Returns the first step of a new run."""
    run = training_run(path, {**TRAINING, **training}, tasks=3, samples=samples)
    flow = Dataflow(run)
    with meanwhile(Pods(run).work):
        step = next(flow.steps())
    flow.close()
    return step
