"""A trainer without a model. Its parameters are a digest of all its training data, so every difference shows."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training.algorithms.samples import StoredRollout
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.training.plan import StepPlan
from tests.support.tensors import safetensors
from tests.support.training import Pods

START = "0" * 64
WRITING = os.O_WRONLY | os.O_RDWR


def trained(parameters: str, plan: StepPlan) -> str:
    """Return the parameters after a step."""
    told = [(r.id, r.advantage, r.weight, r.lengths, r.sampled) for r in plan.rollouts]
    return hashlib.sha256(f"{parameters} {plan.step} {told}".encode()).hexdigest()


def weights_of(parameters: str, step: int) -> bytes:
    """Return a file of weights. From one step to the next, few of its words differ, except every fifth step."""
    return safetensors(parameters.encode() + random.Random(step // 5).randbytes(2**14))


def step_through(flow: Dataflow, step: Step, parameters: str, checkpoint: bool = True, pause_s: float = 0.0) -> str:
    """Train one step: read every token, save a checkpoint, publish and commit."""
    for minibatch in step.minibatches():
        assert sum(batch.sampled for batch in minibatch.microbatches(4096)) == minibatch.tokens
    parameters = trained(parameters, step.plan)
    time.sleep(pause_s)
    folder = flow.files.checkpoints / str(step.number)
    if checkpoint and not folder.is_dir():
        staged = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        staged.mkdir()
        write_atomic(staged / "parameters", parameters)
        try:
            os.rename(staged, folder)
        except OSError:
            assert folder.is_dir()  # an earlier trainer that is still alive wrote the same first
    weights = flow.files.path / f".weights.{secrets.token_hex(4)}"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(weights_of(parameters, step.number))
    step.publish(weights, move=True)
    step.commit(folder if checkpoint else None, metrics={"seconds": pause_s})
    return parameters


def repeated(rollouts: Sequence[StoredRollout]) -> dict[str, float | None]:
    """Score rollouts by their verifiers' rewards."""
    return {sample.id: trajectory.reward for sample, trajectory in rollouts}


def _die_after(writes: int) -> None:
    """Kill this process before it changes a file or a directory once more than so often, however long that takes."""

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal writes
        if event in ("os.mkdir", "os.rename", "os.link", "os.remove") or (event == "open" and arguments[2] & WRITING):
            writes -= 1
            if writes < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def train(run: Path, every: int = 1, pause_s: float = 0.0, policy: str | None = None, writes: int | None = None) -> str:
    """Train to the end from the last checkpoint, or to the death after so many writes; return the parameters."""
    if writes is not None:
        _die_after(writes)
    flow = Dataflow(RunDir(run), policy)
    state = flow.restore()
    parameters = START if state is None else (flow.checkpoint(state) / "parameters").read_text()
    for step in flow.steps():
        parameters = step_through(flow, step, parameters, step.number % every == 0, pause_s)
    return parameters


def watched(run: RunDir, pods: Pods) -> Dataflow:
    """Return a dataflow whose pods work after each of its requests."""
    flow = Dataflow(run, say=lambda text: None)
    keep = flow.planning.control.keep

    def kept(committed: int, learned: dict[str, object]) -> None:
        keep(committed, learned)
        pods.work()

    flow.planning.control.keep = kept  # type: ignore[method-assign]
    return flow


def begun(run: RunDir, pods: Pods, **options: Any) -> Dataflow:
    """Return a dataflow whose first requests the pods have sampled."""
    flow = Dataflow(run, say=lambda text: None, **options)
    flow.start()
    assert flow.try_plan(1) is None
    pods.work()
    return flow


def planned(flow: Dataflow, step: int) -> StepPlan:
    """Return the plan of a step whose rollouts are there."""
    plan = flow.try_plan(step)
    assert plan is not None
    return plan


def drink(run: RunDir, pods: Pods) -> tuple[Dataflow, list[StepPlan]]:
    """Train to the end; return the plans."""
    flow = watched(run, pods)
    plans, parameters = [], START
    for step in flow.steps():
        plans.append(step.plan)
        parameters = step_through(flow, step, parameters)
    return flow, plans
