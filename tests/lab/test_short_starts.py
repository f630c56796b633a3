"""Pods that end before their work: by the walltime, preemption, or the loss of a rank.

A campaign that needs minutes of walltime runs in the background of the other tests and is checked by the last one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.environments.sandbox.processes import is_runner
from megaflow_hpc.host import process
from megaflow_hpc.slurm.ids import scancel
from megaflow_hpc.trajectory import Trajectory
from tests.support.campaigns import Make, cli, rows, stored
from tests.support.labs import pods
from tests.support.processes import processes_of
from tests.support.scripted import ENGINE, block
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm", "long")]

LONG_S = 90
"""Longer than a rollout can last in two minutes of walltime: its pod is warned a minute before the end or earlier, and
waits for 25 s then."""
LONG = """\
name: long
tasks: tasks/*
agent: oracle
environment: {{network: none, images: {{base: {image}}}}}
slurm:
  requeues: 0
  pods: {{partition: gpu, count: 1, ranks_per_node: 2, mem_gb: 1, time: 2}}
scheduling: {{cuts: 0}}
"""


@dataclass(frozen=True)
class LongRun:
    """What became of a rollout that is longer than its pod's walltime, and then of its repetition in a longer one."""

    status: int
    failed: int
    cut: Trajectory
    resumed: int
    whole: Trajectory


def only(run: Path) -> Trajectory:
    with open_trajectories(run) as store:
        [row] = store
        return row.trajectory()


@pytest.fixture(scope="module")
def long(
    slurm: None, tmp_path_factory: pytest.TempPathFactory, base_sif: Path, write_task: Make
) -> Iterator[Future[LongRun]]:
    """A campaign that runs beside the tests of this module, on nodes that they do not use."""
    folder = tmp_path_factory.mktemp("long")
    write_task(folder / "tasks", "task0", solution=f"sleep {LONG_S}; echo 42 > answer")
    (folder / "campaign.yaml").write_text(LONG.format(image=base_sif))

    def runs() -> LongRun:
        path = folder / "run"
        done = cli("run", folder / "campaign.yaml", "--run-dir", path, "--json", timeout=300)
        cut = only(path)
        again = cli("resume", path, "--failed", "--time", "5", timeout=300)
        return LongRun(
            done.returncode, json.loads(done.stdout)["rollouts"]["failed"], cut, again.returncode, only(path)
        )

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(runs)


def test_a_start_that_the_walltime_ends_is_not_counted_as_a_crash(make_campaign: Make) -> None:
    section = pods(count=1).replace("slurm:\n", "slurm:\n  requeues: 0\n")
    run = Campaign.from_yaml(make_campaign(8, section, agent="oracle", solution="sleep 2; echo 42 > answer")).submit()
    (array,) = run.job_ids("pods")
    events = run.dir.event_file(f"{array}_0", "0")
    until(lambda: events.exists() and '"event": "rollout"' in events.read_text(), "a rollout is stored")
    scancel([f"{array}_0"], "--batch", "--signal=USR2")  # as Slurm does before the walltime
    assert run.wait(timeout_s=240)["state"] == "finished"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(8)}
    assert {pod["pod"].rpartition(".")[2] for pod in run.status()["pods"]} == {"0", "1"}
    assert "0 of 0 in a row that stored nothing" in next(run.dir.logs.glob("pod-*.log")).read_text()


SLURM = """\
slurm:
  pods: {partition: preempt, count: 1, ranks_per_node: 2, slots_per_rank: 2, mem_gb: 1, time: 10}
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
    tmp_path: Path, make_campaign: Make, monkeypatch: pytest.MonkeyPatch
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


def ranks_of(run: Run) -> dict[bool, list[int]]:
    """Pids of a run's ranks on this host: ``True`` the workers (which have a runner as child), ``False`` rank 0."""
    found: dict[bool, list[int]] = {True: [], False: []}
    for pid in processes_of("megaflow_hpc.pod", str(run.path)):
        found[bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())].append(pid)
    return found


def test_lost_ranks_cost_their_rollouts_a_retry_and_nothing_else(make_campaign: Make) -> None:
    extra = (
        pods(count=1)
        .replace("ranks_per_node: 2", "ranks_per_node: 3")
        .replace("slots_per_rank: 2", "slots_per_rank: 1")
    )
    campaign = make_campaign(8, extra, agent="oracle", solution="sleep 3; echo 42 > answer")
    run = Campaign.from_yaml(campaign).submit()

    def starts() -> set[str]:
        return {pod["pod"].rpartition(".")[2] for pod in run.status()["pods"]}

    until(lambda: stored(run) >= 1, "first rollout")
    os.kill(ranks_of(run)[True][0], signal.SIGKILL)
    done = stored(run)
    until(lambda: run.status()["retries"], "the worker's rollouts are tried again")
    until(lambda: stored(run) > done, "the pod goes on")
    assert starts() == {"0"}
    os.kill(ranks_of(run)[False][0], signal.SIGKILL)
    summary = run.wait(timeout_s=200)
    assert summary["state"] == "finished"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(8)}
    assert starts() == {"0", "1"}


def test_what_no_walltime_holds_is_cut_and_goes_on_in_a_longer_one(long: Future[LongRun]) -> None:
    found = long.result(timeout=400)
    assert (found.status, found.failed) == (1, 1)
    assert (found.cut.status, found.cut.error_kind) == ("failed", "walltime")
    assert "megaflow-hpc resume RUN --failed --time D-HH:MM:SS" in found.cut.error
    assert found.resumed == 0
    assert (found.whole.status, found.whole.reward) == ("completed", 1)
    last = found.whole.attempts[-1]
    assert last.finished_at - last.started_at > LONG_S
