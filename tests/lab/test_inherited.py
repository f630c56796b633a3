"""What a job inherits and counts is decided by the campaign, in whatever way and from wherever it is submitted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.campaigns import Make, cli, verb
from tests.support.labs import sbatch
from tests.support.places import ROOT

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm")]

PODS = "slurm:\n  requeues: 0\n  pods: {partition: cpu, count: 1, ranks_per_node: 2, mem: 1G, time: 10}\n"


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
        "umask 077\n"
        f"cd {ROOT} && srun -n1 {' '.join(words)} >{tmp_path}/out\n"
    )
    log = tmp_path / "log"
    assert sbatch("-o", log, script, timeout_s=240) == "COMPLETED", log.read_text()
    result = json.loads((tmp_path / "out").read_text())
    assert result["rollouts"]["completed"] == 2
    assert [pod["pod"].rpartition(".")[2] for pod in result["pods"]] == ["0"]


def test_pods_that_never_start_are_named_with_their_cause(make_campaign: Make) -> None:
    extra = PODS.replace("slurm:\n", "slurm:\n  setup: ['export PYTHONHOME=/nowhere']\n")
    done = cli("run", make_campaign(2, extra, agent="oracle"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "before any rollout: " in done.stdout
    assert "ModuleNotFoundError: No module named 'encodings'" in done.stdout
    run = done.stdout.splitlines()[-1].removeprefix("results: ")
    status = json.loads(verb("status", run, "--json").stdout)
    assert status["state"] == "stopped"
    (pod,) = status["unstarted"]
    assert os.path.isfile(pod["log"])
    assert pod["exit_status"]
    assert "before any rollout" in verb("status", run).stdout
