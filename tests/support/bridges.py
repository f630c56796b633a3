"""The first step of a campaign, as a bridge receives it while pods work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.types import Rollout
from tests.support.training import Pods, training_run

TRAINING = {"staleness": 0, "batch": 2, "steps": 3}


def by_index(rollout: Rollout) -> float:
    """Return a reward that differs within every group."""
    return float(rollout.sample_index % 2)


def pods(run: RunDir) -> Pods:
    """Return pods whose engines load each version at once."""
    return Pods(run, by_index, lambda: current(run, "default").version)


@contextmanager
def meanwhile(*work: Callable[[], object]) -> Iterator[None]:
    """Call each of ``work`` repeatedly in a thread."""
    ended = threading.Event()

    def again() -> None:
        while not ended.wait(0.01):
            for one in work:
                one()

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def first_step(path: Path, samples: int = 4, **training: Any) -> Step:
    """Returns the first step of a new run."""
    run = training_run(path, {**TRAINING, **training}, tasks=3, samples=samples)
    flow, own = Dataflow(run), pods(run)
    with meanwhile(own.work):
        step = next(flow.steps())
    flow.close()
    return step
