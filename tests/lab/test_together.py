"""Other ways into the same pods: engines and pod as one job and one world, submitit, a job that is there already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.errors import ConfigError
from tests.support.campaigns import CALL, Make, rows, verb
from tests.support.labs import pods, sbatch
from tests.support.places import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]
MODEL = "model: {engine: scripted, script: answers.yaml, gpus: 0, servers: 2}\n"


@pytest.fixture
def together(tmp_path: Path, make_campaign: Make) -> Path:
    """A campaign of which every rollout asks the model, engines and pod in one allocation."""
    (tmp_path / "answers.yaml").write_text('default: ["42"]\n')
    command = json.dumps("python3 -c '" + CALL.replace("'", "'\\''") + "'")
    extra = MODEL + pods(count=1) + "  together: true\n  servers: {partition: gpu, mem: 400M}\n"
    campaign = make_campaign(6, extra, agent=f"{{name: command, args: {{command: {command}}}}}")
    campaign.write_text(campaign.read_text().replace("network: none", "network: gateway"))
    return campaign


def test_engines_and_pod_are_one_heterogeneous_job_and_one_world(together: Path) -> None:
    run = Campaign.from_yaml(together).submit()
    summary = run.wait(timeout_s=900)
    assert summary["state"] == "finished"
    assert rows(run.path) == {f"task{n}/default/0": ("completed", 1) for n in range(6)}
    [pod] = summary["pods"]
    events = [json.loads(line) for path in run.dir.events.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert {event["rank"] for event in events if event["event"] == "worker"} == {1}, "rank 0 leads, 2 and 3 are engines"
    engines = [event for event in events if event["event"] == "engine"]
    assert {event["node"][:3] for event in engines} == {"gpu"}
    assert len(engines) == 2
    assert pod["node"].startswith("cpu")
    assert [record.role for record in run.slurm_jobs.arrays.records()] == ["pods", "gather"]
    until(lambda: run.live_jobs(0) == set(), "engines end with the pod")


def test_one_allocation_has_one_pod_and_something_to_be_together_with(tmp_path: Path, make_campaign: Make) -> None:
    (tmp_path / "answers.yaml").write_text('default: ["42"]\n')
    campaign = make_campaign(1, pods(count=1) + "  together: true\n")
    with pytest.raises(ConfigError, match="the campaign has no model; leave together out"):
        Campaign.from_yaml(campaign).plan()
    text = campaign.read_text().replace("count: 1", "count: 2").replace("[oracle, nop]", "mini-swe-agent")
    campaign.write_text(text + MODEL)
    with pytest.raises(ConfigError, match=r"campaign\.yaml:\d+: slurm\.together: 2 pods, expected one"):
        Campaign.from_yaml(campaign).plan()


def test_a_pod_runs_inside_a_job_that_is_there_already(tmp_path: Path, make_campaign: Make) -> None:
    run = verb("plan", make_campaign(3, pods(), agent="oracle")).stdout.strip()
    script = tmp_path / "mine.sbatch"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --ntasks-per-node=2 --cpus-per-task=1 --mem=1G --time=10\n"
        f"MEGAFLOW_REQUEUES=0 bash {ROOT}/sbatch/sandbox_pods.sbatch {run}\necho my own work goes on\n"
    )
    log = tmp_path / "log"
    assert sbatch("-o", log, script) == "COMPLETED"
    assert log.read_text().rstrip().endswith("my own work goes on")
    assert verb("gather", run).returncode == 0
    assert rows(run) == {f"task{n}/oracle/0": ("completed", 1) for n in range(3)}
