"""Batch scripts: one pure function, the same for --dry-run, submission and the files under sbatch/."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megaflow_hpc import config
from megaflow_hpc.rundir import RunDir
from megaflow_hpc.slurm import accounting, script

ROOT = Path(__file__).parents[2]
CAMPAIGN = {
    "name": "fix-bugs",
    "tasks": "t/*",
    "agent": "oracle",
    "slurm": {"account": "lab", "extra": {"qos": "long"}, "pods": {"partition": "cpu", "count": 3, "mem_gb": 1.5}},
}


@pytest.mark.parametrize(("role", "name"), [("pods", "sandbox_pods"), ("servers", "model_servers")])
def test_the_scripts_under_sbatch_are_what_the_builder_makes(role: script.Role, name: str) -> None:
    assert (ROOT / "sbatch" / f"{name}.sbatch").read_text() == script.by_hand(role)


@pytest.mark.parametrize("role", ["pods", "servers", "gather"])
def test_every_script_is_valid_shell(role: script.Role) -> None:
    text = script.script(script.Job(role, {}, run="/a dir/run"))
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "RUN='/a dir/run'" in text


def test_options_come_from_the_campaign_file() -> None:
    text = script.script(script.pod_job(config.parse(CAMPAIGN), RunDir("/runs/r1")))
    for line in (
        "--array=0-2",
        "--job-name=fix-bugs",
        "--comment=r1",
        "--account=lab",
        "--partition=cpu",
        "--mem=1500M",
        "--qos=long",
        "--signal=B:USR2@60",
        "--requeue",
        "--output=/runs/r1/logs/pod-%A_%a.log",
    ):
        assert f"#SBATCH {line}\n" in text
    assert text.count("srun --mpi") == 1


def test_engine_arrays_of_different_sizes_keep_their_indices() -> None:
    job = script.server_job(config.parse(CAMPAIGN), RunDir("/r"), 2, 4, first=3)
    assert job.indices == "3-4"
    assert "#SBATCH --gres=gpu:4\n" in script.script(job)


def test_job_arrays_as_squeue_prints_them_are_expanded() -> None:
    assert accounting.expand("7_[0-2,5%3]") == ["7_0", "7_1", "7_2", "7_5"]
    assert accounting.expand("7_[1-7:3]") == ["7_1", "7_4", "7_7"]
    assert accounting.expand("7_3") == ["7_3"]
    assert accounting.expand("7") == ["7"]
