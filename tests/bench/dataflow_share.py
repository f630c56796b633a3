"""What the dataflow takes of a step, in processor time: every step of a run planned, packed and committed anew.

    python -m tests.bench.dataflow_share RUN

RUN is a finished run that trained its policy ``default``, as ``launchers/learn`` leaves it; a copy of it is worked on.
Reading the journals is in the plans, mostly in the first one, since all rollouts are there from the start.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.training.plan import StepPlan, TrainingFiles

R = TypeVar("R")
LOOKS = 200


def timed(call: Callable[[], R], into: list[float]) -> R:
    """Calls, and notes the milliseconds of processor time that it took."""
    began = time.process_time()
    found = call()
    into.append(1000 * (time.process_time() - began))
    return found


def pack(step: Step) -> None:
    """Makes every micro-batch of a step, as the trainer does."""
    for minibatch in step.minibatches():
        for _ in minibatch.microbatches(step._flow.settings.microbatch):
            pass


def main() -> int:
    parser = argparse.ArgumentParser(description="processor time of the dataflow in each step of a run")
    parser.add_argument("run", type=Path)
    source: Path = parser.parse_args().run
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        run = RunDir(Path(folder) / source.name)
        shutil.copytree(source, run.path, symlinks=True)
        (run.path / "ledger" / "finished").unlink(missing_ok=True)
        files = TrainingFiles(run, "default")
        steps = files.numbers(StepPlan)
        for left in ("steps", "commits", "trainers"):
            shutil.rmtree(files.path / left)
        flow = Dataflow(run, say=lambda text: None)
        flow.start()
        plans: list[float] = []
        packs: list[float] = []
        commits: list[float] = []
        looks: list[float] = []
        for number in steps:
            plan = timed(partial(flow.try_plan, number), plans)
            assert plan is not None, number
            step = Step(flow, plan)
            timed(partial(pack, step), packs)
            timed(step.commit, commits)
        for _ in range(LOOKS):
            timed(partial(flow.try_plan, len(steps) + 1), looks)
        flow.leave()
    print(
        f"{len(steps)} steps, ms of processor time in each: {mean(plans):.1f} to read and plan, {mean(packs):.1f} to "
        f"pack, {mean(commits):.1f} to commit; {median(looks):.2f} for a look that finds nothing"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
