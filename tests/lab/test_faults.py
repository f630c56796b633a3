"""What a cluster does to a campaign, on a lab of the test's own: daemons away, jobs cancelled, and seeded chaos."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.slurm import accounting, limits
from tests.bench.chaos import trial
from tests.support.campaigns import Make, rows, stored, verb
from tests.support.labs import Lab, own_lab, pods
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with own_lab(tmp_path_factory.mktemp("faults")) as lab:
        yield lab


def solved(tasks: int) -> dict[str, tuple[str, float]]:
    return {f"task{n}/oracle/0": ("completed", 1) for n in range(tasks)}


def submit(make_campaign: Make, tasks: int, seconds: float, count: int = 2) -> Run:
    campaign = make_campaign(
        tasks, pods(count=count, ranks=1), agent="oracle", solution=f"sleep {seconds}; echo 42 > answer"
    )
    return Campaign.from_yaml(campaign).submit()


def test_accounting_tells_how_jobs_ended(lab: Lab) -> None:
    once = ("--no-requeue", "--mem=100", "--output=/dev/null")
    jobs = {
        "COMPLETED": lab.batch("true", *once),
        "FAILED": lab.batch("exit 3", *once),
        "CANCELLED": lab.batch("sleep 600", "-w", "cpu1", *once),
        "NODE_FAIL": lab.batch("sleep 600", "-w", "cpu4", *once),
        "PREEMPTED": lab.batch("sleep 600", "-p", "preempt", "-w", "cpu3", *once),
    }
    waiting = [jobs[state] for state in ("CANCELLED", "NODE_FAIL", "PREEMPTED")]

    def states() -> set[str]:
        return {job.state for job in accounting.live_jobs(waiting).values()}

    until(lambda: states() == {"RUNNING"}, "they run")
    lab.slurm("scancel", jobs["CANCELLED"])
    lab.slurm("scontrol", "update", "NodeName=cpu4", "State=DOWN", "Reason=gone")
    lab.batch("true", "-p", "cpu", "-w", "cpu3", "--exclusive", *once)
    ended = {number: state for state, number in jobs.items()}

    def told() -> dict[str, str]:
        return {job.id: job.state for job in accounting.finished_jobs(jobs.values()).values()}

    until(lambda: told() == ended, f"accounting has {ended}")
    until(
        lambda: not any(job.live for job in accounting.live_jobs(jobs.values()).values()), "squeue has forgotten them"
    )
    until(
        lambda: lab.slurm("sinfo", "-h", "-n", "cpu4", "-p", "cpu", "-o", "%T") == "idle", "its daemon has registered"
    )


def test_a_campaign_ends_without_slurmctld_and_slurmdbd(lab: Lab, make_campaign: Make) -> None:
    lab.kill("slurmdbd", "mariadbd")
    assert limits.allowance({}).submit is None, "what cannot be asked limits nothing"
    run = submit(make_campaign, 12, 3, count=1)
    until(lambda: run.status()["rollouts"]["running"], "a running rollout, without accounting")
    lab.kill("slurmctld")
    assert run.live_jobs(0) is None, "nobody to ask"
    assert run.status()["state"] == "running"
    until(lambda: run.ledger.finished, "every rollout is done, without a controller")
    assert stored(run) == 12
    assert lab.call("start").returncode == 0
    summary = run.wait(timeout_s=900)
    assert summary["state"] == "finished"
    assert rows(run.path) == solved(12)
    assert [pod["pod"].rpartition(".")[2] for pod in summary["pods"]] == ["0"], "the pod was never restarted"
    # When the job leaves is up to Slurm: a node tells its controller again of an end that nobody heard, at its leisure.


def test_a_cancelled_element_costs_nothing_and_the_campaign_beside_it_even_less(
    lab: Lab, make_campaign: Make, tmp_path: Path
) -> None:
    first = submit(make_campaign, 8, 2)
    second = Campaign.from_yaml(tmp_path / "campaign.yaml").submit()
    until(lambda: len([p for p in first.status()["pods"] if p["running"]]) == 2, "both pods run rollouts")
    gone = first.job_ids("pods")[0] + "_0"
    subprocess.run(["scancel", gone], check=True)
    for run in (first, second):
        assert run.wait(timeout_s=900)["state"] == "finished"
        assert rows(run.path) == solved(8)
    left = {pod["job_id"]: pod["state"] for pod in first.status()["pods"]}
    assert left[gone] == "drained"
    starts = [pod["pod"].rpartition(".")[2] for run in (first, second) for pod in run.status()["pods"]]
    assert set(starts) == {"0"}, "no other pod was touched"


def test_a_campaign_killed_and_cancelled_and_resumed_has_every_rollout_once(lab: Lab, make_campaign: Make) -> None:
    run = submit(make_campaign, 16, 2, count=1)
    for way in ("kill", "scancel", "cancel"):
        before = stored(run)
        until(lambda before=before: stored(run) > before and run.status()["rollouts"]["running"], "progress")
        if way == "cancel":
            _cancelled(run)
        else:
            options = ["--signal=KILL", "--full"] if way == "kill" else []
            subprocess.run(["scancel", *options, *run.job_ids("pods" if way == "kill" else None)], check=True)
        until(lambda: run.live_jobs(0) == set(), "all jobs are gone")
        assert not run.ledger.finished
        assert Run(run.path).resume(launcher="slurm")
    summary = Run(run.path).wait(timeout_s=900)
    assert summary["state"] == "finished"
    assert rows(run.path) == solved(16)
    assert len(run.job_ids("pods")) == 4


def _cancelled(run: Run) -> None:
    """Cancels a running campaign by the command line, which says what it did."""

    def listed() -> str:
        return str(json.loads(verb("list", run.path, "--json").stdout)[0]["state"])

    assert listed() == "running"
    found = json.loads(verb("cancel", run.path, "--json").stdout)
    assert (found["before"], found["pods"]) == ("running", [])
    assert set(found["cancelled"]) <= set(run.job_ids())
    until(lambda: not run.live_jobs(0), "all jobs are gone")
    assert run.status()["state"] == listed() == "cancelled"
    assert verb("cancel", run.path).stdout == "nothing was queued or running\n"
    verb("gather", run.path)
    assert 1 <= len(rows(run.path)) < 16


def test_chaos_loses_and_doubles_nothing(lab: Lab, base_sif: Path, tmp_path: Path) -> None:
    said: list[str] = []
    before = dict(os.environ)
    try:
        verdict = trial(5, tmp_path / "trial", tmp_path / "scratch", base_sif, said.append, 8, 2, ("runner", "slurmd"))
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert (verdict.lost, verdict.double, verdict.left) == ([], [], []), said
    assert verdict.planned == 8
    assert verdict.strikes, said
