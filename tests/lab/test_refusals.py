"""Slurm refuses or is away, and pods lose ranks, on a lab that kills a step some time after its first task's end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.slurm import site
from tests.support.campaigns import Make, rows, started, stored
from tests.support.labs import Lab, own_lab
from tests.support.processes import environment, processes_of, workers_of
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow]

WAIT_S = 15
"""WaitTime: after the first task has ended, srun would kill the others."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with own_lab(tmp_path_factory.mktemp("refusing"), site_name="waittime") as lab:
        yield lab


def begun(make_campaign: Make, tasks: int, solution: str, ranks: int = 2, more: str = "") -> tuple[Run, str]:
    """Starts a campaign of one pod on an idle lab."""
    until(lambda: not site.ask("squeue", "-h"), "the jobs of other tests have left")
    pods = f"partition: cpu, count: 1, ranks_per_node: {ranks}, slots_per_rank: 1, mem: 1G, time: 20"
    return started(make_campaign(tasks, f"slurm:\n  pods: {{{pods}}}\n{more}", agent="oracle", solution=solution))


def batch_shell(run: Run) -> int:
    """Pid of the pod's batch script, for signals while slurmctld is away."""
    places = {environment(pid)["MEGAFLOW_POD_DIR"] for pid in processes_of("megaflow_hpc.pod", str(run.path))}
    (pid,) = {int(place.split(".")[-2].split("-")[0]) for place in places}
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
    """And rollouts of lost ranks cost a retry and nothing else. Without its rank 0 the pod starts again."""
    run, _ = begun(make_campaign, 16, "sleep 3; echo 42 > answer", ranks=3)
    worker = workers_of(run.path)[0]
    os.kill(worker, signal.SIGKILL)
    killed_at, before = time.monotonic(), stored(run)
    until(lambda: run.status()["retries"], "the worker's rollouts are tried again")
    until(lambda: stored(run) > before, "the pod goes on")
    time.sleep(max(0.0, killed_at + WAIT_S + 5 - time.monotonic()))
    assert run.status()["state"] == "running"
    assert last_start(run) == "0"
    assert "First task exited" not in log(run)
    first = min(set(processes_of("megaflow_hpc.pod", str(run.path))) - set(workers_of(run.path)))
    os.kill(first, signal.SIGKILL)
    ended(run)
    assert last_start(run) == "1"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(16)}


def test_a_requeue_while_slurmctld_is_away_is_repeated(lab: Lab, make_campaign: Make) -> None:
    run, pod = begun(make_campaign, 8, "sleep 4; echo 42 > answer")
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
    run, pod = begun(make_campaign, 8, "sleep 3; echo 42 > answer", more=setup)
    lab.slurm("scancel", "--batch", "--signal=USR2", pod)
    ended(run)
    assert last_start(run) == "1"
    assert "requeue 7_0: Invalid job id".replace("7_0", pod) in log(run)
    assert len(run.job_ids("gather")) == 2, "the first came before the pod, and queued another"
    assert (run.path / "trajectories.h5").exists()
