"""Slurm refuses, is away, or preempts with a grace time, on a lab with the settings of such a site."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.slurm import site
from megaflow_hpc.slurm.ids import array_of
from tests.support.campaigns import Make, cli, rows, stored
from tests.support.labs import Lab, own_lab
from tests.support.processes import environment, processes
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

WAIT_S = 15
"""WaitTime: after the first task has ended, srun would kill the others."""
CONF = f"""\
WaitTime={WAIT_S}
ProctrackType=proctrack/pgid
PartitionName=grace Nodes=cpu[1-4] PriorityTier=1 PreemptMode=REQUEUE GraceTime=40
"""
"""Slurm signals the tasks of a step and not what they have started, as with proctrack/cgroup."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with own_lab(tmp_path_factory.mktemp("refusing"), CONF) as lab:
        yield lab


def section(partition: str = "cpu", ranks: int = 2, slots: int = 1, more: str = "") -> str:
    pods = f"partition: {partition}, count: 1, ranks_per_node: {ranks}, slots_per_rank: {slots}, mem: 1G, time: 20"
    return f"slurm:\n  pods: {{{pods}}}\n{more}"


def started(make_campaign: Make, tasks: int, extra: str, solution: str) -> tuple[Run, str]:
    """Submits a campaign to an idle lab and waits for its first stored rollout; the run, and its pod."""
    until(lambda: not site.ask("squeue", "-h"), "the jobs of other tests have left")
    run = Campaign.from_yaml(make_campaign(tasks, extra, agent="oracle", solution=solution)).submit()
    until(lambda: stored(run) >= 1, "a rollout is stored")
    return run, f"{run.job_ids('pods')[0]}_0"


def batch_shell(run: Run) -> int:
    """Pid of the pod's batch script, for signals while slurmctld is away."""
    (pid,) = {
        int(environment(pid)["MEGAFLOW_POD_DIR"].split(".")[-2].split("-")[0])
        for pid, words in processes()
        if "megaflow_hpc.pod" in words and str(run.path) in words and "srun" not in words[0]
    }
    return pid


def last_start(run: Run) -> str:
    """The pod's last start. Leases of the starts before it are removed."""
    return max(pod["pod"].rpartition(".")[2] for pod in run.status()["pods"])


def log(run: Run) -> str:
    return next(run.dir.logs.glob("pod-*.log")).read_text()


def ended(run: Run) -> None:
    """Waits for the end without a process that helps: only the jobs themselves do."""
    until(lambda: run.status()["state"] == "finished", "the campaign is finished", 240)
    until(lambda: run.live_jobs(0) == set(), "every job has left", 60)


def test_a_pod_that_lost_a_worker_outlives_the_sites_waittime(lab: Lab, make_campaign: Make) -> None:
    run, _ = started(make_campaign, 16, section(ranks=3), "sleep 3; echo 42 > answer")
    workers = [
        pid
        for pid, words in processes()
        if "megaflow_hpc.pod" in words and str(run.path) in words and "srun" not in words[0]
        if Path(f"/proc/{pid}/task/{pid}/children").read_text()
    ]
    os.kill(workers[0], signal.SIGKILL)
    time.sleep(WAIT_S + 5)
    assert run.status()["state"] == "running"
    ended(run)
    assert last_start(run) == "0"
    assert "First task exited" not in log(run)


def test_a_requeue_while_slurmctld_is_away_is_repeated(lab: Lab, make_campaign: Make) -> None:
    run, pod = started(make_campaign, 8, section(), "sleep 4; echo 42 > answer")
    shell = batch_shell(run)
    lab.kill("slurmctld")
    try:
        os.kill(shell, signal.SIGUSR2)  # as Slurm does before the walltime
        until(lambda: bool(Marks(run.dir).refused()), "the refusal is recorded", 120)
        time.sleep(10)
    finally:
        lab.start()
    ended(run)
    assert last_start(run) == "1"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(8)}
    assert f"scontrol requeue {pod}: " in log(run)
    assert Marks(run.dir).refused() == []


def test_the_gather_job_brings_a_pod_back_whose_requeue_was_refused(
    lab: Lab, tmp_path: Path, make_campaign: Make
) -> None:
    wrapper = tmp_path / "bin" / "scontrol"
    wrapper.parent.mkdir()
    refuse = 'case ${MEGAFLOW_POD:+$1} in requeue) echo "Invalid job id specified" >&2; exit 1 ;; esac'
    wrapper.write_text(f'#!/bin/bash\n{refuse}\nexec /usr/bin/scontrol "$@"\n')
    wrapper.chmod(0o755)
    setup = f'  setup: ["export PATH={wrapper.parent}:$PATH"]\n'
    run, pod = started(make_campaign, 8, section(more=setup), "sleep 3; echo 42 > answer")
    lab.slurm("scancel", "--batch", "--signal=USR2", pod)
    ended(run)
    assert last_start(run) == "1"
    assert "requeue 7_0: Invalid job id".replace("7_0", pod) in log(run)
    assert len(run.job_ids("gather")) == 2, "the first came before the pod, and queued another"
    assert (run.path / "trajectories.h5").exists()


def test_a_pod_that_may_not_be_requeued_is_explained_and_resume_starts_another(lab: Lab, make_campaign: Make) -> None:
    run, pod = started(make_campaign, 8, section(), "sleep 3; echo 42 > answer")
    lab.slurm("scontrol", "update", f"jobid={pod}", "requeue=0")
    lab.slurm("scancel", "--batch", "--signal=USR2", pod)
    until(lambda: run.live_jobs(0) == set(), "every job has left", 120)
    said = cli("status", run.path).stdout
    assert f"pod {pod} ended, and Slurm did not requeue it: " in said
    assert (
        "it was submitted with Requeue=0, by the campaign file or by the site; continue with: megaflow-hpc resume"
        in said
    )
    assert cli("resume", run.path, timeout=240).returncode == 0
    assert Marks(run.dir).refused() == []
    assert run.status()["state"] == "finished"


def test_options_that_switch_requeues_off_are_named_when_planning(lab: Lab, make_campaign: Make) -> None:
    off = section(more="  requeue: false\n  no-requeue: true\n")
    done = cli("check", make_campaign(1, off, agent="oracle"))
    assert "slurm.pods: no-requeue is among its options" in done.stdout + done.stderr
    default = lab.dir / "slurm.conf"
    text = default.read_text()
    default.write_text(f"{text}\nJobRequeue=0\n")
    try:
        lab.slurm("scontrol", "reconfigure")
        said = cli("check", make_campaign(0, section(more="  requeue: false\n"), agent="oracle"))
        assert "JobRequeue=0" in said.stdout + said.stderr
        asked = lab.batch("sleep 1", "--requeue", "-A", "lab", "--mem=100")
        assert "Requeue=1" in lab.slurm("scontrol", "-o", "show", "job", asked), "what the scripts ask for wins"
    finally:
        default.write_text(text)
        lab.slurm("scontrol", "reconfigure")


def test_a_walltime_shorter_than_the_lead_is_refused_before_anything_is_queued(lab: Lab, make_campaign: Make) -> None:
    path = make_campaign(1, section().replace("time: 20", "time: 20, signal: B:USR2@1200"), agent="oracle")
    before = lab.slurm("squeue", "-h", "-o", "%A")
    done = cli("run", path)
    assert done.returncode == 2
    assert "slurm.pods.time: 1200 s, and its signal before the end is 1200 s" in done.stderr
    assert set(lab.slurm("squeue", "-h", "-o", "%A").split()) <= set(before.split())


def test_a_preempted_pod_uses_its_grace_time_and_gives_its_blocks_back(lab: Lab, make_campaign: Make) -> None:
    run, pod = started(make_campaign, 6, section("grace", slots=2), "sleep 12; echo 42 > answer")
    before = stored(run)
    time.sleep(3)  # the next rollouts run
    node = lab.slurm("squeue", "-h", "-j", pod, "-o", "%N")
    lab.slurm("sbatch", "-p", "cpu", "-w", node, "--exclusive", "-o", "/dev/null", "--mem=0", "--wrap", "sleep 3")
    began = time.monotonic()
    until(lambda: "preempts the allocation" in str(run.status()["pods"]), "the pod knows", 30)
    until(lambda: run.status()["pods"][0]["state"] == "drained", "the pod has drained", 60)
    assert time.monotonic() - began < 40, "it leaves as soon as nothing runs any more"
    assert stored(run) >= before + 2, "what ran was stored within the grace time"
    ended(run)
    assert last_start(run) == "1"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(6)}
    attempts = [event for event in run.dir.event_file(pod, "1").read_text().splitlines() if '"event": "pod"' in event]
    assert attempts
    assert array_of(pod) in site.ask("sacct", "-nX", "-j", array_of(pod), "-o", "JobID")
