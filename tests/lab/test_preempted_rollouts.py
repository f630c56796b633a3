"""Rollouts whose pod Slurm takes the nodes from: in the pod's next start one goes on, another begins anew."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.host import process
from tests.support.scripted import ENGINE, block
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm")]

SLURM = """\
slurm:
  pods: {partition: preempt, count: 1, ranks_per_node: 2, slots_per_rank: 2, mem_gb: 1, time: 10}
  servers: {partition: gpu, time: 10}
"""
LATE_S = 45.0
"""Longer than Slurm takes to preempt on a busy machine: the agent waits for its model then."""
TOLD_S = 5.0
"""Longer than an agent on a busy machine takes from the end of its command to its next call of the model."""


def idle(mark: str) -> bool:
    """Whether the sandbox with the directory ``/<mark>`` runs nothing but the shells of its runner."""
    inside = [pid for pid in process.processes() if os.path.isdir(f"/proc/{pid}/root/{mark}")]
    return bool(inside) and all(map(is_runner, inside))


def test_what_preemption_finds_waiting_for_its_model_goes_on_and_nothing_that_died_of_it_is_judged(
    tmp_path: Path, make_campaign: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path / "scratch"))
    mark = f"kept-{uuid.uuid4().hex}"
    commands = [f"echo one >> log; mkdir /{mark}", "echo two >> log", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    answers = [block(command) for command in commands]
    script = {"default": [answers[0], {"text": answers[1], "delay_s": LATE_S}, answers[2]]}
    (tmp_path / "answers.yaml").write_text(json.dumps(script))
    test = f'[ "$(cat log)" = oracle ] || {{ [ "$(cat log)" = "$(printf "one\\ntwo")" ] && [ -d /{mark} ]; }}'
    extra = f"models:\n  mini: {{{ENGINE}, gpus: 0, agent: mini-swe-agent}}\n  solved: {{{ENGINE}, gpus: 0}}\n{SLURM}"
    solution = f"sleep {LATE_S}; echo oracle > log"
    path = make_campaign(1, extra, agent="oracle", test=test, solution=solution)
    run = Campaign.from_yaml(path).submit()
    until(lambda: list(tmp_path.glob(f"scratch/megaflow-*/owners/*/*/layer/upper/{mark}")), "the first command has run")
    until(lambda: idle(mark), "it has ended; the agent is told, and then waits for the model for far longer")
    time.sleep(TOLD_S)
    command = ["sbatch", "--parsable", "-p", "cpu", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
    subprocess.run(command, check=True, capture_output=True)
    summary = run.wait(timeout_s=240)
    assert summary["state"] == "finished"
    until(lambda: run.live_jobs(0) == set(), "every job has left")  # engines too: they look into RUN, which goes
    assert not run.dir.partial.exists()
    assert {pod["pod"].rpartition(".")[2] for pod in summary["pods"]} == {"0", "1"}
    with open_trajectories(run.path) as store:
        assert len(store) == 2
        trajectory, other = (store[f"task0/{policy}/0"].trajectory() for policy in ("mini", "solved"))
    assert (other.status, other.error, other.reward) == ("completed", "", 1.0)
    assert [(a.status, a.error_kind) for a in other.attempts] == [("cancelled", "preemption"), ("completed", "")]
    assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", "", 1.0)
    assert len(trajectory.turns) == 3
    first, second = trajectory.attempts
    assert (first.status, first.error_kind, second.status) == ("cancelled", "preemption", "completed")
    assert first.error == "cut short after turn 1; its state was kept"
    assert first.job_id == second.job_id
