"""A stand-in for the trainer in campaigns with a scripted engine. It takes real steps of a dataflow and learns nothing.

    stand_in_trainer.py RUN POLICY     with STAND_IN_DIES=2 it is killed once, in step 2 after planning

If trainer and engine share GPUs, it takes its turns and is killed in one. Each step appends a line
``start step rollout…`` to RUN/training/POLICY/trained. :func:`interpreter` makes a program for
``MEGAFLOW_TRAINER_PYTHON``.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from megaflow_hpc.rundir.layout import RunDir
from tests.support.places import ROOT


def interpreter(path: Path, dies: int) -> Path:
    """Make a program that runs the stand-in instead of the trainer, and otherwise acts as Python."""
    path.write_text(
        f'#!/bin/bash\ncase $1 in -c) exec "{sys.executable}" "$@" ;; esac\necho "$*"\n'
        f'export PYTHONPATH="{ROOT}" STAND_IN_DIES={dies}\n'
        f'exec "{sys.executable}" -m tests.support.stand_in_trainer "$3" "$5"\n'
    )
    path.chmod(0o700)
    return path


def trained(run: RunDir, policy: str = "default") -> list[list[str]]:
    """Return the words of each line that it wrote: start, step, rollouts."""
    return [line.split() for line in (run.training / policy / "trained").read_text().splitlines()]


def train(run: str, policy: str, dies: int) -> None:
    from megaflow_hpc.training.dataflow import Dataflow
    from megaflow_hpc.training.gpu_turns import GpuTurns

    flow = Dataflow(run, policy)
    turns = GpuTurns(flow)
    flow.restore()
    for step in flow.steps():
        wake_s = turns.take(step.number)
        tokens = sum(batch.sampled for minibatch in step.minibatches() for batch in minibatch.microbatches(4096))
        ids = [rollout.id for rollout in step.plan.rollouts]
        with open(flow.files.path / "trained", "a") as told:
            told.write(f"{flow.trainer} {step.number} {' '.join(ids)}\n")
        if step.number == dies and flow.trainer == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory(dir=flow.run.path) as folder:
            (Path(folder) / "script.yaml").write_text((flow.run.path.parent.parent / "answers.yaml").read_text())
            step.publish(folder)
        turns.give()
        checkpoint = flow.files.checkpoints / str(step.number)
        checkpoint.mkdir(exist_ok=True)
        step.commit(checkpoint, {"sampled": tokens, "seconds/wake": wake_s})


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(os.environ.get("STAND_IN_DIES", "0")))
