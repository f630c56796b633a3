"""A campaign as its cluster's administrators see it, and what doctor proves by a job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.slurm import accounting
from megaflow_hpc.trajectories import open_trajectories
from tests.support.campaigns import Make, cli, rows, verb
from tests.support.labs import pods
from tests.support.processes import processes
from tests.support.waiting import eventually, until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def show(job: str) -> dict[str, str]:
    output = subprocess.check_output(["scontrol", "-o", "show", "job", job], text=True).splitlines()[0]
    return dict(re.findall(r"(\S+?)=(\S*)", output))


def test_a_campaign_of_one_command_is_accounted_for_and_leaves_nothing(make_campaign: Make, tmp_path: Path) -> None:
    campaign = make_campaign(1, pods(count=2), agent="oracle", solution="sleep 3; echo 42 > answer")
    path = tmp_path / "run"
    words = [sys.executable, "-m", "megaflow_hpc", "run", campaign, "--run-dir", path, "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as following:
        until(lambda: (path / "run.json").exists() and Run(path).job_ids("gather"), "every job is queued")
        run = Run(path)
        (array,), (last,) = run.job_ids("pods"), run.job_ids("gather")
        pod, gather = show(f"{array}_0"), show(last)
        result = json.loads(following.communicate(timeout=240)[0])
    assert following.returncode == 0
    assert result["state"] == "finished"
    assert rows(path) == {"task0/oracle/0": ("completed", 1)}
    for job in (pod, gather):
        assert (job["JobName"], job["Comment"], job["Account"]) == ("small", run.path.name, "lab")
        assert job["StdOut"].startswith(f"{run.path}/logs/")
        assert job["StdErr"] == job["StdOut"]
    assert pod["Dependency"] == "(null)"
    assert gather["Dependency"] == f"afterany:{array}_*(unfulfilled)"
    assert gather["TimeLimit"] == "01:00:00"
    assert (pod["Requeue"], pod["OverSubscribe"], pod["Nice"]) == ("1", "OK", "0")
    until(lambda: run.live_jobs(0) == set(), "every job has left")
    jobs = (f"{array}_0", f"{array}_1", last)

    def states() -> dict[str, str]:
        return {job: state.state for job, state in accounting.finished_jobs(run.job_ids()).items()}

    assert eventually(lambda: states() == dict.fromkeys(jobs, "COMPLETED"), every_s=1.0), states()
    steps = sacct("-j", array, "-o", "JobID")
    assert len([step for step in steps if step.endswith(".0")]) == 2, "one srun a pod"
    assert not [step for step in steps if step.endswith(".1")]
    _check_cost(run, _checked_usage(run))

    def gone() -> bool:
        return not [words for _, words in processes() if any(str(run.path) in word for word in words)]

    until(gone, "every process of the run has ended", 30)
    left = shared_memory()
    until(lambda: not left & shared_memory(), "what there is of shared memory belongs to worlds that just start")


def sacct(*words: str) -> list[str]:
    return subprocess.check_output(["sacct", "-nP", *words], text=True).split()


def shared_memory() -> set[Path]:
    """What MPI has under a name: until all ranks of a world have it mapped, whichever world of ours it is."""
    found = set()
    for path in Path("/dev/shm").glob("mpich*"):
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def _checked_usage(run: Run) -> float:
    """Checks that ``usage`` agrees with sacct, idle cores included: one pod was idle. Returns core-seconds."""
    held = [row.split("|") for row in sacct("-XD", "-j", ",".join(run.job_ids()), "-o", "JobID,CPUTimeRAW,AllocCPUS")]
    with open_trajectories(run.path) as store:
        [attempt] = [attempt for row in store for attempt in row.attempts]
    rounded = sum(int(cores) for _, _, cores in held)  # a second at each job
    core_s = sum(int(seconds) for _, seconds, _ in held)
    (cores,) = (int(cores) for job, _, cores in held if job == attempt.job_id)
    worked = cores * (attempt.finished_at - attempt.started_at)
    idle_s = sum(int(seconds) for job, seconds, _ in held if job not in run.job_ids("gather")) - worked
    [usage] = json.loads(verb("usage", run.path, "--json").stdout)["runs"]
    assert abs(usage["core_seconds"] - core_s) <= rounded
    assert abs(usage["idle_core_seconds"] - idle_s) <= rounded
    assert worked > 0
    assert usage["idle_core_seconds"] < usage["core_seconds"] - worked + 1
    assert usage["gpu_seconds"] == 0
    shown = json.loads(verb("status", run.path, "--usage", "--json").stdout)["usage"]
    assert shown["core_seconds"] == usage["core_seconds"]
    return float(usage["core_seconds"])


def _check_cost(run: Run, core_seconds: float) -> None:
    """The report's costs are of the accounting."""
    told = json.loads(verb("report", run.path, "--json", "--core-hour", "1", "--no-pictures").stdout)["runs"][0]["cost"]
    assert told["source"] == "accounting"
    assert {role["role"]: role["jobs"] for role in told["roles"]} == {"gather": 1, "pods": 2}
    assert told["price"] == pytest.approx(told["core_hours"], rel=1e-4)
    held = sum(role["core_hours"] for role in told["roles"])
    assert held * 3600 == pytest.approx(core_seconds, rel=1e-3)
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
