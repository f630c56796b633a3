"""A service of the whole campaign in a Slurm job of its own: requeued, noticed, cancelled."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megaflow_hpc import Campaign
from megaflow_hpc.slurm import site
from tests.support.campaigns import Make, rows, verb
from tests.support.labs import pods
from tests.support.services import write_counting
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def test_a_service_job_is_requeued_and_every_rollout_counts_once(
    tmp_path: Path, base_sif: Path, make_task: Make
) -> None:
    slurm = yaml.safe_load(pods(count=1, ranks=1))["slurm"]
    campaign = write_counting(tmp_path, base_sif, make_task, pause_s=3, slurm=slurm)
    run = Campaign.from_yaml(campaign).submit()
    until(lambda: run.status()["rollouts"]["running"], "a rollout runs, so the service answers", 240)
    (server,) = run.status()["servers"]
    assert (server["policy"], server["state"]) == ("service:counter", "serving")
    assert run.job_ids("servers")
    site.ask("scontrol", "requeue", server["job_id"])
    run.wait(timeout_s=900)
    assert set(rows(run.path).values()) == {("completed", 1.0)}, verb("status", run.path).stdout
    assert len(rows(run.path)) == 4
    logs = "".join(path.read_text() for path in (run.path / "logs").glob("server*"))
    assert logs.count("serving at https://") >= 2, logs
    until(lambda: not run.live_jobs(0), "the service's job has ended with the campaign", 120)
