"""Sites that differ: partitions that allocate whole nodes, and an interpreter for each role."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.slurm import accounting, site
from megaflow_hpc.trajectories import open_trajectories
from tests.support.campaigns import Make, cli, rows
from tests.support.labs import Lab, own_lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with own_lab(tmp_path_factory.mktemp("differing"), site_name="exclusive") as lab:
        site.partitions.cache_clear()
        yield lab
        site.partitions.cache_clear()


def python(folder: Path, role: str) -> Path:
    """An interpreter of its own for a role: it writes down the first words of each call, and runs ours."""
    program = folder / f"python-{role}"
    program.write_text(f'#!/bin/sh\necho "$1 $2 $3" >>{folder}/{role}.calls\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def test_ranks_fill_the_nodes_of_a_partition_that_allocates_whole_ones(
    lab: Lab, make_campaign: Make, tmp_path: Path
) -> None:
    assert "OverSubscribe=EXCLUSIVE" in lab.slurm("scontrol", "show", "partition", "cpu")
    path = make_campaign(1, "slurm:\n  pods: {partition: cpu, count: 2, mem: 2G, time: 40}\n")
    done = cli("check", path)
    assert done.returncode == 0, done.stderr
    assert "a pod uses 4 of the 8 CPUs charged for it, because cpu allocates whole nodes" in done.stderr
    _, estimate = Campaign.from_yaml(path).estimate(rollout_seconds=60)
    assert [job.cores for job in estimate.jobs if job.role == "pods"] == [8]
    path.write_text(path.read_text().replace("mem:", "ranks_per_node: fill, mem:"))
    said = json.loads(cli("check", path, "--json").stdout)
    assert (said["ok"], said["mistakes"], said["site"], said["warnings"]) == (True, [], [], [])
    done = cli("run", path, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert {status for status, _ in rows(tmp_path / "run").values()} == {"completed"}
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["campaign"]["slurm"]["pods"]["ranks_per_node"] == 4
    [array] = [
        json.loads(p.read_text())["id"] for p in (tmp_path / "run/ledger/jobs").iterdir() if "pods" in p.read_text()
    ]
    assert {start.cores for start in accounting.efficiencies([array])} == {8}


def test_each_role_runs_by_its_own_interpreter(lab: Lab, make_campaign: Make, tmp_path: Path) -> None:
    used = {role: python(tmp_path, role) for role in ("all", "pods", "pool", "servers")}
    (tmp_path / "asks.py").write_text(
        "import asyncio, json, os, sys\nfrom megaflow_hpc.types import AgentResult\n"
        "class Tells:\n    async def run(self, task, sandbox, model):\n"
        "        said = os.environ['MEGAFLOW_SCRATCH']\n"
        "        return AgentResult(messages=[{'role': 'assistant', 'content': said}])\n"
    )
    scratch = tmp_path / "nvme"
    scratch.mkdir()
    setup = {role: f"export MEGAFLOW_PYTHON={program}" for role, program in used.items()}
    slurm = {
        "setup": setup["all"],
        "pods": {
            "partition": "cpu",
            "mem": "2G",
            "time": 20,
            "setup": [
                setup["pods"],
                f"export MEGAFLOW_SCRATCH={scratch}",
                f'[ "$SLURM_JOB_PARTITION" != preempt ] || {setup["pool"]}',
            ],
            "pools": [{"partition": "preempt"}],
        },
        "servers": {"partition": "gpu", "time": 20, "setup": [setup["servers"]]},
    }
    model = "model: {engine: scripted, script: answers.yaml, gpus: 1}\nsamples: 6\n"
    path = make_campaign(1, f"{model}slurm: {json.dumps(slurm)}\n", agent="asks:Tells", answers=["42"])
    done = cli("run", path, "--run-dir", tmp_path / "run", MEGAFLOW_SCRATCH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    calls = {role: (tmp_path / f"{role}.calls").read_text() for role in used if (tmp_path / f"{role}.calls").exists()}
    assert set(calls) == {"pods", "pool", "servers"}, "the line for all jobs is overridden by each role"
    assert {"-m megaflow_hpc janitor", "-m megaflow_hpc.pod"} <= {
        line.partition(f" {tmp_path}")[0] for line in calls["pods"].splitlines()
    }
    assert "-m megaflow_hpc.pod" in calls["pool"]
    assert "-m megaflow_hpc.model.server" in calls["servers"]
    with open_trajectories(tmp_path / "run") as store:
        assert {row.messages[-1]["content"] for row in store} == {str(scratch)}
