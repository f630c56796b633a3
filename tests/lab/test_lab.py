"""The lab itself: a second one beside whatever runs, broken on purpose, and ended without a trace.

The steps build on one another (starting Slurm is the slow part), so they are one story per lab.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.labs import Lab, alive, of_lab
from tests.support.waiting import eventually

DAEMONS = {
    "munged",
    "mariadbd",
    "slurmdbd",
    "slurmctld",
    *(f"slurmd-{n}{i}" for n, c in (("cpu", 4), ("gpu", 2)) for i in range(1, c + 1)),
}

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.getuid() == 0, reason="a lab belongs to an ordinary user"),
    pytest.mark.skipif(os.environ.get("MEGAFLOW_SITE") == "1", reason="the site's own Slurm is used, no lab"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    lab.start()
    yield lab
    lab.call("stop")


def test_a_new_lab_is_complete_and_its_status_says_so(lab: Lab) -> None:
    report = lab.status()
    assert report["state"] == "running"
    assert set(report["daemons"]) == DAEMONS
    assert all(alive(daemon) for daemon in report["daemons"].values())
    assert report["nodes"] == {f"cpu{i}": "idle" for i in range(1, 5)} | {f"gpu{i}": "idle" for i in (1, 2)}
    assert set(lab.slurm("sinfo", "-h", "-o", "%R").split()) == {"cpu", "gpu", "preempt"}
    assert "WaitTime                = 0 sec" in lab.slurm("scontrol", "show", "config")


def test_a_healthy_lab_is_used_again(lab: Lab) -> None:
    before = lab.status()["daemons"]
    assert "is up" in lab.start()
    assert lab.status()["daemons"] == before


def test_only_root_makes_a_lab_for_several_users(lab: Lab) -> None:
    done = lab.call("start", "--users", "somebody,else")
    assert done.returncode == 1
    assert "only root's slurmds can start jobs of others" in done.stderr
    assert lab.dir.stat().st_mode & 0o777 == 0o700


def test_its_daemons_hold_nothing_of_the_terminal(lab: Lab) -> None:
    for name, daemon in lab.status()["daemons"].items():
        assert os.readlink(f"/proc/{daemon['pid']}/fd/0") == "/dev/null", name
        assert os.getsid(daemon["pid"]) == daemon["pid"], name
        assert str(lab.dir) in os.readlink(f"/proc/{daemon['pid']}/fd/2"), name


def test_an_array_runs_and_is_accounted_for(lab: Lab) -> None:
    job = lab.batch("echo element $SLURM_ARRAY_TASK_ID", "--array=0-3", "--output=%A_%a.out", "--mem=100")

    def states() -> list[str]:
        return lab.slurm("sacct", "-nXP", "-j", job, "-o", "state,account").split()

    assert eventually(lambda: states() == ["COMPLETED|lab"] * 4), states()
    assert [(lab.dir / f"{job}_{i}.out").read_text() for i in range(4)] == [f"element {i}\n" for i in range(4)]


def test_a_gpu_is_assigned_by_number(lab: Lab) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES; sleep 4"
    options = ("--partition=gpu", "--nodelist=gpu1", "--gres=gpu:1", "--output=%j.out", "--mem=100")
    first = lab.batch(script, *options)
    logs = [lab.dir / f"{job}.out" for job in (first, lab.batch(script, *options))]
    assert eventually(lambda: all(log.exists() and log.read_text() for log in logs))
    assert {log.read_text().strip() for log in logs} == {"0", "1"}


def test_srun_starts_one_mpi_world_over_two_nodes(lab: Lab) -> None:
    code = (
        "import os; from mpi4py.MPI import COMM_WORLD as c; print(c.allgather((c.rank, os.environ['SLURMD_NODENAME'])))"
    )
    output = lab.slurm("srun", "--mpi=pmi2", "-N2", "-n2", "--mem=200", sys.executable, "-c", code)
    (told,) = set(output.splitlines())  # by both ranks
    assert re.fullmatch(r"\[\(0, 'cpu(\d)'\), \(1, 'cpu(?!\1)\d'\)\]", told), told


def test_a_step_speaks_pmix_on_nodes_that_are_one_host(lab: Lab) -> None:
    told = 'echo "$SLURMD_NODENAME $PMIX_HOSTNAME $PMIX_RANK"'
    output = lab.slurm("srun", "--mpi=pmix", "-N2", "-n4", "--ntasks-per-node=2", "--mem=200", "sh", "-c", told)
    found = sorted((int(rank), node, name) for node, name, rank in map(str.split, output.splitlines()))
    first, second = found[0][1], found[-1][1]  # any two that are free
    assert first != second
    assert found == [(0, first, first), (1, first, first), (2, second, second), (3, second, second)]
    assert "can not load PMIx" not in (lab.dir / "logs" / f"slurmd-{first}.log").read_text()


def test_killed_daemons_are_started_again_and_jobs_survive(lab: Lab) -> None:
    # The job ends when told, after the repair: it proves that it outlived its slurmd and the controller.
    flag = lab.dir / "go"
    job = lab.batch(
        f"while ! [ -e {flag} ]; do sleep 0.2; done; echo survived", "-w", "cpu1", "--output=%j.out", "--mem=100"
    )
    assert eventually(lambda: lab.slurm("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING")
    # The controller writes its job table every few seconds; a job that it had not written yet is lost with it.
    running, table = time.time(), lab.dir / "state" / "job_state"
    assert eventually(lambda: table.exists() and table.stat().st_mtime > running)
    before = lab.status()["daemons"]
    lab.kill("slurmctld", "slurmd-cpu1")
    assert lab.status()["state"] == "broken"
    lab.start()
    after = lab.status()
    assert after["state"] == "running"
    assert {name for name in DAEMONS if after["daemons"][name] != before[name]} == {"slurmctld", "slurmd-cpu1"}
    flag.touch()
    output = lab.dir / f"{job}.out"
    assert eventually(lambda: output.read_text() == "survived\n"), output.read_text()
    assert eventually(lambda: "COMPLETED" in lab.slurm("sacct", "-nX", "-j", job, "-o", "state"))


def test_a_lab_without_its_database_and_munge_is_repaired(lab: Lab) -> None:
    lab.kill("mariadbd", "munged")
    lab.start()
    assert lab.status()["state"] == "running"
    assert lab.slurm("srun", "--mem=100", "echo", "again") == "again"


def test_a_recycled_pid_is_not_taken_for_a_daemon(lab: Lab) -> None:
    record = lab.dir / "lab.json"
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        state = json.loads(record.read_text())
        lab.kill("slurmd-gpu2")
        state["daemons"]["slurmd-gpu2"]["pid"] = bystander.pid  # as if the number had been given to another process
        record.write_text(json.dumps(state))
        lab.start()
        assert lab.status()["daemons"]["slurmd-gpu2"]["pid"] != bystander.pid
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_stop_ends_jobs_and_daemons_and_nothing_else(lab: Lab, tmp_path: Path) -> None:
    escaped = tmp_path / "escaped"
    # A process that left the job's session: Slurm without cgroups loses sight of it.
    job = lab.batch(f"setsid sleep 900 & echo $! > {escaped}; sleep 900", "--output=/dev/null", "--mem=100")
    assert eventually(lambda: escaped.exists() and escaped.read_text().strip() != ""), job
    daemons = lab.status()["daemons"]
    done = lab.call("stop")
    assert done.returncode == 0, done.stderr
    assert not [name for name, daemon in daemons.items() if alive(daemon)]
    assert eventually(lambda: not Path(f"/proc/{escaped.read_text().strip()}").exists())  # killed; init buries it
    assert of_lab(lab.dir) == []
    assert lab.call("status").returncode == 3
    assert lab.call("stop").returncode == 0
