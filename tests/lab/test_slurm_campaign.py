"""Campaigns on the real Slurm of the lab: arrays, accounting, killed pods, cancel, drain and requeue."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.rewards import given_as
from megaflow_hpc.slurm import accounting
from tests.support.campaigns import Make, cli, rows, run_local, small_rows, verb
from tests.support.labs import pods
from tests.support.places import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def test_a_script_by_hand_runs_the_same_though_its_jobs_inherit_nothing(tmp_path: Path, make_campaign: Make) -> None:
    run = verb("plan", make_campaign(2, pods())).stdout.strip()
    script = ROOT / "sbatch" / "sandbox_pods.sbatch"
    words = ["sbatch", "--parsable", "--export=NONE", "--get-user-env=1", "--array=0-1", "--mem=1G", "--time=10"]
    words += ["-o", str(tmp_path / "%a.log")]
    job = subprocess.check_output([*words, str(script), run], text=True).strip()
    until(
        lambda: [state.state for state in accounting.finished_jobs([job]).values()] == ["COMPLETED"] * 2,
        "both elements have ended, as accounting knows",
    )
    assert verb("gather", run).returncode == 0
    assert rows(run) == small_rows(2)


def test_a_job_array_shares_the_scoring_of_stored_rollouts(
    tmp_path: Path, make_campaign: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of docs/how-to/judges.md. One element is requeued while it scores."""
    result, done = run_local(make_campaign(6, pods()))
    assert result["state"] == "finished", done.stderr
    (tmp_path / "score.py").write_text("import time\n\ndef score(reward):\n    time.sleep(2)\n    return reward / 2\n")
    page = (ROOT / "docs" / "how-to" / "judges.md").read_text()
    block = page[page.index("sbatch --array=1-3") :].partition("```")[0]
    command = block.replace("RUN ", f"{result['run']} ").replace("sbatch ", "sbatch --parsable ", 1)
    monkeypatch.chdir(tmp_path)
    job = subprocess.check_output(["bash", "-c", command], text=True).strip()
    run = RunDir(result["run"])
    until(lambda: len(given_as(run, "score")) >= 1, "a reward", 120)
    subprocess.run(["scancel", "--signal=KILL", "--full", f"{job}_1"], check=True)
    ended = {"COMPLETED", "FAILED", "CANCELLED"}
    until(
        lambda: len(states := accounting.finished_jobs([job])) == 3 and {one.state for one in states.values()} <= ended,
        "all elements have ended",
        180,
    )
    before = given_as(run, "score")
    last = cli("reverify", run, "--with", "score.py", "--json")
    assert last.returncode == 0, last.stderr
    assert json.loads(last.stdout)["already"] == len(before)
    assert {id: one.reward for id, one in given_as(run, "score").items()} == {
        id: reward / 2 for id, (_, reward) in rows(run.path).items()
    }


def test_ctrl_c_cancels_the_jobs(make_campaign: Make) -> None:
    campaign = make_campaign(2, pods(count=1), agent="oracle", solution="sleep 60; echo 42 > answer")
    command = [sys.executable, "-m", "megaflow_hpc", "run", str(campaign), "--launcher", "slurm"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said_where = next(line for line in process.stderr if line.startswith("run directory: "))
    path = said_where.removeprefix("run directory: ").strip()
    until(lambda: Run(path).status()["rollouts"]["running"], "a running rollout")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "megaflow-hpc resume" in said
    until(lambda: not Run(path).live_jobs(0), "all jobs are gone")


def test_the_pre_timeout_signal_drains_one_pod_and_requeues_its_element_alone(make_campaign: Make) -> None:
    section = pods(count=2).replace("slurm:\n", "slurm:\n  requeues: 0\n")  # a start that stores something is no crash
    campaign = make_campaign(12, section, agent="oracle", solution="sleep 4; echo 42 > answer")
    run = Campaign.from_yaml(campaign).submit()
    until(lambda: len([pod for pod in run.status()["pods"] if pod["running"]]) == 2, "both pods run rollouts")
    [array] = run.job_ids("pods")
    until(lambda: any(pod["job_id"] == f"{array}_1" and pod["stored"] for pod in run.status()["pods"]), "it stores")
    subprocess.run(["scancel", "--batch", "--signal=USR2", f"{array}_1"], check=True)
    until(lambda: any(pod["state"] == "drained" for pod in run.status()["pods"]), "the pod has drained")
    # Slurm holds a requeued job until its old credential has expired. That hold is not lifted here: slurmd refuses a
    # job whose credential is as old as the second of the requeue, and the element would end as FAILED.
    until(lambda: run.dir.event_file(f"{array}_1", "1").exists(), "the element has started again")
    summary = run.wait(timeout_s=900)
    assert summary["state"] == "finished"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(12)}
    # The id of an array's last element is the array's own: a requeue by it would have taken the other pod down.
    assert {pod["pod"] for pod in summary["pods"]} == {f"{array}_0.0", f"{array}_1.1"}
    assert "0 of 0 in a row that stored nothing" in (run.dir.logs / f"pod-{array}_1.log").read_text()


def test_what_slurm_refuses_is_said_in_its_own_words(make_campaign: Make) -> None:
    campaign = make_campaign(1, pods() + "  qos: nonsense\n")
    done = cli("submit", campaign)
    assert done.returncode == 3
    assert "qos" in done.stderr.lower()
    assert "Traceback" not in done.stderr
