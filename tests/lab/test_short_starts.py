"""Pods that end before their work: by the walltime or preemption.

A campaign that waits for minutes runs in the background, on nodes that the other test does not use.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.host import process
from megaflow_hpc.slurm import accounting
from megaflow_hpc.trajectory import Trajectory
from tests.support.campaigns import Make, cli
from tests.support.harbor_tasks import write_solved_task
from tests.support.scripted import ENGINE, block
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm", "cut", "timeout")]

CUT_S = 90
"""Longer than a rollout can last in two minutes of walltime: its pod is warned a minute before the end or earlier, and
waits for 25 s then."""
WAITS = """\
import asyncio, time
from pathlib import Path
from megaflow_hpc.types import AgentResult

class Waits:
    async def run(self, task, sandbox, model):
        end = time.monotonic() + {seconds}
        while time.monotonic() < end and not Path("{flag}").exists():
            await asyncio.sleep(0.2)
        await sandbox.exec("echo 42 > answer")
        return AgentResult()
"""
"""An agent that works for longer than its first walltime, unless the flag is there."""


@pytest.fixture(scope="module")
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def campaign(folder: Path, image: Path, agent: str, **sections: Any) -> Path:
    """Writes a campaign for the nodes that the other test of this module leaves alone."""
    content = {"name": "small", "tasks": "tasks/*", "agent": agent}
    content |= {"environment": {"network": "none", "images": {"base": str(image)}}, **sections}
    content["slurm"]["pods"] |= {"partition": "gpu", "count": 1, "mem": "1G"}
    (folder / "campaign.yaml").write_text(yaml.safe_dump(content))
    return folder / "campaign.yaml"


@dataclass(frozen=True)
class CutRun:
    """What became of a rollout that was longer than its pod's walltime, and then of its repetition in a longer one."""

    status: int
    failed: int
    cut: Trajectory
    resumed: int
    whole: Trajectory
    limits: list[str]
    """Walltimes of the pods, as accounting has them."""


@pytest.fixture(scope="module")
def cut(
    slurm: None, background: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory, base_sif: Path
) -> Future[CutRun]:
    folder = tmp_path_factory.mktemp("cut")
    write_solved_task(folder / "tasks", "task0")
    (folder / "waits.py").write_text(WAITS.format(seconds=CUT_S, flag=folder / "flag"))
    short = {"requeues": 1, "pods": {"ranks_per_node": 2, "time": 2}}  # it fails after two walltimes
    file = campaign(folder, base_sif, "waits:Waits", slurm=short)

    def runs() -> CutRun:
        path = folder / "run"
        done = cli("run", file, "--run-dir", path, "--json", timeout=400)
        first = only(path)
        (folder / "flag").touch()
        again = cli("resume", path, "--failed", "--time", "5", timeout=300)
        jobs = Run(path).job_ids("pods")
        words = ["sacct", "-nXP", "-j", ",".join(jobs), "-o", "Timelimit"]

        def walltimes() -> list[str]:
            return subprocess.check_output(words, text=True).split()

        until(lambda: len(walltimes()) >= len(jobs), "accounting, which lags, has every array")
        limits = walltimes()
        failed = json.loads(done.stdout)["rollouts"]["failed"]
        return CutRun(done.returncode, failed, first, again.returncode, only(path), limits)

    return background.submit(runs)


@pytest.fixture(scope="module")
def timeout(slurm: None) -> str:
    """A job that is longer than its walltime."""
    words = ["sbatch", "--parsable", "-p", "gpu", "--mem=100", "--time=1", "-o", "/dev/null", "--wrap=sleep 600"]
    return subprocess.check_output(words, text=True).strip()


def only(run: Path) -> Trajectory:
    with open_trajectories(run) as store:
        [row] = store
        return row.trajectory()


SLURM = """\
slurm:
  pods: {partition: preempt, count: 1, ranks_per_node: 2, slots_per_rank: 2, mem: 1G, time: 10}
  servers: {partition: gpu, time: 10}
"""
LATE_S = 35.0
"""Longer than Slurm takes to preempt on a busy machine: the agent waits for its model then."""
TOLD_S = 5.0
"""Longer than an agent on a busy machine takes from the end of its command to its next call of the model."""


def idle(mark: str) -> bool:
    """Whether the sandbox with the directory ``/<mark>`` runs nothing but the shells of its runner."""
    inside = [pid for pid in process.processes() if os.path.isdir(f"/proc/{pid}/root/{mark}")]
    return bool(inside) and all(map(is_runner, inside))


def test_what_preemption_finds_waiting_for_its_model_goes_on_and_nothing_that_died_of_it_is_judged(
    tmp_path: Path, make_campaign: Make
) -> None:
    (tmp_path / "scratch").mkdir()
    mark = f"kept-{uuid.uuid4().hex}"
    commands = [f"echo one >> log; mkdir /{mark}", "echo two >> log", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    answers = [block(command) for command in commands]
    script = {"default": [answers[0], {"text": answers[1], "delay_s": LATE_S}, answers[2]]}
    (tmp_path / "answers.yaml").write_text(json.dumps(script))
    test = f'[ "$(cat log)" = oracle ] || {{ [ "$(cat log)" = "$(printf "one\\ntwo")" ] && [ -d /{mark} ]; }}'
    extra = f"models:\n  mini: {{{ENGINE}, gpus: 0, agent: mini-swe-agent}}\n  solved: {{{ENGINE}, gpus: 0}}\n{SLURM}"
    solution = f"sleep {LATE_S}; echo oracle > log"
    path = make_campaign(1, extra, agent="oracle", test=test, solution=solution)
    done = cli("submit", path, "--json", MEGAFLOW_SCRATCH=str(tmp_path / "scratch"))
    run = Run(json.loads(done.stdout)["run"])
    until(lambda: list(tmp_path.glob(f"scratch/megaflow-*/owners/*/*/layer/upper/{mark}")), "the first command has run")
    until(lambda: idle(mark), "it has ended; the agent is told, and then waits for the model for far longer")
    time.sleep(TOLD_S)
    command = ["sbatch", "--parsable", "-p", "cpu", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
    subprocess.run(command, check=True, capture_output=True)
    summary = run.wait(timeout_s=900)
    assert summary["state"] == "finished"
    until(lambda: run.live_jobs(0) == set(), "every job has left")  # engines too: they look into RUN, which goes
    assert not run.dir.partial.exists()
    assert {pod["pod"].rpartition(".")[2] for pod in summary["pods"]} == {"1"}
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


def test_what_no_walltime_holds_is_cut_and_goes_on_in_a_longer_one(cut: Future[CutRun]) -> None:
    found = cut.result(timeout=400)
    assert (found.status, found.failed) == (1, 1)
    assert (found.cut.status, found.cut.error_kind) == ("failed", "walltime")
    assert "megaflow-hpc resume RUN --failed --time D-HH:MM:SS" in found.cut.error
    assert found.resumed == 0
    assert found.limits == ["00:02:00", "00:05:00"]
    assert (found.whole.status, found.whole.reward) == ("completed", 1)


def test_accounting_tells_that_a_walltime_ended_a_job(timeout: str) -> None:
    until(lambda: not accounting.live_jobs([timeout])[timeout].live, "it has left", 180)
    until(lambda: accounting.finished_jobs([timeout])[timeout].state == "TIMEOUT", "accounting says why")
