"""What our processes ask of slurmctld: counts of requests by kind, as sdiag tells them. No timings."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.live_jobs import BURST, REFILL_S
from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm import accounting, ids, limits, site
from tests.bench.requests import requests
from tests.support.campaigns import Make, cli, rows
from tests.support.labs import Lab, own_lab, pods
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]

WHOLE_TABLE = "REQUEST_JOB_INFO"
SQUEUE = {"REQUEST_JOB_USER_INFO": 1, "REQUEST_PARTITION_INFO": 1}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with own_lab(tmp_path_factory.mktemp("counted")) as lab:
        yield lab


def counted(before: Counter[str]) -> dict[str, int]:
    """Returns the requests since, by kind, without those of sdiag."""
    since = requests() - before
    del since["REQUEST_STATS_INFO"]
    return dict(since)


def test_each_query_is_the_smallest_that_slurm_has(lab: Lab) -> None:
    arrays = [lab.batch("sleep 100", "--hold", "--array=0-99") for _ in range(2)]

    def asked(query: str) -> dict[str, int]:
        before = requests()
        if query == "live_jobs":
            assert len(accounting.live_jobs(arrays)) == 200
        elif query == "allowance":
            limits.allowance({})
        elif query == "scancel":
            ids.scancel([f"{array}_{n}" for array in arrays for n in range(0, 50, 2)])
        elif query == "release":
            site.ask("scontrol", "release", *arrays)
        elif query == "accounting":
            accounting.finished_jobs(arrays)
            accounting.efficiencies(arrays)
        return counted(before)

    assert asked("live_jobs") == SQUEUE, "and not REQUEST_JOB_INFO for several ids"
    assert WHOLE_TABLE not in asked("allowance")
    assert asked("scancel") == {"REQUEST_KILL_JOB": 2}, "one for each array, not for each of 50 elements"
    # Slurm's commands would cut this list of elements after 64 characters.
    assert len([job for job in accounting.live_jobs(arrays).values() if job.live]) == 150
    assert asked("release") == {"REQUEST_UPDATE_JOB": 2}
    assert asked("accounting") == {}, "slurmdbd answers these"
    before = requests()
    subprocess.run(["squeue", "-h", "-j", ",".join(arrays)], check=True, capture_output=True)
    assert counted(before)[WHOLE_TABLE] == 1, "this Slurm fetches the whole table for several ids"
    ids.scancel(arrays)
    until(lambda: not lab.slurm("squeue", "-h"), "the queue is empty")


def test_a_campaign_that_is_followed_watched_and_looked_at_asks_within_its_budget(
    lab: Lab, make_campaign: Make
) -> None:
    run = Campaign.from_yaml(make_campaign(6, pods(count=2, ranks=1), agent="oracle")).submit()
    until(lambda: run.live_jobs() is not None, "squeue has answered")
    before = requests()
    with subprocess.Popen(
        [sys.executable, "-m", "megaflow_hpc", "watch", str(run.path)], stdout=subprocess.DEVNULL
    ) as watch:
        for _ in range(10):
            cli("status", run.path)
        assert run.wait(timeout_s=900)["state"] == "finished"
        watch.terminate()
    assert len(rows(run.path)) == 6
    found = counted(before)
    assert WHOLE_TABLE not in found, found
    assert found["REQUEST_JOB_USER_INFO"] <= BURST + 1, f"run, watch and 10 times status together: {found}"
    an_hour = (BURST + 3600 / REFILL_S) * sum(SQUEUE.values())
    assert an_hour <= 60


@pytest.mark.usefixtures("fresh_answers")
def test_a_pod_that_slurm_ended_is_replaced_and_one_that_was_cancelled_is_not(lab: Lab, make_campaign: Make) -> None:
    extra = (
        "slurm: {requeue: false, no-requeue: true, pods: {count: 3, ranks_per_node: 1, cpus_per_rank: 1, "
        "slots_per_rank: 1, mem: 3G, time: 10}}\n"
    )
    run = Campaign.from_yaml(make_campaign(24, extra, agent="oracle", solution="sleep 3; echo 42 > answer")).submit()
    (array,) = run.job_ids("pods")
    until(lambda: len([p for p in run.status()["pods"] if p["running"] and p["stored"]]) == 3, "all pods store")
    before = requests()
    node = run.slurm_jobs.live(0)[f"{array}_1"].node
    site.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    site.ask("scancel", f"{array}_2")
    with suppress(SiteError):  # slurmd may have registered again, and the node is back already
        site.ask("scontrol", "update", f"nodename={node}", "state=resume")
    until(lambda: "down" not in site.ask("sinfo", "-h", "-n", node, "-o", "%T"), f"{node} is back")
    assert run.wait(timeout_s=900)["state"] == "finished"
    arrays = [record for record in run.slurm_jobs.arrays.records() if record.role == "pods"]
    assert [record.elements for record in arrays] == [3, 1], "one replacement, for the pod whose node was lost"
    assert len(rows(run.path)) == 24
    assert WHOLE_TABLE not in counted(before)
