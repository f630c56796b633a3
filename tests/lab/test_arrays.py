"""One campaign as many arrays: where jobs must be few, and with pods more than before or of several pools."""

from __future__ import annotations

import json
import subprocess

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm import limits
from tests.support.campaigns import Make, cli, rows, verb
from tests.support.labs import pods
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def test_a_campaign_of_two_partitions_grows_once_and_shrinks(make_campaign: Make) -> None:
    extra = pods(count=1, ranks=1).replace("time: 10", "time: 10, pools: [{partition: preempt, count: 1, time: 5}]")
    campaign = make_campaign(18, extra, agent="oracle", solution="sleep 4; echo 42 > answer")
    dry = json.loads(cli("submit", campaign, "--dry-run", "--json").stdout)["scripts"]
    assert ["--partition=preempt" in text for text in dry.values()] == [False, True, False]
    run = Campaign.from_yaml(campaign).submit()

    def at_work() -> int:
        return len([pod for pod in run.status()["pods"] if pod["running"]])

    until(lambda: at_work() == 2, "pods of both partitions run rollouts")
    first = json.loads(verb("scale", run.path, "--pods", "3", "--json").stdout)
    assert len(first["added"]) == 1
    assert run.scale(3) == {"added": [], "leaving": []}
    until(lambda: at_work() == 3, "the added pod runs rollouts")
    changed = run.scale(2)
    assert len(changed["leaving"]) == 1
    assert run.scale(2) == {"added": [], "leaving": []}
    summary = run.wait(timeout_s=900)
    assert summary["state"] == "finished"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(18)}
    arrays = {pod["pod"].split("_")[0] for pod in summary["pods"]}
    assert arrays == set(run.job_ids("pods")), "pods of all arrays took part"
    assert len(arrays) == 3
    assert len(run.job_ids("gather")) == 1
    left = [pod for pod in summary["pods"] if pod["job_id"] == changed["leaving"][0]]
    assert [pod["state"] for pod in left] == ["drained"], "it drained and was not requeued"
    assert verb("scale", run.path, "--pods", "5").stdout.strip() == "the campaign is finished"


def test_a_qos_that_allows_twelve_jobs_gets_as_many_pods_as_fit(make_campaign: Make) -> None:
    allowed = limits.allowance({"qos": "short"})
    assert (allowed.submit, allowed.running) == (12, 4)
    campaign = make_campaign(2, pods(count=20, ranks=1) + "  qos: short\n  hold: true\n")
    run = Campaign.from_yaml(campaign).submit()
    try:
        live = run.slurm_jobs.live(0)
        assert live is not None
        assert len(live) == 12  # with the gather job
        assert "QOS short allows 12 jobs at once" in run.slurm_jobs.notices[0]
        text = subprocess.check_output(["scontrol", "show", "job", run.job_ids("pods")[0]], text=True)
        assert "ArrayTaskThrottle=4" in text
        text = subprocess.check_output(["scontrol", "show", "job", run.job_ids("gather")[0]], text=True)
        assert "TimeLimit=00:30:00" in text, "what the QOS allows of an hour"
        other = Campaign.from_yaml(campaign)
        with pytest.raises(SiteError, match="QOS short allows 12 jobs at once and 12 are queued"):
            other.submit()
    finally:
        run.cancel()
    until(lambda: run.live_jobs(0) == set(), "all jobs are gone")
    campaign.write_text(campaign.read_text().replace("count: 20", "count: 2"))
    run = Campaign.from_yaml(campaign).submit()
    try:
        assert len(run.scale(20)["added"]) == 9
        assert "9 of 18 pods are queued" in run.slurm_jobs.notices[-1]
        assert "--pods 20" in run.slurm_jobs.notices[-1]
    finally:
        run.cancel()


def test_jobs_that_nobody_wrote_down_are_found_by_their_comment(make_campaign: Make) -> None:
    run = Campaign.from_yaml(make_campaign(1, pods(count=1, ranks=1) + "  hold: true\n")).submit()
    ids = run.job_ids()
    for path in run.dir.jobs.iterdir():
        path.unlink()  # as if the submitting process had been killed in between
    again = Run(run.path)
    assert again.job_ids() == []
    assert again.cancel().jobs == ids
    assert {record.role for record in again.slurm_jobs.arrays.records()} == {"pods", "gather"}
    until(lambda: again.live_jobs(0) == set(), "all jobs are gone")
