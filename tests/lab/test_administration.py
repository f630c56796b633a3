"""A campaign as its cluster's administrators see it, and what doctor proves by a job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from megaflow_hpc import Campaign
from tests.support.campaigns import Make, cli
from tests.support.labs import pods
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def show(job: str) -> dict[str, str]:
    output = subprocess.check_output(["scontrol", "-o", "show", "job", job], text=True).splitlines()[0]
    return dict(re.findall(r"(\S+?)=(\S*)", output))


def test_jobs_say_who_they_are_and_depend_on_nothing_odd(make_campaign: Make) -> None:
    run = Campaign.from_yaml(make_campaign(4, pods(count=2), agent="oracle", solution="sleep 3; echo 42 > a")).submit()
    pod, gather = show(run.job_ids("pods")[0] + "_0"), show(run.job_ids("gather")[0])
    for job in (pod, gather):
        assert job["JobName"] == "small"
        assert job["Comment"] == run.path.name
        assert job["StdOut"].startswith(f"{run.path}/logs/")
        assert job["StdErr"] == job["StdOut"]
        assert job["Account"] == "lab"
    assert pod["Dependency"] == "(null)"
    assert gather["Dependency"] == f"afterany:{run.job_ids('pods')[0]}_*(unfulfilled)"
    assert gather["TimeLimit"] == "01:00:00"
    assert (pod["Requeue"], pod["OverSubscribe"], pod["Nice"]) == ("1", "OK", "0")
    summary = run.wait(timeout_s=180)
    assert summary["state"] == "finished"
    until(lambda: run.live_jobs(0) == set(), "every job has left")
    steps = subprocess.check_output(["sacct", "-nP", "-j", run.job_ids("pods")[0], "-o", "JobID"], text=True).split()
    assert len([step for step in steps if step.endswith(".0")]) == 2, "one srun a pod"
    assert not [step for step in steps if step.endswith(".1")]
    usage = json.loads(cli("status", run.path, "--usage", "--json").stdout)["usage"]
    assert usage["core_seconds"] > usage["idle_core_seconds"] > 0
    assert usage["gpu_seconds"] == 0
    told = json.loads(cli("report", run.path, "--json", "--core-hour", "1", "--no-pictures").stdout)["runs"][0]["cost"]
    assert told["source"] == "accounting"
    assert {role["role"]: role["jobs"] for role in told["roles"]} == {"gather": 1, "pods": 2}
    assert told["price"] == pytest.approx(told["core_hours"], rel=1e-4)
    held = sum(role["core_hours"] for role in told["roles"])
    assert held * 3600 == pytest.approx(usage["core_seconds"], rel=1e-3)
    for job in told["jobs"]:
        assert (job["state"], job["cores"] > 0, job["memory_asked_mb"] > 0) == ("COMPLETED", True, True), job
    used = [job for job in told["jobs"] if job["role"] == "pods"]
    assert all(0 < job["cpu_efficiency"] < 1.5 for job in used), used
    assert all(0 < job["memory_efficiency"] < 1 for job in used), used


def test_doctor_proves_mpi_by_two_ranks_in_one_world() -> None:
    done = cli("doctor", "--job", "--json")
    findings = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert findings["mpi probe"]["level"] == "ok", findings["mpi probe"]
    assert "--mpi=pmi2" in findings["mpi probe"]["found"]
    assert findings["lost rank"]["level"] == "ok", findings["lost rank"]
    assert findings["from jobs"]["level"] == "ok"


def test_doctor_names_an_mpi_type_that_makes_no_world() -> None:
    command = [sys.executable, "-m", "megaflow_hpc", "doctor", "--job", "--json"]
    environment = {**os.environ, "MEGAFLOW_MPI": "none"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 3
    [finding] = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "mpi probe"]
    assert finding["level"] == "FAIL"
    assert "worlds of one rank each" in finding["found"]
    assert "MEGAFLOW_MPI" in finding["remedy"]
