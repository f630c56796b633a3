"""Campaigns on the real Slurm of the lab: arrays, accounting, killed pods, cancel, drain and requeue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.slurm import accounting
from tests.support.campaigns import Make, cli, rows, small_rows, stored
from tests.support.labs import pods
from tests.support.places import ROOT
from tests.support.processes import processes, processes_of
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def test_a_campaign_runs_from_one_command_is_accounted_for_and_leaves_nothing(make_campaign: Make) -> None:
    campaign = make_campaign(4, pods())
    done = cli("run", campaign, "--launcher", "slurm", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert rows(result["run"]) == small_rows(4)
    run = Run(result["run"])
    until(lambda: not run.live_jobs(0), "every job has left")
    states = accounting.finished_jobs(run.job_ids("pods"))
    assert len(states) == 2
    assert {state.state for state in states.values()} == {"COMPLETED"}
    names = subprocess.check_output(["sacct", "-nXP", "-j", ",".join(run.job_ids()), "-o", "JobName"], text=True)
    assert set(names.split()) == {"small"}

    def gone() -> bool:
        return not [words for _, words in processes() if any(str(run.path) in word for word in words)]

    until(gone, "every process of the run has ended", 30)
    left = shared_memory()
    until(lambda: not left & shared_memory(), "what there is of shared memory belongs to worlds that just start")


def shared_memory() -> set[Path]:
    """What MPI has under a name: until all ranks of a world have it mapped, whichever world of ours it is."""
    found = set()
    for path in Path("/dev/shm").glob("mpich*"):
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def test_the_by_hand_way_runs_the_same(tmp_path: Path, make_campaign: Make) -> None:
    run = cli("plan", make_campaign(2, pods())).stdout.strip()
    script = ROOT / "sbatch" / "sandbox_pods.sbatch"
    words = ["sbatch", "--parsable", "--array=0-1", "--mem=1G", "--time=10", "-o", str(tmp_path / "%a.log")]
    job = subprocess.check_output([*words, str(script), run], text=True).strip()
    until(
        lambda: [state.state for state in accounting.finished_jobs([job]).values()] == ["COMPLETED"] * 2,
        "both elements have ended, as accounting knows",
    )
    assert cli("gather", run).returncode == 0
    assert rows(run) == small_rows(2)


def test_dry_run_prints_every_script_and_touches_nothing(tmp_path: Path, make_campaign: Make) -> None:
    campaign = make_campaign(1, pods())
    before = sorted(tmp_path.rglob("*"))
    done = cli("submit", campaign, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --partition=cpu" in done.stdout
    assert "srun --export=ALL --mpi=" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pod_job_killed_half_way_is_resumed_with_every_rollout_once(make_campaign: Make) -> None:
    campaign = make_campaign(6, pods(count=1), solution="sleep 2; echo 42 > answer")
    run = Campaign.from_yaml(campaign).submit()
    until(lambda: stored(run) >= 2, "first rollouts")
    subprocess.run(["scancel", "--signal=KILL", "--full", *run.job_ids("pods")], check=True)
    until(lambda: run.live_jobs(0) is not None and not run.pods_live(), "the pod is gone")
    assert not run.ledger.finished
    done = cli("resume", run.path)
    assert done.returncode == 0, done.stderr
    assert rows(run.path) == small_rows(6)


def test_cancel_keeps_what_is_done(make_campaign: Make) -> None:
    campaign = make_campaign(12, pods(count=1), agent="oracle", solution="sleep 6; echo 42 > answer")
    run = Campaign.from_yaml(campaign).submit()
    until(lambda: stored(run) >= 1, "first rollout")

    def listed() -> str:
        return str(json.loads(cli("list", run.path, "--json").stdout)[0]["state"])

    assert listed() == "running"
    found = json.loads(cli("cancel", run.path, "--json").stdout)
    assert (found["before"], found["cancelled"], found["pods"]) == ("running", run.job_ids(), [])
    until(lambda: not run.live_jobs(0), "all jobs are gone")
    assert run.status()["state"] == "cancelled"
    assert listed() == "cancelled"
    assert cli("cancel", run.path).stdout == "nothing was queued or running\n"
    cli("gather", run.path)
    assert 1 <= len(rows(run.path)) < 12


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
    campaign = make_campaign(12, pods(count=2), agent="oracle", solution="sleep 4; echo 42 > answer")
    run = Campaign.from_yaml(campaign).submit()
    until(lambda: len([pod for pod in run.status()["pods"] if pod["running"]]) == 2, "both pods run rollouts")
    [array] = run.job_ids("pods")
    subprocess.run(["scancel", "--batch", "--signal=USR2", f"{array}_1"], check=True)
    until(lambda: any(pod["state"] == "drained" for pod in run.status()["pods"]), "the pod has drained")
    # Slurm holds a requeued job until its old credential has expired. That hold is not lifted here: slurmd refuses a
    # job whose credential is as old as the second of the requeue, and the element would end as FAILED.
    until(lambda: run.dir.event_file(f"{array}_1", "1").exists(), "the element has started again")
    summary = run.wait(timeout_s=180)
    assert summary["state"] == "finished"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(12)}
    # The id of an array's last element is the array's own: a requeue by it would have taken the other pod down.
    assert {pod["pod"] for pod in summary["pods"]} == {f"{array}_0.0", f"{array}_1.0", f"{array}_1.1"}


def test_a_partition_that_does_not_exist_is_named_with_its_line(make_campaign: Make) -> None:
    campaign = make_campaign(1, pods(partition="nowhere"))
    with pytest.raises(ConfigError, match=r"campaign.yaml:6: slurm.pods.partition: no partition 'nowhere' here"):
        Campaign.from_yaml(campaign).submit()
    assert not (campaign.parent / "runs").exists()


def test_what_slurm_refuses_is_said_in_its_own_words(make_campaign: Make) -> None:
    campaign = make_campaign(1, pods() + "  extra: {qos: nonsense}\n")
    done = cli("submit", campaign)
    assert done.returncode == 3
    assert "qos" in done.stderr.lower()
    assert "Traceback" not in done.stderr


def ranks_of(run: Run) -> dict[bool, list[int]]:
    """Pids of a run's ranks on this host: ``True`` the workers (which have a runner as child), ``False`` rank 0."""
    found: dict[bool, list[int]] = {True: [], False: []}
    for pid in processes_of("megaflow_hpc.pod", str(run.path)):
        found[bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())].append(pid)
    return found


@pytest.mark.slow
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
