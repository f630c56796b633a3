"""Engine servers between none and some on the lab: held until pods have work, let go by a pod, ended with them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from tests.support.scripted import SOLVE
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm"), pytest.mark.timeout(600)]

CAMPAIGN = """\
name: elastic
tasks: tasks/*
agent: {name: mini-swe-agent, max_turns: 3}
samples: 2
model: {engine: scripted, script: answers.yaml, servers: [0, 2], gpus: 1}
slurm:
  pods: {partition: cpu, count: 1, ranks_per_node: 2, slots_per_rank: 2, mem: 2G, time: 15}
  servers: {partition: gpu, time: 15}
"""


def states(run: Run) -> set[str]:
    return {server["state"] for server in run.status()["servers"]}


def test_no_server_runs_before_pods_have_work_and_none_after(
    tmp_path: Path, base_sif: Path, write_task: Callable[..., Path]
) -> None:
    write_task(tmp_path / "tasks", "alpha")
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN + f"environment: {{images: {{base: {base_sif}}}}}\n")
    run = Campaign.from_yaml(tmp_path / "campaign.yaml").plan()
    run.start("slurm")
    assert states(run) == {"held"}
    # Nobody but the pod's child lets a server go.
    until(lambda: run.status()["state"] == "finished", "the campaign is finished", 300)
    assert run.status()["rollouts"]["completed"] == 2
    (log,) = run.dir.logs.glob("pod-*.log")
    assert log.read_text().count("let engine server") == 1
    until(lambda: not run.live_jobs(0), "every job has left", 300)  # the held one too
    (servers,) = run.job_ids("servers")
    shown = subprocess.check_output(["sacct", "-n", "-X", "-P", "-j", servers, "-o", "State"], text=True).split("\n")
    assert sorted(word.split()[0] for word in shown if word) == ["CANCELLED", "COMPLETED"]
