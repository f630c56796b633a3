"""Two Slurm clusters of one site: pods of one campaign at both, and no answer of one taken for the other's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.slurm import accounting, ids
from tests.support.campaigns import Make, rows, stored
from tests.support.labs import cluster_beside
from tests.support.waiting import until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.usefixtures("slurm"),
    pytest.mark.skipif(os.environ.get("MEGAFLOW_SITE") == "1", reason="the site's own Slurm is used, no lab"),
]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster_beside(Path(os.environ["SLURM_CONF"]).parent, tmp_path_factory.mktemp("other")) as name:
        yield name


def test_pods_of_two_clusters_carry_out_one_campaign_and_each_is_asked_for_its_own(
    other: str, make_campaign: Make
) -> None:
    pools = (
        f"slurm:\n  pods: {{slots_per_rank: 2, mem: 1G, time: 10, pools: [{{clusters: {other}, partition: cpu}}]}}\n"
    )
    path = make_campaign(8, pools, agent="oracle", solution="sleep 4; echo 42 > answer")
    run = Campaign.from_yaml(path).submit()
    here, there = sorted(run.job_ids("pods"), key=ids.cluster_of)
    assert (ids.cluster_of(here), ids.cluster_of(there)) == ("", other)
    assert {handle.job_id for handle in run.jobs} >= {f"{here}_0", f"{ids.number(there)}_0@{other}"}
    until(lambda: len([pod for pod in run.status()["pods"] if pod["running"]]) == 2, "a pod of each cluster is at work")
    assert {pod["pod"] for pod in run.status()["pods"]} == {f"{here}_0.0", f"{ids.number(there)}_0@{other}.0"}
    live = accounting.live_jobs([here, there])
    assert {state.id for state in live.values() if state.state == "RUNNING"} == {
        f"{here}_0",
        f"{ids.number(there)}_0@{other}",
    }
    ids.scancel([there], "--signal=KILL", "--full")
    until(
        lambda: {state.id for state in run.slurm_jobs.live_pods(0) or []} <= {f"{here}_0"},
        "the other cluster's pod is gone",
    )
    assert f"{here}_0" in {state.id for state in run.slurm_jobs.live_pods(0) or []}, "this cluster's pod works on"
    assert stored(run) < 8
    assert Run(run.path).resume()  # marks the lost pod as gone, by the word of its own cluster
    assert run.wait(timeout_s=900)["state"] == "finished"
    assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(8)}
    gone = {path.name for path in (run.dir.ledger / "gone").iterdir()}
    assert gone == {f"{ids.number(there)}_0@{other}.0"}


def test_a_partition_that_the_other_cluster_lacks_is_named(other: str, make_campaign: Make) -> None:
    campaign = make_campaign(1, f"slurm: {{pods: {{pools: [{{clusters: {other}, partition: nowhere}}]}}}}\n")
    command = ["python", "-m", "megaflow_hpc", "submit", str(campaign), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"no partition 'nowhere' at {other}; there are: cpu, gpu, preempt" in done.stderr
