"""What a job inherits and counts is decided by the campaign, in whatever way and from wherever it is submitted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.slurm.ids import scancel
from megaflow_hpc.trajectory import Trajectory
from tests.support.campaigns import cli
from tests.support.labs import sbatch
from tests.support.places import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm")]

Make = Callable[..., Path]
PODS = "slurm:\n  requeues: 0\n  pods: {partition: cpu, count: 1, ranks_per_node: 2, mem_gb: 1, time: 10}\n"


def completed(run: Path | str) -> int:
    with open_trajectories(run) as store:
        return sum(row.status == "completed" for row in store)


def only(run: Path) -> Trajectory:
    with open_trajectories(run) as store:
        [row] = store
        return row.trajectory()


def test_a_script_by_hand_runs_though_its_job_inherits_nothing(tmp_path: Path, make_campaign: Make) -> None:
    run = cli("plan", make_campaign(2, PODS, agent="oracle")).stdout.strip()
    script = ROOT / "sbatch" / "sandbox_pods.sbatch"
    log = tmp_path / "log"
    assert sbatch("--export=NONE", "--get-user-env=1", "-t", "10", "-o", log, script, run) == "COMPLETED", (
        log.read_text()
    )
    assert cli("gather", run).returncode == 0
    assert completed(run) == 2


@pytest.mark.parametrize("way", ["cli", "submitit"])
def test_a_campaign_is_run_from_inside_an_allocation(tmp_path: Path, make_campaign: Make, way: str) -> None:
    campaign = make_campaign(2, PODS, agent="oracle")
    words = [sys.executable, "-m", "megaflow_hpc", "run", str(campaign), "--json"]
    if way == "submitit":
        words = [sys.executable, str(ROOT / "launchers" / "submitit_campaign.py"), str(campaign), "--partition", "cpu"]
    script = tmp_path / "around.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH -n1 --mem-per-cpu=300M --time=10\n"
        "export SLURM_RESTART_COUNT=3 SBATCH_PARTITION=nowhere SBATCH_TIMELIMIT=0:01 SLURM_CPU_BIND=mask_cpu:0x1\n"
        f"cd {ROOT} && srun -n1 {' '.join(words)} >{tmp_path}/out\n"
    )
    log = tmp_path / "log"
    assert sbatch("-o", log, script, timeout_s=240) == "COMPLETED", log.read_text()
    result = json.loads((tmp_path / "out").read_text())
    assert result["rollouts"]["completed"] == 2
    assert [pod["pod"].rpartition(".")[2] for pod in result["pods"]] == ["0"]


LONG_S = 100
"""Longer than a rollout can last in two minutes of walltime: its pod is warned a minute before the end or earlier, and
waits for 25 s then."""


def test_starts_that_walltimes_end_are_not_counted_as_crashes_and_what_none_holds_goes_on_in_a_longer_one(
    make_campaign: Make, tmp_path: Path
) -> None:
    short = PODS.replace("time: 10", "time: 2").replace("requeues: 0", "requeues: 1")  # fails after two walltimes
    text = make_campaign(1, short, agent="oracle", solution=f"sleep {LONG_S}; echo 42 > answer").read_text()
    (tmp_path / "tasks").rename(tmp_path / "long-tasks")
    long, path = tmp_path / "long.yaml", tmp_path / "long"
    long.write_text(text.replace("tasks/*", "long-tasks/*"))
    words = [sys.executable, "-m", "megaflow_hpc", "run", str(long), "--run-dir", str(path), "--json"]
    ended = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    run = Campaign.from_yaml(make_campaign(8, PODS, agent="oracle", solution="sleep 2; echo 42 > answer")).submit()
    (pods,) = run.job_ids("pods")
    events = run.dir.event_file(f"{pods}_0", "0")
    until(lambda: events.exists() and '"event": "rollout"' in events.read_text(), "a rollout is stored")
    scancel([f"{pods}_0"], "--batch", "--signal=USR2")  # as Slurm does before the walltime
    assert run.wait(timeout_s=240)["state"] == "finished"
    assert completed(run.path) == 8
    assert {pod["pod"].rpartition(".")[2] for pod in run.status()["pods"]} == {"0", "1"}
    assert "0 of 0 in a row that stored nothing" in next(run.dir.logs.glob("pod-*.log")).read_text()

    said, _ = ended.communicate(timeout=400)
    assert (ended.returncode, json.loads(said)["rollouts"]["failed"]) == (1, 1)
    cut = only(path)
    assert (cut.status, cut.error_kind) == ("failed", "walltime")
    assert "megaflow-hpc resume RUN --failed --time D-HH:MM:SS" in cut.error
    again = cli("resume", path, "--failed", "--time", "5")
    assert again.returncode == 0, again.stderr
    whole = only(path)
    assert (whole.status, whole.reward) == ("completed", 1)
    assert max(attempt.finished_at - attempt.started_at for attempt in whole.attempts) > LONG_S


def test_pods_that_never_start_are_named_with_their_cause(make_campaign: Make) -> None:
    extra = PODS.replace("slurm:\n", "slurm:\n  setup: ['export PYTHONHOME=/nowhere']\n")
    done = cli("run", make_campaign(2, extra, agent="oracle"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "before any rollout: " in done.stdout
    assert "ModuleNotFoundError: No module named 'encodings'" in done.stdout
    run = done.stdout.splitlines()[-1].removeprefix("results: ")
    status = json.loads(cli("status", run, "--json").stdout)
    assert status["state"] == "stopped"
    (pod,) = status["unstarted"]
    assert os.path.isfile(pod["log"])
    assert pod["exit_status"]
    assert "before any rollout" in cli("status", run).stdout
